"""Stand-ins with which an engine with CUDA graphs runs on a CPU."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cosyvoice_triton.networks.flow import CosyVoice3Flow, DiTFlow, UNetFlow
from cosyvoice_triton.networks.flow.cache import KeyValues
from cosyvoice_triton.networks.hift import CausalHiFTGenerator
from cosyvoice_triton.networks.hift.generator import HiFTGenerator
from cosyvoice_triton.token2wav import flow as cached
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow import encoder_window, plain_operations
from cosyvoice_triton.token2wav.flow.base import StreamingFlow, Vocoder
from cosyvoice_triton.token2wav.flow.cached_solver import CachedSolver
from cosyvoice_triton.token2wav.flow.cosyvoice3_flow import CosyVoice3Streaming
from cosyvoice_triton.token2wav.flow.dit_flow import DiTStreaming
from cosyvoice_triton.token2wav.flow.kv_cache import TailPool
from cosyvoice_triton.token2wav.flow.prompt_caches import PromptCaches
from cosyvoice_triton.token2wav.flow.unet_flow import UNetStreaming
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import flow_noise, source_noise, uniform_noise
from cosyvoice_triton.token2wav.vocoder.causal_hift_vocoder import CausalVocoder
from cosyvoice_triton.token2wav.vocoder.hift_vocoder import StreamingVocoder
from torch import Tensor

from tests.support.streams import VOICES_BYTES
from tests.token2wav.test_graphs import STEPS, Replayed

LIMITS = BatchLimits(max_streams=4, first_hop_tokens=10, max_hop_tokens=20)
CONTEXT = 40  # tokens


class Cuda(str):
    """A device's name, whose type is that of a GPU."""

    type = "cuda"


class OnGpu(torch.nn.Parameter):
    """A weight that says that it is on a GPU."""

    device = Cuda("cpu")


class Noted(Replayed):
    """Which graphs are replayed, in order. `meanwhile`: called before and after each."""

    replays: list["Noted"] = []
    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, function: Callable[..., Any], inputs: tuple[Tensor, ...], result: Tensor, worker: int) -> None:
        super().__init__(function, inputs, result, worker)
        self.worker = worker

    def replay(self) -> None:
        self.meanwhile()
        self.replays.append(self)
        super().replay()
        self.meanwhile()


class Addressed:
    """In place of the kernels that read and write keys and values by their addresses."""

    places: dict[int, Tensor] = {}  # those of prompts

    def __init__(self, pool: TailPool, table: Tensor) -> None:
        self._pool, self._columns = pool, table.T.tolist()
        rings = {slot.data_ptr(): slot for ring in (pool.keys, pool.values) for slot in ring}
        self._places = {**self.places, **rings}

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        after = torch.arange(q.shape[2])[:, None]
        for row, (keys, values, prompt_frames, slot, written, own, *_) in enumerate(self._columns):
            both, seen = [row, len(self._columns) + row], []
            for address, ring, new in ((keys, self._pool.keys, k), (values, self._pool.values, v)):
                of_prompt = [self._places[address][step, layer]] if prompt_frames else []
                parts = [*of_prompt, ring[slot, step, layer, :, :, :written], new[both, :, :own]]
                seen.append(torch.cat(parts, dim=2))
            at = torch.arange(seen[0].shape[2]) - (prompt_frames + written)  # those of the row itself from 0 on
            mask_chunk = self._pool.mask_chunk or len(after)
            mask = (at < 0) | (at // mask_chunk <= after // mask_chunk)
            out[both] = F.scaled_dot_product_attention(q[both], seen[0], seen[1], attn_mask=mask)
        return out.transpose(1, 2).flatten(2)  # (R, H, T, D) -> (R, T, H * D)

    def keep(self, step: int, keys: Tensor, values: Tensor) -> None:
        for row, column in enumerate(self._columns):
            following, length, kept = column[6], column[10], column[11]
            count = min(kept, length)
            at = (following + torch.arange(count)) % length
            for address, new in zip(column[8:10], (keys, values), strict=True):
                latest = new[:, row :: len(self._columns), :, kept - count : kept]
                self._places[address][step].index_copy_(3, at, latest)


def replace_kernels(patch: pytest.MonkeyPatch) -> None:
    """Those of the flows that keep keys and values, in a module of their graphs that is imported anew."""
    name = "cosyvoice_triton.token2wav.flow.cached_graphs"
    launch: Any = ModuleType("cosyvoice_triton.kernels.launch")
    launch.compiled_ahead = nullcontext
    patch.setitem(sys.modules, "cosyvoice_triton.kernels", ModuleType("cosyvoice_triton.kernels"))
    patch.setitem(sys.modules, launch.__name__, launch)
    patch.setattr(cached, "graphs", None, raising=False)
    patch.setitem(sys.modules, name, ModuleType(name))
    del sys.modules[name]
    graphs = import_module(name)
    patch.setattr(graphs, "PagedContext", Addressed)
    patch.setattr(encoder_window, "_fused", lambda network, limits: network.encode_window)
    for flow in (DiTStreaming, CosyVoice3Streaming):
        patch.setattr(flow, "_solver", unfused(flow._solver))
    patch.setattr(Addressed, "places", {})
    empty = TailPool.empty_attention

    def noted(pool: TailPool, frames: int) -> KeyValues:
        made = empty(pool, frames)
        Addressed.places |= {x.data_ptr(): x for x in (made.keys, made.values) if frames}
        return made

    patch.setattr(TailPool, "empty_attention", noted)


def unfused(solver: Callable[..., CachedSolver]) -> Callable[..., CachedSolver]:
    return lambda flow, _: solver(flow, plain_operations)


@torch.inference_mode()
def engine_of(network: Any, hift: Any, graphs: bool, limits: BatchLimits = LIMITS) -> Token2Wav:
    if isinstance(network, CosyVoice3Flow):  # what it computes for a chunk begins at a boundary
        limits = replace(limits, chunk_boundary=network.config.encoder.chunk_tokens)
    return Token2Wav(flow_of(network, graphs, limits), vocoder_of(hift, graphs, limits))


def flow_of(network: CosyVoice3Flow | DiTFlow | UNetFlow, graphs: bool, limits: BatchLimits) -> StreamingFlow:
    options: dict[str, Any] = {"limits": limits, "steps": STEPS, "graphs": graphs}
    if isinstance(network, UNetFlow):
        return UNetStreaming(network, flow_noise(), context_tokens=CONTEXT, **options)
    caches = PromptCaches(VOICES_BYTES)
    if isinstance(network, DiTFlow):
        return DiTStreaming(network, flow_noise(), caches, tail_frames=30, context_tokens=CONTEXT, **options)
    return CosyVoice3Streaming(network, flow_noise(), caches, tail_frames=60, **options)


def vocoder_of(hift: CausalHiFTGenerator | HiFTGenerator, graphs: bool, limits: BatchLimits) -> Vocoder:
    components = hift.config.harmonics + 1
    if isinstance(hift, CausalHiFTGenerator):
        return CausalVocoder(hift, uniform_noise(components), limits=limits, graphs=graphs)
    return StreamingVocoder(hift, source_noise(components), limits=limits, graphs=graphs)
