from pathlib import Path

import numpy as np
import pytest
import torch
from cosyvoice_triton import samples
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.demo_checkpoint import TRAINED, has_random_weights
from cosyvoice_triton.llm.interface import LLMPrompt
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.voice.audio import load_audio
from cosyvoice_triton.voice.encoders import AudioTokenizer

from tests.random_weights import token2wav
from tests.random_weights.__main__ import main
from tests.random_weights.checkpoint import make
from tests.random_weights.llm import FIRST_UTTERED
from tests.support.checkpoints import COSYVOICE3_DIR, DIT_DIR, LLM_DIR, UNET_DIR

pytestmark = pytest.mark.slow  # each test makes networks


@pytest.fixture(scope="module")
def llm(demo_models: Path):
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model, report = AutoModelForCausalLM.from_pretrained(demo_models / LLM_DIR, output_loading_info=True)
    assert not any(report.values()), report
    return model


def generated(llm, demo_models: Path, text: str, prompt_tokens: list[int], count: int) -> list[list[int]]:
    """Speech ids of `count` answers, up to the end token, which every answer must have."""
    tokenizer = LLMTokenizer.from_dir(demo_models / LLM_DIR)
    ids = torch.tensor(tokenizer.encode_prompt(LLMPrompt(text, "", prompt_tokens)))[None]
    torch.manual_seed(0)
    answers = llm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=300, num_return_sequences=count)
    speech_ids = []
    for answer in answers[:, ids.shape[1] :].tolist():
        ended = answer[: answer.index(tokenizer.end_ids[0])]
        speech_ids.append(tokenizer.to_speech_ids(ended))
        assert len(speech_ids[-1]) == len(ended)  # only speech tokens
    return speech_ids


def test_only_equal_seeds_give_equal_bytes(demo_models: Path, tmp_path: Path) -> None:
    assert make(tmp_path / "again") and make(tmp_path / "other", seed=7)
    again = tmp_path / "again"
    weights = [
        path.relative_to(again) for suffix in ("pt", "onnx", "safetensors") for path in again.rglob(f"*.{suffix}")
    ]
    assert len(weights) == 14
    for path in weights:
        assert (tmp_path / "again" / path).read_bytes() == (demo_models / path).read_bytes(), path
        assert (tmp_path / "other" / path).read_bytes() != (demo_models / path).read_bytes(), path


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


def test_the_llm_generates_about_three_seconds_of_speech(llm, demo_models: Path) -> None:
    lengths = [len(tokens) for tokens in generated(llm, demo_models, "Good morning.", list(range(100)), 16)]
    assert 30 <= min(lengths) and max(lengths) <= 160
    assert 55 <= np.mean(lengths) <= 105


@pytest.mark.parametrize("directory", [UNET_DIR, DIT_DIR, COSYVOICE3_DIR])
def test_prompt_tokens_are_disjoint_from_the_tokens_of_the_llm(demo_models: Path, directory: str) -> None:
    wave = load_audio(samples.FOLDER / "reference_en.wav", PROMPT_SAMPLE_RATE)
    (tokens,) = AudioTokenizer(demo_models / directory)([wave])
    assert tokens.max() < FIRST_UTTERED
