"""Every launch of a GPU kernel that serving makes, and what its code needs on each architecture. Needs no GPU.

The networks run at official sizes over tensors without memory ("meta"), once for each size of the CUDA graphs, so that
the launches have the constants and types of serving. Triton's own assembler makes the machine code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from cosyvoice_triton import kernels
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, MEL_BINS, OVERLAP_FRAMES, SPEECH_VOCAB, STREAM_CACHE_FRAMES
from cosyvoice_triton.llm.engines.cuda.fused_operations import Fused
from cosyvoice_triton.llm.engines.cuda.operations import CONSECUTIVE, PAGE, AttentionMetadata, Requests, Residual
from cosyvoice_triton.networks import flow as networks
from cosyvoice_triton.networks.hift import HiFTConfig, HiFTGenerator
from cosyvoice_triton.token2wav.flow.cached_graphs import GraphedSolve
from cosyvoice_triton.token2wav.flow.cosyvoice3_flow import RotarySolver
from cosyvoice_triton.token2wav.flow.dit_flow import DiTSolver
from cosyvoice_triton.token2wav.flow.encoder_fused import FusedEncoder
from cosyvoice_triton.token2wav.flow.encoder_window import WindowEncoder
from cosyvoice_triton.token2wav.flow.kv_cache import StreamCachePool
from cosyvoice_triton.token2wav.flow.unet_flow import GraphedWindowSolve
from cosyvoice_triton.token2wav.flow.unet_fused import FusedUNet
from cosyvoice_triton.token2wav.gpu.graphs import TRIED
from cosyvoice_triton.token2wav.gpu.limits import (
    COSYVOICE3_FRAMES,
    DIT_FRAMES,
    ENCODER_TOKENS,
    HIFT_FRAMES,
    UNET_FRAMES,
    BatchLimits,
)
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER
from cosyvoice_triton.token2wav.vocoder.hift_fused import FusedBody
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.random_weights.llm import OFFICIAL as LLM_SIZES

# KiB of shared memory of a block, by compute capability: CUDA C++ Programming Guide, "Compute Capabilities".
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
BLOCK = ("BM", "BN", "BK", "BLOCK_Q", "BLOCK_K", "BLOCK", "WIDE")  # constants that are a block's dimensions


@dataclass(frozen=True)
class Launch:
    """A kernel as it is launched: `constants` include warps and stages."""

    kernel: JITFunction
    arguments: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return self.kernel.__name__.removeprefix("_")

    @property
    def key(self) -> tuple[Any, ...]:
        """Launches of equal keys are compiled once."""
        types = tuple(x.dtype if isinstance(x, Tensor) else type(x) for x in self.arguments)
        return self.name, types, self.constants

    @property
    def size(self) -> str:
        """Of its block, as "16x32x128, 4 warps, 4 stages"; launches of the same size need about the same."""
        given = dict(self.constants)
        block = "x".join(str(given[name]) for name in BLOCK if name in given)
        parts = [block, *(f"{given[f'num_{name}']} {name}" for name in ("warps", "stages") if f"num_{name}" in given)]
        return ", ".join(filter(None, [*parts, *(name for name in ("norm", "TMA", "int8") if given.get(name.upper()))]))


class Architecture:
    """Triton's driver for a GPU that is not there."""

    def __init__(self, capability: int):
        self.get_current_device = lambda: capability  # compiled kernels are kept by device
        self.get_current_stream = lambda device: 0
        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)


@contextmanager
def pretended(capability: int) -> Iterator[None]:
    with patch.object(driver, "_active", Architecture(capability)):
        yield


def launches(dtype: torch.dtype, capability: int) -> list[Launch]:
    """Every launch of serving that has code of its own."""
    found: dict[Any, Launch] = {}

    def record(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        launch = Launch(kernel, arguments, tuple(sorted(constants.items())))
        found.setdefault(launch.key, launch)

    with pretended(capability), patch.object(JITFunction, "run", record), torch.inference_mode():
        _run_networks(dtype)
    return list(found.values())


def trials_and_solves(capability: int, steps: int = 4) -> tuple[list[tuple[set[str], set[str]]], list[Tensor]]:
    """Return the kernels of the trials of flows and encoder, and those of the whole, as Triton tells compiled kernels
    apart, and the streams' memories of convolutions after the trials. The kernels are not run."""
    keys, found, histories = set[str](), [], []

    def record(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        _, specialization, options = kernel.device_caches[capability][-1](*arguments, **constants)
        keys.add(f"{kernel.__name__} {specialization} {options}")

    def keys_of(function: Any, inputs: Any, **part: int) -> set[str]:
        keys.clear()
        function(*inputs(1, 32), **part)
        return set(keys)

    def make(function: Any, inputs: Any, sizes: Any, name: str, worker: int, trial: Any) -> None:
        tried = keys_of(trial, inputs)
        histories.extend(pool.history.clone() for pool in pools if name == "the flow")
        found.append((tried, keys_of(function, inputs)))

    dit, unet, rotary = (network.half() for network in _flows(3))
    noise, pools = NoiseTape(torch.zeros(1, MEL_BINS)), []
    with pretended(capability), patch.object(JITFunction, "run", record), torch.inference_mode():
        fused = FusedUNet(unet.decoder.estimator, [0.0] * steps)
        GraphedWindowSolve(unet, fused, noise, [], steps, worker=0, make=make)
        for network, solver in ((dit, DiTSolver(dit, kernels, steps)), (rotary, RotarySolver(rotary, kernels, steps))):
            weight = network.spk_embed_affine_layer.weight
            pools = [StreamCachePool(network.config.estimator, weight, steps, 1, 8)]
            GraphedSolve(solver, pools[0], noise, BatchLimits(max_streams=1, workers=1), 200, make=make)
        windows = WindowEncoder(dit, BatchLimits(max_streams=1), graphs=False)._inputs
        encoder = FusedEncoder(dit, 32)
        found.append((keys_of(encoder, windows, tried=TRIED), keys_of(encoder, windows)))
    return found, histories


def shared_memory(launch: Launch, capability: int) -> int:
    """The bytes of a block. Triton's error if the kernel does not compile there."""
    return int(_code(launch, capability).metadata.shared)


def _code(launch: Launch, capability: int) -> Any:
    with pretended(capability):
        return launch.kernel.run(*launch.arguments, grid=None, warmup=True, **dict(launch.constants))


def _flows(depth: int) -> tuple[networks.DiTFlow, networks.UNetFlow, networks.CosyVoice3Flow]:
    """The flows at official sizes, but with so many layers of each kind, and one of the UNet's."""
    encoder = networks.EncoderConfig(blocks=depth, up_blocks=depth)
    dit, unet = networks.DiTConfig(depth=depth), networks.UNetConfig(mid_stages=1, blocks=1)
    return (
        networks.DiTFlow(networks.DiTFlowConfig(encoder=encoder, estimator=dit)),
        networks.UNetFlow(networks.UNetFlowConfig(encoder=encoder, estimator=unet)),
        networks.CosyVoice3Flow(networks.CosyVoice3FlowConfig(estimator=networks.RotaryDiTConfig(depth=depth))),
    )


def _run_networks(dtype: torch.dtype) -> None:
    """Call every kernel as serving does: one layer of each kind, one Euler step, all graph sizes."""
    limits = BatchLimits()
    with torch.device("meta"):
        dit, unet, rotary = (network.to(dtype) for network in _flows(1))
        noise = NoiseTape(torch.empty(1, MEL_BINS))
    fused_unet = FusedUNet(unet.decoder.estimator, [0.0])
    of_dit = DiTSolver(dit, kernels, 1), dit.config.estimator, DIT_FRAMES
    of_rotary = RotarySolver(rotary, kernels, 1), rotary.config.estimator, COSYVOICE3_FRAMES
    for of in (limits, limits.of_worker(FIRST_CHUNK_WORKER)):
        for (solver, config, most), kind in ((of_dit, "auto"), (of_rotary, "auto"), (of_dit, "int8")):
            weight = dit.encoder_proj.weight
            pool = StreamCachePool(config, weight, 1, limits.max_streams, STREAM_CACHE_FRAMES, 2, kind)
            GraphedSolve(solver, pool, noise, of, most, make=_every_size)
        sizes = of.sizes(of.window_frames, UNET_FRAMES)
        GraphedWindowSolve(unet, fused_unet, noise, sizes, 1, worker=of.worker, make=_every_size)
        _run_encoder(dit, of)
    channels, frames = HiFTConfig().channels // 2, limits.chunk_frames[-1]  # after the first upsampling
    for lengths in (None, torch.empty(1, dtype=torch.int64, device="meta")):
        kernels.snake(
            torch.empty(1, channels, frames, dtype=dtype, device="meta"),
            torch.empty(channels, dtype=dtype, device="meta"),
            lengths,
        )
    _run_vocoder(dtype)
    _run_decoder(dtype)


def _run_encoder(network: networks.DiTFlow, limits: BatchLimits) -> None:
    with torch.device("meta"):
        encoder = FusedEncoder(network, limits.window_tokens[-1])
        for B, T in limits.sizes(limits.window_tokens, ENCODER_TOKENS):
            tokens, visible = torch.empty(B, T, 1 + LOOKAHEAD_TOKENS), torch.empty(B, T)
            encoder(tokens.long(), visible.long())


def _run_vocoder(dtype: torch.dtype) -> None:
    """HiFT's convolutions. In float32 and without tensor cores, serving leaves them to cuDNN."""
    config = HiFTConfig()
    with torch.device("meta"):
        body = FusedBody(HiFTGenerator(config).body_to(dtype))
        for of in (BatchLimits(), BatchLimits(worker=FIRST_CHUNK_WORKER)):
            for B, T in of.sizes(of.chunk_frames, HIFT_FRAMES):
                for frames in (T, OVERLAP_FRAMES + T):
                    excitation = torch.empty(B, config.n_fft + 2, frames * config.hop // config.istft_hop + 1)
                    body(torch.empty(B, MEL_BINS, frames), excitation, torch.empty(B, dtype=torch.int64))


def _run_decoder(dtype: torch.dtype) -> None:
    """Two layers of the LLM, its head and sampling, for every size of its graphs that has kernels of its own."""
    sizes, D = LLM_SIZES, LLM_SIZES.hidden // LLM_SIZES.heads
    heads, width = sizes.heads + 2 * sizes.kv_heads, SPEECH_VOCAB + 3
    with torch.device("meta"):
        keys = torch.empty(9, sizes.kv_heads, PAGE, D, dtype=dtype)
        tables, rotary = torch.empty(9, 64, dtype=torch.int64), torch.empty(2, 4096, D // 2)
        weights = {
            name: torch.empty(*shape, dtype=dtype)
            for name, shape in {
                "qkv": (heads * D, sizes.hidden),
                "qkv_bias": (heads * D,),
                "out": (sizes.hidden, sizes.heads * D),
                "gate_up": (2 * sizes.mlp, sizes.hidden),
                "down": (sizes.hidden, sizes.mlp),
                "head": (width, sizes.hidden),
            }.items()
        }
        embedding = torch.empty(width, sizes.hidden, dtype=dtype)
    requests, fused = Requests(torch.empty(width, device="meta"), 0, 8), Fused(torch.device("meta"))
    for T, consecutive in ((1, 1), (16, 1), (32, 1), (64, 1), (256, 1), (1024, CONSECUTIVE)):
        slots = torch.empty(T, dtype=torch.int64, device="meta")
        metadata = AttentionMetadata(slots, slots, keys[None], keys[None], tables, rotary, consecutive)
        if consecutive == 1:
            *_, x = fused.begin(requests, slots, embedding)
        else:
            x = Residual(torch.empty(T, sizes.hidden, device="meta"))
        for _ in range(2):
            q = fused.project_heads(x, weights["qkv"], weights["qkv_bias"], 1e-6, metadata, 0)
            fused.linear_residual(fused.attend(q, metadata, 0), weights["out"], x, 1e-6)
            fused.linear_residual(fused.gated(x, weights["gate_up"], 1e-6), weights["down"], x, 1e-6)
        fused.sample(fused.head(x, weights["head"], 1e-6), requests, slots)


def _every_size(function: Any, inputs: Any, sizes: Any, name: str, worker: int, trial: Any) -> Any:
    """In place of `Graphs`: calls the function instead of capturing it."""
    for size in sizes:
        function(*inputs(*size))
