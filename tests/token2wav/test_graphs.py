"""The engine's use of CUDA graphs, with a stand-in for their replay that runs on a CPU. Kernels are in `test_gpu`."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS
from cosyvoice_triton.networks.flow import CosyVoice3Flow, DiTFlow, UNetFlow
from cosyvoice_triton.networks.flow.cache import KeyValues
from cosyvoice_triton.networks.flow.layers import valid_frames
from cosyvoice_triton.networks.flow.matching import time_schedule
from cosyvoice_triton.networks.hift import CausalHiFTGenerator
from cosyvoice_triton.token2wav.flow import plain_operations
from cosyvoice_triton.token2wav.flow.dit_solver import DiTSolver
from cosyvoice_triton.token2wav.flow.kv_cache import TailPool
from cosyvoice_triton.token2wav.flow.rotary_solver import RotarySolver
from cosyvoice_triton.token2wav.flow.solve import GatheredSolve, NoContext
from cosyvoice_triton.token2wav.flow.unet_flow import UNetStreaming
from cosyvoice_triton.token2wav.flow.unet_graphs import GraphedWindowSolve
from cosyvoice_triton.token2wav.gpu import graphs as graphs_module
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import flow_noise, source_noise, uniform_noise
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER
from cosyvoice_triton.token2wav.stream import Chunk, Stream, VocoderState
from cosyvoice_triton.token2wav.vocoder import vocoder_graphs
from cosyvoice_triton.token2wav.vocoder.causal_hift_vocoder import CausalVocoder
from cosyvoice_triton.token2wav.vocoder.hift_vocoder import StreamingVocoder
from cosyvoice_triton.token2wav.vocoder.vocoder_graphs import GraphedRenderer
from torch import Tensor

from tests.support.streams import ids, prompt

STEPS = 2


class Replayed:
    """A function of fixed tensors that leaves its result where those of other sizes were."""

    made: list["Replayed"] = []

    def __init__(self, function: Callable[..., Any], inputs: tuple[Tensor, ...], result: Tensor, urgent: bool) -> None:
        self._function, self._inputs, self._result = function, inputs, result
        self.made.append(self)

    def replay(self) -> None:
        result = self._function(*self._inputs)
        for other in self.made:
            if other._result.untyped_storage().data_ptr() == self._result.untyped_storage().data_ptr():
                other._result.fill_(torch.nan)
        self._result.copy_(result)


@pytest.fixture(autouse=True)
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # as from a GPU
    monkeypatch.setattr(graphs_module, "_warm_up", lambda function, inputs: function(*inputs))
    monkeypatch.setattr(graphs_module, "_capture", Replayed)
    monkeypatch.setattr(Replayed, "made", [])


class OwnFrames:
    """In place of the kernels: rows attend to the frames of their own that the table counts, which go to where it says.

    `places`: those that a table may name, by the address of their keys.
    """

    places: dict[int, KeyValues] = {}

    def __init__(self, pool: TailPool, table: Tensor) -> None:
        self._frames, self._into, self._mask_chunk = table[5], table[8].tolist(), pool.mask_chunk
        self.places[pool.keys[-1].data_ptr()] = KeyValues(pool.keys[-1], pool.values[-1])

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return NoContext(self._frames, q.shape[2], [], self._mask_chunk).attend(step, layer, q, k, v)

    def keep(self, step: int, keys: Tensor, values: Tensor) -> None:
        for row, (address, count) in enumerate(zip(self._into, self._frames.tolist(), strict=True)):
            place = self.places[address]
            for kept, new in ((place.keys, keys), (place.values, values)):
                kept[step, ..., :count, :] = new[:, row :: len(self._into), :, :count]


@pytest.fixture(params=["dit_network", "rotary_network"])
def solves(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[CosyVoice3Flow | DiTFlow, Any, GatheredSolve]:
    """A network, and its solve with graphs and plain."""
    network: CosyVoice3Flow | DiTFlow = request.getfixturevalue(request.param)
    launch: Any = ModuleType("cosyvoice_triton.kernels.launch")
    launch.compiled_ahead = nullcontext
    monkeypatch.setitem(sys.modules, "cosyvoice_triton.kernels", ModuleType("cosyvoice_triton.kernels"))
    monkeypatch.setitem(sys.modules, launch.__name__, launch)
    monkeypatch.delitem(sys.modules, "cosyvoice_triton.token2wav.flow.cached_graphs", raising=False)
    from cosyvoice_triton.token2wav.flow import cached_graphs as graphs

    monkeypatch.setattr(graphs, "PagedContext", OwnFrames)
    pool = TailPool(network.config.estimator, network.spk_embed_affine_layer.weight, STEPS, 4, frames=10)
    limits = BatchLimits(max_streams=4).of_worker(FIRST_CHUNK_WORKER)
    solver = (
        DiTSolver(network, plain_operations, STEPS)
        if isinstance(network, DiTFlow)
        else RotarySolver(network, plain_operations, STEPS)
    )
    plain = GatheredSolve(solver, pool, flow_noise())
    return network, graphs.GraphedSolve(solver, pool, flow_noise(), limits, 200), plain


def test_the_graphs_of_first_chunks_are_urgent_and_each_worker_has_a_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, bool]] = []
    monkeypatch.setattr(graphs_module, "new_stream", lambda *of: made.append(of) or len(made))
    stream = cache(graphs_module._capture_stream.__wrapped__)
    assert [stream(7, worker) for worker in (0, FIRST_CHUNK_WORKER, 2, 0)] == [1, 2, 3, 1]
    assert made == [(7, False), (7, True), (7, False)]


@torch.inference_mode()
def test_prompts_prefilled_by_graphs_equal_the_plain_ones(
    solves: tuple[CosyVoice3Flow | DiTFlow, Any, GatheredSolve], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, graphed, plain = solves
    empty = TailPool.empty_attention

    def noted(pool: TailPool, frames: int) -> KeyValues:
        place = empty(pool, frames)
        OwnFrames.places[place.keys.data_ptr()] = place
        return place

    monkeypatch.setattr(TailPool, "empty_attention", noted)
    bins = network.config.estimator.out_channels
    generator = torch.Generator().manual_seed(0)
    for frames in ([130, 20], [50, 40, 30, 10, 20, 7], [12]):
        mu, mel = (torch.randn(len(frames), max(frames), bins, generator=generator) for _ in range(2))
        speaker = torch.randn(len(frames), bins, generator=generator)
        found, expected = (solve.prefill(mu, speaker, mel, frames) for solve in (graphed, plain))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.attention.keys, theirs.attention.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours.attention.values, theirs.attention.values, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours.history, theirs.history, atol=1e-4, rtol=1e-4)


class InPlaceOf:
    """The estimator itself in place of its fused form."""

    def __init__(self, network: UNetFlow) -> None:
        self._estimator, self._times = network.decoder.estimator, time_schedule(STEPS)[0]

    def velocity(self, step: int, x: Tensor, frames: Tensor) -> Tensor:
        noisy, mu, speaker, condition = x.transpose(1, 2).chunk(4, dim=1)  # (R, T, 4 mel) -> 4 x (R, mel, T)
        valid = valid_frames(frames, x.shape[1]).repeat(2, 1, 1)
        time = torch.full((len(x),), self._times[step])
        given = noisy, time, mu, speaker[:, :, 0], condition, valid
        return self._estimator(*given, streaming=True).transpose(1, 2)  # (R, mel, T) -> (R, T, mel)


@torch.inference_mode()
def test_windows_solved_by_graphs_equal_the_plain_ones_whatever_was_solved_before(unet_network: UNetFlow) -> None:
    """Voices of other lengths in the same rows, a window beyond every graph, more windows than a graph holds."""
    sizes, tokens = [(1, 64), (2, 64), (1, 104)], [ids(seed, 100) for seed in range(3)]
    options: dict[str, Any] = {"limits": BatchLimits(max_streams=3), "steps": STEPS}
    plain, graphed = (UNetStreaming(unet_network, flow_noise(), **options) for _ in range(2))
    graphed._solve = GraphedWindowSolve(unet_network, InPlaceOf(unet_network), flow_noise(), sizes, STEPS, worker=0)

    def mels(flow: UNetStreaming, voices: tuple[int, ...], ends: tuple[int, ...]) -> list[Tensor]:
        streams = [flow.open(prompt(tokens, tokens=tokens), VocoderState(0)) for tokens in voices]
        sent = [row[: end + LOOKAHEAD_TOKENS] for row, end in zip(tokens, ends, strict=True)]
        return flow.render([flow.chunk(*pair, final=False) for pair in zip(streams, sent, strict=True)])

    for batch in (((20, 12, 0), (20, 3, 24)), ((0, 30, 5), (10, 4, 20)), ((3, 9, 25), (90, 1, 2))):
        for ours, theirs in zip(mels(graphed, *batch), mels(plain, *batch), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["overlapping", "causal"])
def test_chunks_vocoded_by_graphs_equal_the_plain_ones_whatever_was_vocoded_before(
    kind: str, vocoder: StreamingVocoder, causal_hift: CausalHiFTGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than a graph holds, and fewer; a mel of a batch before is not finite; the flow overwrites mels that it
    returned; one stream ends while the others go on, with as many frames as a graph holds."""
    limits = BatchLimits(max_streams=4, max_hop_tokens=20)
    monkeypatch.setattr(vocoder_graphs, "HIFT_FRAMES", 130)
    graphed: Any
    plain: Any
    if kind == "causal":
        noise = uniform_noise(causal_hift.config.harmonics + 1)
        graphed, plain = (CausalVocoder(causal_hift, noise, limits=limits) for _ in range(2))
        renderer = graphed._graphed = GraphedRenderer(graphed._plain, limits)
    else:
        network = vocoder._plain.hift
        noise = source_noise(network.config.harmonics + 1)
        graphed, plain = (StreamingVocoder(network, noise, limits=limits) for _ in range(2))
        renderer = graphed._renderer = GraphedRenderer(graphed._plain, limits)
    assert {(2, 48), (4, 32)} < set(renderer._graphs[True].sizes) and (4, 48) not in renderer._graphs[True].sizes
    generator = torch.Generator().manual_seed(0)

    def chunk(of: Any, final: bool, stream: Stream | None = None) -> Chunk:
        return Chunk(stream or Stream(vocoder=of.open()), np.zeros(0, np.int64), final, 0, 0, 0)

    bad = [chunk(graphed, False) for _ in range(4)]
    for frames, value in ((40, torch.nan), (30, 0.0), (30, 0.0), (40, torch.nan)):
        graphed.step(bad, [torch.full((80, frames), value)] * 4)
    for each in bad:
        graphed.close(each.stream.vocoder)
    streams = {of: [Stream(vocoder=of.open()) for _ in range(3)] for of in (graphed, plain)}
    for lengths, ends in (((30, 25, 16), ()), ((40, 35, 33), ()), ((12, 32, 1), (1,)), ((8, 0, 20), (0, 2))):
        mels = [torch.randn(80, length, generator=generator) - 4 for length in lengths]
        results = []
        for of in (graphed, plain):
            given = [mel.clone() for mel in mels]
            rows = [row for row, length in enumerate(lengths) if length]
            chunks = [chunk(of, row in ends, streams[of][row]) for row in rows]
            results.append(of.step(chunks, [given[row] for row in rows]))
            for mel in given if of is graphed else []:
                mel.fill_(torch.nan)
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
