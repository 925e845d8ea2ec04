"""Keys and values in 8 bits: what they cost in error, also over a long stream; test_memory has what they save."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import TOKEN_RATE
from cosyvoice_triton.demo_checkpoint import TRAINED
from cosyvoice_triton.monitoring.environment import TEST_FAULTS
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.cached_flow import CachedStreaming
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.precision import Precision
from cosyvoice_triton.token2wav.gpu.quantization import dequantized
from cosyvoice_triton.token2wav.stream import VocoderState
from torch import Tensor

from tests.support.streams import ids, mel, pieces, prompt

ERROR = 1e-3  # RMS, relative to the mel's: twice what is found; a network's format may have 5e-2 (gpu/precision.py)
HOPS = [15, 60, 100, 175, 200]


@pytest.fixture(params=["dit", "cosyvoice3"])
def flows(request: pytest.FixtureRequest, flow_of: Callable[..., CachedStreaming]) -> list[CachedStreaming]:
    """The same flow with keys and values in its own format and in 8 bits."""
    load_exact = partial(copy.deepcopy, request.getfixturevalue(f"{request.param}_network"))
    return [flow_of(request.param, steps=2, kv_cache_dtype=of, load_exact=load_exact) for of in ("auto", "int8")]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@torch.inference_mode()
def test_eight_bits_change_the_mel_hardly_and_no_more_at_the_end_of_30_seconds(flows: list[CachedStreaming]) -> None:
    whole, rounded = (mel(flow, prompt(1, tokens=31), ids(1, 30 * TOKEN_RATE), HOPS) for flow in flows)
    parts = [error(*pair) for pair in zip(rounded.split(500, dim=1), whole.split(500, dim=1), strict=True)]
    assert 0 < max(parts) < ERROR and parts[-1] < 2 * parts[0]


@torch.inference_mode()
def test_what_is_not_finite_is_seen_and_made_again_in_eight_bits(
    flows: list[CachedStreaming], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TEST_FAULTS, str(tmp_path))
    flow = flows[1]
    stream = flow.open(prompt(1, tokens=30), VocoderState(0))
    good, bad = stream.prompt.attention.keys.clone(), stream.prompt.attention.keys
    (tmp_path / "nan_voice").touch()
    chunk = pieces(flow, ids(1, 60), [15])[0].of(flow, stream)
    assert not flow.render([chunk])[0].isfinite().all()
    assert flow.again(chunk).isfinite().all()
    assert stream.prompt.attention.keys is not bad
    levels = dequantized(stream.prompt.attention.keys, torch.float32)
    torch.testing.assert_close(levels, dequantized(good, torch.float32), atol=0.05, rtol=0)


def test_eight_bits_are_refused_for_a_flow_that_keeps_no_keys_and_values() -> None:
    limits, float32 = BatchLimits(max_streams=1), Precision(torch.float32, torch.float32)
    load = partial(Token2Wav.load, stacks.UNET, TRAINED / stacks.UNET.checkpoint, device="cpu", limits=limits)
    with pytest.raises(ValueError, match="kv_cache_dtype 'int8': the flow of the stack 'unet' keeps no keys and val"):
        load(precision=float32, kv_cache_dtype="int8")
