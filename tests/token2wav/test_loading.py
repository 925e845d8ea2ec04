"""A checkpoint states how its flow is solved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cosyvoice_triton.demo_checkpoint import STACKS, TRAINED
from cosyvoice_triton.networks.flow.config import euler_steps
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.cached_flow import CachedStreaming
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.memory import Networks
from cosyvoice_triton.token2wav.gpu.precision import Precision

FLOAT32 = Precision(torch.float32, torch.float32)


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
