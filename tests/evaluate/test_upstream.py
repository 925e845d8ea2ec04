"""`evaluate --against`: upstream's program with stand-ins for its classes, and with its own where there are some."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.cli.evaluate import main
from cosyvoice_triton.evaluate import upstream
from cosyvoice_triton.networks.flow import CosyVoice3FlowConfig, DiTFlowConfig, UNetFlowConfig
from cosyvoice_triton.networks.hift import HiFTConfig
from cosyvoice_triton.prepare.huggingface_llm import COSYVOICE2_LLM, COSYVOICE3_LLM, convert
from cosyvoice_triton.server.options import StackOptions

from tests.random_weights import token2wav
from tests.support.official_llm import official_llm, write_blank

CONFIGURATIONS = Path("tests/support/upstream")
# A Python with upstream's requirements, and the folders of its classes for each of OFFICIAL, with colons between: the
# packages cosyvoice-minicpmo and step-audio2; those of CosyVoice3 are in upstream's repository only.
PYTHON, REPOSITORIES = os.environ.get("UPSTREAM_PYTHON"), os.environ.get("UPSTREAM_REPOSITORIES", "").split(":")
# What upstream's classes are made of, the official sizes of the flow, and the form of llm.pt.
OFFICIAL = {
    stacks.UNET: ("cosyvoice2.yaml", UNetFlowConfig(), COSYVOICE2_LLM),
    stacks.DIT: ("flow.yaml", DiTFlowConfig(), None),
    stacks.COSYVOICE3: ("cosyvoice3.yaml", CosyVoice3FlowConfig(), COSYVOICE3_LLM),
}

STAND_INS = """
import torch
from torch import nn

class LLM(nn.Module):
    speech_token_size = 6561

    def inference(self, text, length, *others, **limits):
        for step in range(9999):
            token = self.sampling(torch.full((6564,), -9.0), [], 25)
            if token == self.speech_token_size:
                break
            yield token

class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.rand_noise = torch.randn(1, 80, 15000, generator=torch.Generator().manual_seed(0))

    def inference(self, token, *others, streaming, finalize):
        assert finalize and not streaming
        return torch.zeros(1, 80, 2 * token.shape[1]), None

class HiFT(nn.Module):
    def inference(self, speech_feat):
        raise RuntimeError("no vocoder here")

def load_state(self, state, strict):
    pass

LLM.load_state_dict = Flow.load_state_dict = HiFT.load_state_dict = load_state

class Tokenizer:
    def encode(self, text, allowed_special):
        return list(text.encode())

def load_hyperpyyaml(file, overrides):
    assert overrides["qwen_pretrain_path"].endswith("CosyVoice-BlankEN")
    return {"llm": LLM(), "flow": Flow(), "hift": HiFT(), "get_tokenizer": Tokenizer}
"""


def official(models: Path, stack: stacks.Stack, into: Path) -> Path:
    """The stack's files of `models` with networks of the official sizes, a small LLM in the official form, and what
    upstream's classes are made of."""
    configuration, sizes, llm = OFFICIAL[stack]
    shutil.copytree(models, into)
    folder = StackOptions(models_dir=into, stack=stack.name).checkpoint_dir
    token2wav.write_flow(folder / "flow.pt", stack, 1, sizes)
    token2wav.write_hift(folder / "hift.pt", stack, 2, HiFTConfig())
    shutil.copy(CONFIGURATIONS / configuration, folder)
    if llm:
        torch.save(official_llm(write_blank(folder / "CosyVoice-BlankEN"), llm), folder / "llm.pt")
        shutil.rmtree(directory := into / stack.llm.directory)
        convert(folder / "llm.pt", folder / "CosyVoice-BlankEN", directory, torch.float32)
    return into


def test_steps_that_differ_and_those_that_upstream_cannot_compute_are_named(
    demo_models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [str(demo_models), "--stack", "unet", "--device", "cpu", "--against", str(tmp_path)]
    assert main(given) == 1 and "has neither cosyvoice/ nor cosyvoice2/" in capfd.readouterr().err
    (tmp_path / "cosyvoice").mkdir()
    assert main(given) == 1 and "has none of cosyvoice3.yaml, cosyvoice2.yaml" in capfd.readouterr().err
    (tmp_path / "hyperpyyaml.py").write_text(STAND_INS)
    shutil.copytree(demo_models, tmp_path / "models")
    folder = StackOptions(models_dir=tmp_path / "models", stack="unet").checkpoint_dir
    (folder / "cosyvoice2.yaml").touch()
    torch.save({}, folder / "llm.pt")
    assert main([str(tmp_path / "models"), *given[1:]]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert "wave: not computed by upstream: RuntimeError: no vocoder here" in lines
    found = {line.split()[1].rstrip(":"): line.split()[0] for line in lines if " differs by " in line}
    assert found.pop("text") in ("ok", "problem")  # the stand-in's ids are bytes
    assert found == {"log_probabilities": "problem", "flow_noise": "ok", "mel": "problem"}


@pytest.mark.parametrize(("first", "forgets"), [(1, True), (0, False)])
def test_an_upstream_whose_transformers_is_too_new_is_told_from_other_weights(first: int, forgets: bool) -> None:
    theirs = np.zeros((3, 4), np.float32)
    theirs[first:] = 1.0
    (step,) = upstream._steps({"log_probabilities": np.zeros_like(theirs)}, {"log_probabilities": theirs})
    assert not step.passed and (step.remark == upstream.FORGETS) == forgets


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON, reason="UPSTREAM_PYTHON, UPSTREAM_REPOSITORIES: packages with upstream's classes")
@pytest.mark.parametrize(("stack", "repository"), [*zip(OFFICIAL, REPOSITORIES, strict=False)])
def test_upstream_s_own_classes_compute_the_same(
    stack: stacks.Stack, repository: str, demo_models: Path, tmp_path: Path
) -> None:
    options = StackOptions(models_dir=official(demo_models, stack, tmp_path / "models"), stack=stack.name, device="cpu")
    steps = list(upstream.compared(options, Path(repository), str(PYTHON)))
    assert all(step.passed for step in steps), steps
    names = {step.name for step in steps}
    assert names == ({"mel", "wave"} if stack == stacks.DIT else set(upstream.LIMITS))
