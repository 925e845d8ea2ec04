"""Batches by CUDA graphs, whose replay calls the function here. Kernels are in tests/kernels, and all of it is in
`test_gpu`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS
from cosyvoice_triton.networks.flow import UNetFlow
from cosyvoice_triton.networks.flow.base import FlowMatching, time_schedule
from cosyvoice_triton.networks.flow.layers import valid_frames
from cosyvoice_triton.token2wav.flow.unet_flow import GraphedWindowSolve, UNetStreaming
from cosyvoice_triton.token2wav.gpu.graphs import Graphs
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import flow_noise
from cosyvoice_triton.token2wav.stream import Chunk, Stream, VocoderState
from cosyvoice_triton.token2wav.vocoder.base import GraphedRenderer
from cosyvoice_triton.token2wav.vocoder.causal_hift_vocoder import CausalVocoder
from cosyvoice_triton.token2wav.vocoder.hift_vocoder import StreamingVocoder
from torch import Tensor

from tests.support.streams import ids, prompt

STEPS = 2


class Rerun:
    """In place of the capture of CUDA graphs: a replay calls the function. As on a GPU, where graphs share their
    memory, it spoils the results of the other sizes."""

    def __init__(self, worker: int) -> None:
        self._made: list[Replay] = []

    def compile(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def warm_up(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        return function(*inputs)

    def capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], result: Tensor) -> "Replay":
        self._made.append(Replay(function, inputs, result, self._made))
        return self._made[-1]


class Replay:
    def __init__(
        self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], result: Tensor, others: "list[Replay]"
    ) -> None:
        self._function, self._inputs, self._result, self._others = function, inputs, result, others

    def replay(self) -> None:
        result = self._function(*self._inputs)
        for other in self._others:
            other._result.fill_(torch.nan)
        self._result.copy_(result)


rerun_graphs = partial(Graphs, capture=Rerun)


def test_a_length_beyond_every_graph_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    sizes = [(1, 32), (4, 32), (1, 64)]
    graphs = rerun_graphs(lambda x: x, lambda *size: (torch.zeros(size),), sizes, "the vocoder")
    one = [(slice(0, 1), None)]
    assert graphs.parts(3, 30) == [(slice(0, 3), (4, 32))]
    assert graphs.parts(2, 40) == [(slice(0, 1), (1, 64)), (slice(1, 2), (1, 64))]
    assert graphs.parts(1, 99, warn=False) == one and caplog.records == []  # a whole utterance
    assert graphs.parts(1, 65) == graphs.parts(1, 90) == one
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "the vocoder: a length of 65 is beyond the largest CUDA graph"
    ]


def test_a_function_is_first_run_when_it_is_captured_and_its_trial_twice_for_each_size() -> None:
    """Once to compile the kernels, once to load them: a start-up waits for the host, which launches each of them."""
    ran: list[tuple[str, int]] = []

    def function(name: str, x: Tensor) -> Tensor:
        ran.append((name, len(x)))
        return x

    of = partial(function, "function"), partial(function, "trial")
    graphs = rerun_graphs(of[0], lambda *size: (torch.zeros(size),), [(1, 4), (2, 4)], "the flow", trial=of[1])
    assert ran == 2 * [("trial", 2), ("trial", 1)]
    graphs.run((2, 4))
    assert ran[4:] == [("function", 2)]


class InPlaceOf:
    """The estimator itself in place of its fused form."""

    def __init__(self, network: UNetFlow) -> None:
        self._estimator, self._times = network.decoder.estimator, time_schedule(STEPS)[0]

    def velocity(self, step: int, x: Tensor, frames: Tensor) -> Tensor:
        noisy, mu, speaker, condition = x.transpose(1, 2).chunk(4, dim=1)  # (R, T, 4 mel) -> 4 x (R, mel, T)
        valid = valid_frames(frames, x.shape[1]).repeat(len(x) // len(frames), 1, 1)
        time = torch.full((len(x),), self._times[step])
        given = noisy, time, mu, speaker[:, :, 0], condition, valid
        return self._estimator(*given, streaming=True).transpose(1, 2)  # (R, mel, T) -> (R, T, mel)


@pytest.mark.parametrize("guidance", [0.7, 0.0])
@torch.inference_mode()
def test_windows_solved_by_graphs_equal_the_plain_ones_whatever_was_solved_before(unet_network, guidance) -> None:
    """Voices of other lengths in the same rows, a window beyond every graph, more windows than a graph holds."""
    unet_network = copy(unet_network)
    decoder = FlowMatching(unet_network.decoder.estimator, guidance)
    unet_network._modules = {**unet_network._modules, "decoder": decoder}
    sizes, tokens = [(1, 64), (2, 64), (1, 104)], [ids(seed, 100) for seed in range(3)]
    options: dict[str, Any] = {"limits": BatchLimits(max_streams=3), "steps": STEPS}
    plain, graphed = (UNetStreaming(unet_network, flow_noise(), **options) for _ in range(2))
    graphed._solve = GraphedWindowSolve(
        unet_network, InPlaceOf(unet_network), flow_noise(), sizes, STEPS, worker=0, make=rerun_graphs
    )

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
    kind: str, vocoder: StreamingVocoder, causal_vocoder: CausalVocoder
) -> None:
    """More rows than a graph holds, and fewer; a mel of a batch before is not finite; the flow overwrites mels that it
    returned; one stream ends while the others go on, with as many frames as a graph holds."""
    limits = BatchLimits(max_streams=4, max_hop_tokens=20)
    graphed: Any
    plain: Any
    of: Any = causal_vocoder if kind == "causal" else vocoder
    graphed, plain = (type(of)(of._network, of._noise, limits=limits) for _ in range(2))
    renderer = graphed._graphed = GraphedRenderer(graphed._plain, limits, most=130, make=rerun_graphs)
    assert {(2, 48), (4, 32)} < set(renderer._graphs[True].sizes) and (4, 48) not in renderer._graphs[True].sizes
    generator = torch.Generator().manual_seed(0)

    def chunk(of: Any, final: bool, stream: Stream | None = None) -> Chunk:
        return Chunk(stream or Stream(vocoder=of.open()), np.zeros(0, np.int64), final, 0, 0, 0)

    bad = [chunk(graphed, False) for _ in range(4)]
    for frames, value in ((40, torch.nan), (30, 0.0), (30, 0.0), (40, torch.nan)):
        graphed.begin(bad, [torch.full((80, frames), value)] * 4)()
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
            results.append(of.begin(chunks, [given[row] for row in rows])())
            for mel in given if of is graphed else []:
                mel.fill_(torch.nan)
        for ours, theirs in zip(*results, strict=True):
            # Rounding, which is another on each processor, adds up in the source's phase.
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
