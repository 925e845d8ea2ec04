from pathlib import Path

import pytest
from cosyvoice_triton.demo_checkpoint import TRAINED, has_random_weights

from tests.random_weights import token2wav
from tests.random_weights.__main__ import main
from tests.random_weights.checkpoint import make
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
