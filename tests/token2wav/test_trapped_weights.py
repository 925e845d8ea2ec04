"""Weights with the traps that others found in official ones: no stack speaks noise in a format that it chooses."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import MEL_BINS
from cosyvoice_triton.demo_checkpoint import TRAINED
from cosyvoice_triton.monitoring.metrics import FALLBACKS
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.precision import Precision

from tests.random_weights.token2wav import COSYVOICE3_FLOW, HIFT, write_flow, write_hift
from tests.support.streams import ids, prompt

AUTO = Precision(torch.float16, torch.float16, frozenset({"flow", "vocoder"}))
FLOAT32 = Precision(torch.float32, torch.float32)
LIMITS = BatchLimits(max_streams=2)
# Whose output joins the residual stream first.
FIRST = {
    "dit": "decoder.estimator.blocks.0.attn.proj",
    "unet": "decoder.estimator.down_blocks.0.1.0.attn1.to_out.0",
    "cosyvoice3": "decoder.estimator.transformer_blocks.0.attn.to_out.0",
}
State = dict[str, torch.Tensor]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[Stack], Path]:
    """Makes a directory with a stack's networks, of CosyVoice3 untrained ones, and of the demo voice its encoders."""

    def make(stack: Stack) -> Path:
        if stack is stacks.COSYVOICE3:
            write_flow(tmp_path / stack.flow, stack, 1, COSYVOICE3_FLOW)
            write_hift(tmp_path / stack.hift, stack, 2, HIFT)
            return tmp_path
        for file in (TRAINED / stack.checkpoint).iterdir():
            os.symlink(file, tmp_path / file.name)
        return tmp_path

    return make


def change(path: Path, edit: Callable[[State], None]) -> None:
    state: State = torch.load(path, weights_only=True)
    edit(state)
    path.unlink()
    torch.save(state, path)


def grown(stack: Stack, factor: float) -> Callable[[State], None]:
    def edit(state: State) -> None:
        for part in ("weight", "bias"):
            key = f"{FIRST[stack.name]}.{part}"
            state[key] = state[key].float() * factor

    return edit


def tiny_alphas(state: State) -> None:
    for key in [key for key in state if key.endswith("alpha")]:
        state[key] = state[key].float()
        state[key][::3] = 1.6e-6


def engine(stack: Stack, directory: Path, precision: Precision) -> Token2Wav:
    return Token2Wav.load(stack, directory, device="cpu", limits=LIMITS, precision=precision, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("stack", [stacks.DIT, stacks.UNET, stacks.COSYVOICE3], ids=lambda stack: stack.name)
def test_a_stack_speaks_with_trapped_weights_in_the_fastest_format_that_holds(stack, checkpoint, caplog) -> None:
    directory = checkpoint(stack)

    def in_more_bits() -> float:
        served, exact = (engine(stack, directory, each) for each in (AUTO, FLOAT32))
        voice = prompt(3, 40)
        voice = replace(voice, embedding=np.resize(voice.embedding, exact.sample()[0].embedding.shape))
        audio, wanted = (each.whole(voice, ids(4, 20)) for each in (served, exact))
        assert np.isfinite(audio).all()
        assert np.abs(audio).mean() == pytest.approx(np.abs(wanted).mean(), rel=0.3)
        return served.counts[FALLBACKS]

    change(directory / stack.hift, tiny_alphas)
    change(directory / stack.flow, grown(stack, 2.0**10))  # squares of a layer norm's input pass float16's range
    assert in_more_bits() == 0
    change(directory / stack.flow, grown(stack, 2.0**10))  # now they pass it themselves
    assert in_more_bits() == 1 and "the flow computes in bfloat16" in caplog.text
    assert "computes in float32" not in caplog.text


def test_the_check_at_load_hears_a_real_prompt(checkpoint) -> None:
    """Without one, these weights are multiplied by zeros."""
    directory, stack = checkpoint(stacks.DIT), stacks.DIT

    def of_the_prompts_mel(state: State) -> None:
        key = "decoder.estimator.in_proj.weight"
        state[key] = state[key].float()
        state[key][:, 3 * MEL_BINS :] *= 2.0**16

    change(directory / stack.flow, of_the_prompts_mel)
    assert AUTO.checked(stack, directory, "cpu", limits=LIMITS, steps=2).flow == torch.bfloat16
