"""`cosyvoice-triton doctor DIR --files`: what it finds in good and in damaged checkpoints."""

import shutil
from pathlib import Path

import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.offline.inspection import inspected
from cosyvoice_triton.server.options import StackOptions


def found_in(models: Path, stack: str) -> tuple[list[str], list[str]]:
    lines = list(inspected(StackOptions(models_dir=models, stack=stack, device="cpu")))
    return [text for passed, text in lines if passed], [text for passed, text in lines if not passed]


@pytest.mark.parametrize("stack", stacks.names())
def test_a_good_checkpoint_speaks_and_its_tokens_are_onnxruntime_s(stack: str, demo_models: Path) -> None:
    good, bad = found_in(demo_models, stack)
    assert not bad
    for part in ("a second of speech at -", "0.0% of them not as onnxruntime", " tensors, "):
        assert any(part in line for line in good), part
    assert any(line.startswith("risk: float16") for line in good) == (stack == "cosyvoice3")


def test_each_damaged_file_is_named_and_the_others_are_examined(demo_models: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_models, tmp_path / "models")
    folder = StackOptions(models_dir=tmp_path / "models", stack="unet").checkpoint_dir
    state = torch.load(folder / "hift.pt", weights_only=True)
    name = next(iter(state))
    torch.save(state | {name: torch.full_like(state[name], torch.nan)}, folder / "hift.pt")
    shutil.copy(StackOptions(models_dir=demo_models, stack="dit").checkpoint_dir / "flow.pt", folder / "flow.pt")
    good, bad = found_in(tmp_path / "models", "unet")
    assert any("is the flow of the stack dit" in line for line in bad)
    assert any("hift.pt has values that are not finite" in line for line in bad)
    assert any(line.startswith("LLM: ") for line in good)
    (folder / "campplus.onnx").unlink()
    good, (line,) = found_in(tmp_path / "models", "unet")
    assert not good and "campplus.onnx is missing; for the official files run" in line
