"""Precision of flow and vocoder; bfloat16, which `auto` selects on some CPUs, changes the mel only slightly."""

from pathlib import Path

import numpy as np
import pytest
import torch

from common.token2wav.dit.memory import PromptCaches
from common.token2wav.dit.streaming import DiTStreaming
from common.token2wav.engine import Precision
from common.token2wav.limits import BatchLimits
from common.token2wav.noise import flow_noise
from common.token2wav.stream import VocoderState
from common.token2wav.streaming import StreamingFlow
from common.token2wav.unet.streaming import UNetStreaming
from common.voice.prompt import Prompt
from tools.parity import flow_dit, flow_unet
from tools.parity.fixture import Fixture

GOLDEN = Path(__file__).parents[1] / "assets" / "golden"
FLOAT32, HALF = Precision(torch.float32, torch.float32), Precision(torch.float16, torch.float16)
BFLOAT16_FLOW = Precision(torch.bfloat16, torch.float32)
TOLERANCE = 3e-2  # RMS error, relative to the RMS of the mel


@pytest.fixture(params=["avx512_bf16", "amx_bf16"])
def with_bfloat16(request, monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {request.param: True, "avx512_f": True})


def test_auto_is_float32_on_a_cpu_without_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, "amx_bf16": False, "avx2": True})
    assert Precision.named("auto", "auto", "cpu") == FLOAT32
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "aarch64"})
    assert Precision.named("auto", "auto", "cpu") == FLOAT32


def test_auto_is_bfloat16_for_a_flow_in_torch_on_a_cpu_with_bfloat16(with_bfloat16):
    assert Precision.named("auto", "auto", "cpu") == BFLOAT16_FLOW
    assert Precision.named("auto", "auto", "cpu", "torch") == BFLOAT16_FLOW
    assert Precision.named("auto", "auto", "cpu", "onnxruntime") == FLOAT32


@pytest.mark.parametrize("runtime", ["auto", "torch", "cuda_graph", "onnxruntime", "tensorrt"])
def test_auto_is_float16_on_a_gpu_whatever_the_cpu_supports(with_bfloat16, runtime):
    assert Precision.named("auto", "auto", "cuda:0", runtime) == HALF


def test_a_named_precision_is_used(with_bfloat16):
    assert Precision.named("float32", "bfloat16", "cpu") == Precision(torch.float32, torch.bfloat16)


def flow_of(stack: str, dtype: torch.dtype) -> StreamingFlow:
    if stack == "dit":
        fixture = Fixture(GOLDEN / "item8b_dit_streaming_token2wav.json")
        dit = flow_dit.build(fixture, "stepaudio2_flow_tiny.weights.safetensors").to(dtype)
        return DiTStreaming(dit, flow_noise(), PromptCaches(64 << 20), limits=BatchLimits(max_streams=1))
    fixture = Fixture(GOLDEN / "item8c_cosyvoice2_streaming_token2wav.json")
    unet = flow_unet.build(fixture, "cosyvoice2_flow_tiny.weights.safetensors").to(dtype)
    return UNetStreaming(unet, flow_noise(), limits=BatchLimits(max_streams=1))


@torch.inference_mode()
def mels(flow: StreamingFlow) -> list[torch.Tensor]:
    """Mel of a whole utterance, and mels of its first chunks."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 120, 60)
    prompt = Prompt(
        tokens=rng.integers(0, 120, 20),
        mel=rng.standard_normal((40, 80)).astype(np.float32) - 4,
        embedding=rng.standard_normal(24).astype(np.float32),
        text="",
    )
    stream = flow.open(prompt, VocoderState(0))
    chunks = [flow.render([flow.chunk(stream, tokens[:28], final=False)])[0].clone()]
    second = tokens if flow.cumulative else tokens[25:]
    chunks += flow.render([flow.chunk(stream, second, final=True)])
    return [*flow.whole([(prompt, tokens)]), *chunks]


@pytest.mark.parametrize("stack", ["dit", "unet"])
def test_bfloat16_changes_the_mel_of_ten_steps_only_slightly(stack):
    for exact, rounded in zip(mels(flow_of(stack, torch.float32)), mels(flow_of(stack, torch.bfloat16)), strict=True):
        error = (rounded - exact).norm() / exact.norm()
        assert rounded.dtype == torch.float32 and 0 < error < TOLERANCE
