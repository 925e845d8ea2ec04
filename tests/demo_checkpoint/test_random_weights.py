from pathlib import Path

import numpy as np
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.demo_checkpoint import TRAINED, has_random_weights
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.server.rendering import templates_of
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.precision import Precision
from cosyvoice_triton.voice.prompt import Prompt

from tests.conftest import load_model
from tests.random_weights import silence, token2wav
from tests.random_weights.__main__ import main
from tests.random_weights.checkpoint import make
from tests.random_weights.llm import SILENT_IDS
from tests.support.checkpoints import DIT_DIR, UNET_DIR

pytestmark = pytest.mark.slow  # each test makes networks


def test_a_complete_directory_is_kept_an_interrupted_one_made_again_and_any_other_refused(
    demo_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(demo_models)]) == 0 and "exists already, RANDOM" in capsys.readouterr().out
    assert has_random_weights(demo_models / DIT_DIR) and not has_random_weights(TRAINED / DIT_DIR)

    def interrupted(path: Path, **how: object) -> None:
        raise KeyboardInterrupt

    dest = tmp_path / "models"
    with monkeypatch.context() as patch:
        patch.setattr(token2wav, "write_flow", interrupted)
        assert main([str(dest)]) == 130
    (dest / "left" / "over").mkdir(parents=True)
    assert make(dest) and (dest / UNET_DIR / "flow.pt").is_file() and not (dest / "left").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert main([str(tmp_path / "mine")]) == 1 and "no random weights" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("stack", stacks.BUILT_IN, ids=lambda stack: stack.name)
def test_silent_tokens_are_heard_as_silence_by_a_model_of_the_measurement(
    stack: Stack, demo_models: Path, tmp_path: Path
) -> None:
    """And nothing else is: of a first hop, its look-ahead, and one that begins within what the first withheld."""
    silence.register(stack.name, tmp_path)
    try:
        found = templates_of(StackOptions(models_dir=demo_models, stack=stack.name))
        quiet = load_model(found[stack.token2wav] / "1" / "model.py").TritonPythonModel.stack
    finally:
        stacks.unregister(stack.name)
        stacks.register(stack)
    tokens = np.array([*SILENT_IDS[:24], *range(50), *SILENT_IDS[:2]])
    voice = Prompt(np.arange(25), np.full((50, 80), -4, np.float32), np.ones(192, np.float32), "")
    limits, precision = BatchLimits(max_streams=1, chunk_boundary=stack.chunk_boundary), Precision(*[torch.float32] * 2)
    heard = []
    for each in (stack, quiet):
        engine = Token2Wav.load(each, demo_models / stack.checkpoint, device="cpu", limits=limits, precision=precision)
        for _ in range(2):  # the second stream has the slot of the first one
            stream, offset, parts = engine.open(voice), 0, []
            for end in (28, 53, len(tokens)):
                new = tokens[0 if stack.cumulative else offset : end]
                chunk = engine.chunk(stream, new, final=end == len(tokens), offset=offset)
                parts += engine.step([chunk])
                offset += chunk.new
            engine.close(stream)
        heard.append(np.concatenate(parts))
    plain, made = heard
    assert plain[: 24 * silence.TOKEN_SAMPLES].any()
    begin, end = 24 * silence.TOKEN_SAMPLES, 74 * silence.TOKEN_SAMPLES
    assert not made[:begin].any() and not made[end:].any()
    np.testing.assert_array_equal(made[begin:end], plain[begin:end])
