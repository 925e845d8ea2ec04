import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cosyvoice_triton import samples
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.demo_checkpoint import make as script
from cosyvoice_triton.demo_checkpoint.llm import FIRST_UTTERED
from cosyvoice_triton.demo_checkpoint.make import main, make_demo_model
from cosyvoice_triton.llm.interface import LLMPrompt
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.voice.audio import load_audio
from cosyvoice_triton.voice.encoders import AudioTokenizer

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


def test_the_files_are_marked_as_random(demo_models: Path) -> None:
    assert "random" in (demo_models / "README.md").read_text(encoding="utf-8")
    assert json.loads((demo_models / "demo_model.json").read_text(encoding="utf-8"))["weights"] == "random"


def test_only_equal_seeds_give_equal_bytes(demo_models: Path, tmp_path: Path) -> None:
    make_demo_model(tmp_path / "again", "random")
    make_demo_model(tmp_path / "other", "random", seed=7)
    again = tmp_path / "again"
    weights = [
        path.relative_to(again) for suffix in ("pt", "onnx", "safetensors") for path in again.rglob(f"*.{suffix}")
    ]
    assert len(weights) == 14
    for path in weights:
        assert (tmp_path / "again" / path).read_bytes() == (demo_models / path).read_bytes(), path
        assert (tmp_path / "other" / path).read_bytes() != (demo_models / path).read_bytes(), path


def test_a_damaged_checkpoint_is_replaced(demo_models: Path, tmp_path: Path) -> None:
    dest = tmp_path / "damaged"
    shutil.copytree(demo_models, dest)
    (dest / UNET_DIR / "flow.pt").write_bytes(b"truncated")
    assert make_demo_model(dest, "random")
    assert (dest / UNET_DIR / "flow.pt").read_bytes() == (demo_models / UNET_DIR / "flow.pt").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_a_mount_point_is_filled_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be renamed, and scratch files beside it would be on another disk."""
    dest = tmp_path / "models"
    dest.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == dest)
    before = dest.stat().st_ino
    assert make_demo_model(dest) and not make_demo_model(dest)
    flow = dest / UNET_DIR / "flow.pt"
    flow.unlink()  # as after an interruption, which leaves the manifest at least
    assert make_demo_model(dest) and flow.exists()
    assert dest.stat().st_ino == before and [path.name for path in tmp_path.iterdir()] == ["models"]
    assert not any(path.name.startswith(".models") for path in dest.iterdir())


def test_a_directory_with_other_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dest = tmp_path / "mine"
    dest.mkdir()
    (dest / "thesis.txt").write_text("years of work")
    assert main([str(dest)]) == 1
    assert "no demo checkpoint" in capsys.readouterr().err
    assert [path.name for path in dest.iterdir()] == ["thesis.txt"]


def test_a_full_disk_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=5 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert main([str(tmp_path / "demo")]) == 1
    assert main([str(tmp_path / "demo"), "--weights", "random-full"]) == 1
    shown = capsys.readouterr().err
    assert "has 5 MiB free, 200 MiB are needed" in shown and "12288 MiB are needed" in shown
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, seed: int, sizes: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script.vocoder, "write_dit_flow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_demo_model(tmp_path / "demo", "random")
    assert list(tmp_path.iterdir()) == []


def test_the_llm_generates_about_three_seconds_of_speech(llm, demo_models: Path) -> None:
    lengths = [len(tokens) for tokens in generated(llm, demo_models, "Good morning.", list(range(100)), 16)]
    assert 30 <= min(lengths) and max(lengths) <= 160
    assert 55 <= np.mean(lengths) <= 105


@pytest.mark.parametrize("directory", [UNET_DIR, DIT_DIR, COSYVOICE3_DIR])
def test_prompt_tokens_are_disjoint_from_the_tokens_of_the_llm(demo_models: Path, directory: str) -> None:
    wave = load_audio(samples.FOLDER / "reference_en.wav", PROMPT_SAMPLE_RATE)
    (tokens,) = AudioTokenizer(demo_models / directory)([wave])
    assert tokens.max() < FIRST_UTTERED
