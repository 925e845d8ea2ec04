"""A stack names the functions that load its flow and its vocoder."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import HOP_SAMPLES, TOKEN_MEL_RATIO
from cosyvoice_triton.demo_checkpoint.checkpoint import STACKS, TRAINED
from cosyvoice_triton.networks.flow.config import euler_steps
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.clicks import FADE_SAMPLES
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.base import VocoderOptions
from cosyvoice_triton.token2wav.flow.cached_flow import CachedStreaming
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.memory import Networks
from cosyvoice_triton.token2wav.gpu.precision import Precision
from cosyvoice_triton.token2wav.stream import Chunk, VocoderState
from cosyvoice_triton.voice.prompt import Prompt
from torch import Tensor

FLOAT32 = Precision(torch.float32, torch.float32)


class ConstantVocoder:
    """Audio of one value, withholding none of it; `slots` counts its streams."""

    def __init__(self, options: VocoderOptions) -> None:
        self.options = options
        self.slots = 0
        self.nbytes = 4

    def for_worker(self, worker: int) -> None:
        return None

    def open(self) -> VocoderState:
        self.slots += 1
        return VocoderState(slot=self.slots)

    def close(self, state: VocoderState) -> None:
        self.slots -= 1

    def step(self, chunks: Sequence[Chunk], mels: Sequence[Tensor]) -> list[Tensor]:
        return self.whole(mels)

    def whole(self, mels: Sequence[Tensor]) -> list[Tensor]:
        return [torch.full((mel.shape[1] * HOP_SAMPLES,), 0.5) for mel in mels]


loaded: list[tuple[Path, ConstantVocoder]] = []


def load(path: Path, options: VocoderOptions) -> ConstantVocoder:
    loaded.append((path, ConstantVocoder(options)))
    return loaded[-1][1]


@pytest.mark.parametrize("name", [stack.name for stack in STACKS])
def test_a_stack_can_have_another_vocoder(name: str) -> None:
    stack = replace(stacks.named(name), hift="other.pt", vocoder_loader=f"{__name__}:load")
    directory = TRAINED / stack.checkpoint
    limits = BatchLimits(max_streams=2)
    engine = Token2Wav.load(stack, directory, device="cpu", limits=limits, precision=FLOAT32, steps=1)
    path, vocoder = loaded.pop()
    assert path == directory / "other.pt"
    assert vocoder.options == VocoderOptions(device="cpu", dtype=torch.float32, limits=limits, graphs=False)

    tokens = np.arange(30)
    prompt = Prompt(tokens, np.zeros((60, 80), np.float32), np.ones(192, np.float32), text="")
    stream = engine.open(prompt)
    assert vocoder.slots == 1 and engine.cache_bytes >= 4
    (audio,) = engine.step([engine.chunk(stream, tokens[:28], final=False)])
    assert audio.shape == (25 * TOKEN_MEL_RATIO * HOP_SAMPLES,) and (audio[FADE_SAMPLES:] == 0.5).all()
    engine.close(stream)
    assert vocoder.slots == 0
    assert engine.whole(prompt, tokens).shape == (30 * TOKEN_MEL_RATIO * HOP_SAMPLES,)


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_a_checkpoint_decides_steps_grid_and_rows_of_its_flow(stack: Stack, tmp_path: Path) -> None:
    """With half the steps and no unconditional rows, streams and voices take a quarter of the memory."""
    for file in (TRAINED / stack.checkpoint).iterdir():
        (tmp_path / file.name).symlink_to(file)
    options: dict[str, Any] = {"device": "cpu", "limits": BatchLimits(max_streams=2), "precision": FLOAT32}
    sizes: dict[str, Any] = {"flow_size": 4, "vocoder_size": 4}
    upstream = Networks.read(stack, tmp_path, steps=euler_steps(tmp_path / stack.flow), **sizes)
    (tmp_path / "flow.json").write_text('{"steps": 5, "time_grid": [0, 0.1, 0.3, 0.5, 0.8, 1], "guidance": 0}')
    flow = Token2Wav.load(stack, tmp_path, **options)._flow
    assert flow._steps == 5 and flow._network.decoder.rows == 1
    assert flow._network.decoder.schedule(5)[0] == pytest.approx([0, 0.1, 0.3, 0.5, 0.8])
    read = Networks.read(stack, tmp_path, steps=5, **sizes)
    assert (read.frame, read.history) == (upstream.frame / 4, upstream.history / 4)
    if isinstance(flow, CachedStreaming):
        assert flow._pool.prompt_bytes(60) == read.voice(60 / 50)
    with pytest.raises(ValueError, match="n_timesteps 10: .* of 5 steps"):
        Token2Wav.load(stack, tmp_path, steps=10, **options)
