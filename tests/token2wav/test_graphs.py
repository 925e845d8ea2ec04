"""The engine's use of CUDA graphs, with a stand-in for their replay that runs on a CPU. Kernels are in `test_gpu`."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.flow import DiTFlow
from common.flow.cache import KeyValues
from common.token2wav import graphs as graphs_module
from common.token2wav.dit.memory import GatheredSolve, NoContext, TailPool
from common.token2wav.dit.solver import DiTSolver
from common.token2wav.hift import graphs as hift_graphs
from common.token2wav.hift.graphs import GraphedRenderer
from common.token2wav.hift.overlap import OverlapPool
from common.token2wav.hift.streaming import StreamingVocoder
from common.token2wav.limits import BatchLimits
from common.token2wav.noise import flow_noise, source_noise
from common.token2wav.stream import Chunk, Stream

STEPS = 2


class Replayed:
    """A function of fixed tensors that leaves its result where those of other sizes were."""

    made: list["Replayed"] = []

    def __init__(self, function: Callable[..., Any], inputs: tuple[Tensor, ...], result: Tensor) -> None:
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
        self._frames, self._into = table[5], table[8].tolist()
        self.places[pool.keys[-1].data_ptr()] = KeyValues(pool.keys[-1], pool.values[-1])

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return NoContext(self._frames, q.shape[2], []).attend(step, layer, q, k, v)

    def keep(self, step: int, keys: Tensor, values: Tensor) -> None:
        for row, (address, count) in enumerate(zip(self._into, self._frames.tolist(), strict=True)):
            place = self.places[address]
            for kept, new in ((place.keys, keys), (place.values, values)):
                kept[step, ..., :count, :] = new[:, row :: len(self._into), :, :count]


@pytest.fixture
def dit_solves(monkeypatch: pytest.MonkeyPatch, dit_network: DiTFlow) -> tuple[Any, GatheredSolve]:
    """With graphs, and plain."""
    monkeypatch.setitem(sys.modules, "common.kernels", ModuleType("common.kernels"))
    monkeypatch.delitem(sys.modules, "common.token2wav.dit.graphs", raising=False)
    from common.token2wav.dit import graphs

    monkeypatch.setattr(graphs, "FusedDiTSolver", DiTSolver)
    monkeypatch.setattr(graphs, "PagedContext", OwnFrames)
    pool = TailPool(dit_network.decoder.estimator.config, dit_network.encoder_proj.weight, STEPS, 4, frames=10)
    limits = BatchLimits(max_streams=4)
    plain = GatheredSolve(DiTSolver(dit_network, STEPS), pool, flow_noise())
    return graphs.GraphedSolve(dit_network, pool, flow_noise(), limits, STEPS), plain


@torch.inference_mode()
def test_prompts_prefilled_by_graphs_equal_the_plain_ones(
    dit_solves: tuple[Any, GatheredSolve], dit_network: DiTFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed, plain = dit_solves
    empty = TailPool.empty_attention

    def noted(pool: TailPool, frames: int) -> KeyValues:
        place = empty(pool, frames)
        OwnFrames.places[place.keys.data_ptr()] = place
        return place

    monkeypatch.setattr(TailPool, "empty_attention", noted)
    bins = dit_network.decoder.estimator.config.out_channels
    generator = torch.Generator().manual_seed(0)
    for frames in ([130, 20], [50, 40, 30, 10, 20, 7], [12]):
        mu, mel = (torch.randn(len(frames), max(frames), bins, generator=generator) for _ in range(2))
        speaker = torch.randn(len(frames), bins, generator=generator)
        found, expected = (solve.prefill(mu, speaker, mel, frames) for solve in (graphed, plain))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.attention.keys, theirs.attention.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours.attention.values, theirs.attention.values, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours.history, theirs.history, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_chunks_vocoded_by_graphs_equal_the_plain_ones_whatever_was_vocoded_before(
    vocoder: StreamingVocoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than a graph holds; a mel of the batch before is not finite; the flow overwrites mels it returned."""
    network, limits = vocoder._plain.hift, BatchLimits(max_streams=3, max_hop_tokens=20)
    noise = source_noise(network.config.harmonics + 1)
    graphed, plain = (StreamingVocoder(network, noise, limits=limits) for _ in range(2))
    graphed.pool = OverlapPool(limits.max_streams, network.config, torch.device("cpu"))
    monkeypatch.setattr(hift_graphs, "HIFT_FRAMES", 95)
    graphed._renderer = GraphedRenderer(network, graphed.pool, noise, limits)
    assert max(graphed._renderer._later.sizes)[0] < 3
    generator = torch.Generator().manual_seed(0)

    def chunk(of: StreamingVocoder, final: bool, stream: Stream | None = None) -> Chunk:
        return Chunk(stream or Stream(vocoder=of.open()), np.zeros(0, np.int64), final, 0, 0, 0)

    bad = [chunk(graphed, False) for _ in range(3)]
    for _ in range(2):
        graphed.step(bad, [torch.full((80, 40), torch.nan)] * 3)
    for each in bad:
        graphed.close(each.stream.vocoder)
    streams = {of: [Stream(vocoder=of.open()) for _ in range(3)] for of in (graphed, plain)}
    for lengths in ((30, 25, 6), (5, 40, 9), (12, 30, 1)):
        mels = [torch.randn(80, length, generator=generator) - 4 for length in lengths]
        results = []
        for of in (graphed, plain):
            given = [mel.clone() for mel in mels]
            results.append(of.step([chunk(of, False, stream) for stream in streams[of]], given))
            for mel in given if of is graphed else []:
                mel.fill_(torch.nan)
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
