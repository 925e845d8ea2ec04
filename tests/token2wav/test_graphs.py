"""Batches by CUDA graphs, whose replay calls the function here; kernels are in tests/kernels. An engine with a worker
for first chunks, by plain operations: each worker has a form of the flow and the vocoder over the same streams. All of
it is in `test_gpu`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import HOP_SAMPLES, LOOKAHEAD_TOKENS, TOKEN_MEL_RATIO
from cosyvoice_triton.monitoring.metrics import FAILED, RETRIED
from cosyvoice_triton.networks.flow import UNetFlow
from cosyvoice_triton.networks.flow.base import FlowMatching, time_schedule
from cosyvoice_triton.networks.flow.layers import valid_frames
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.base import StreamingFlow
from cosyvoice_triton.token2wav.flow.unet_flow import GraphedWindowSolve, UNetStreaming
from cosyvoice_triton.token2wav.gpu.graphs import Graphs
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import flow_noise
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER
from cosyvoice_triton.token2wav.stream import Chunk, Stream, VocoderState
from cosyvoice_triton.token2wav.vocoder.base import BatchVocoder, GraphedRenderer
from cosyvoice_triton.token2wav.vocoder.causal_hift_vocoder import CausalVocoder
from cosyvoice_triton.token2wav.vocoder.hift_vocoder import StreamingVocoder
from torch import Tensor

from tests.support.streams import Plan, ids, pieces, prompt, together
from tests.token2wav.conftest import FLOWS

STEPS = 2


class Rerun:
    """In place of the capture of CUDA graphs: a replay calls the function. As on a GPU, where graphs share their
    memory, it spoils the results of the other sizes."""

    def __init__(self, worker: int) -> None:
        self._results: list[Tensor] = []

    def compile(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def warm_up(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        return function(*inputs)

    def capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], result: Tensor) -> SimpleNamespace:
        def replay() -> None:
            made = function(*inputs)
            for each in self._results:
                each.fill_(torch.nan)
            result.copy_(made)

        self._results.append(result)
        return SimpleNamespace(replay=replay)


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


LIMITS = BatchLimits(max_streams=4, first_hop_tokens=10, max_hop_tokens=20)
TOLERANCE = 1e-3  # between batches, as in test_engine
Used = list[tuple[str, int]]  # which of flow and vocoder computed, and the worker for which


def with_workers(kind: type[Any], used: Used) -> type[Any]:
    """A flow or a vocoder that has a form for each worker, over the same streams."""
    method, name = ("_launch", "vocoder") if issubclass(kind, BatchVocoder) else ("render", "flow")

    class WithWorkers(kind):
        worker = 0

        def for_worker(self, worker: int) -> Any:
            other = copy(self)
            other.worker = worker
            return other

    def noted(self: Any, *arguments: Any) -> Any:
        used.append((name, self.worker))
        return getattr(kind, method)(self, *arguments)

    setattr(WithWorkers, method, noted)
    if hasattr(kind, "_prefill"):

        def prefilled(self: Any, *arguments: Any) -> Any:
            used.append(("prefill", self.worker))
            return kind._prefill(self, *arguments)

        WithWorkers._prefill = prefilled
    return WithWorkers


class Subject(NamedTuple):
    """Two engines of the same networks, one with a worker for first chunks."""

    engine: Token2Wav
    plain: Token2Wav
    used: Used


OPTIONS = {
    "dit": {"cache_frames": 30, "context_tokens": 40},
    "unet": {"context_tokens": 40},
    "cosyvoice3": {"cache_frames": 60},
}


@pytest.fixture(scope="module", params=OPTIONS)
def subject(request: pytest.FixtureRequest, flow_of: Callable[..., StreamingFlow]) -> Subject:
    vocoder = request.getfixturevalue("causal_vocoder" if request.param == "cosyvoice3" else "vocoder")
    used = Used()

    def engine(make: Callable[[type[Any]], type[Any]]) -> Token2Wav:
        kind = make(FLOWS[request.param])
        flow = flow_of(request.param, kind=kind, limits=LIMITS, steps=2, **OPTIONS[request.param])
        return Token2Wav(flow, make(type(vocoder))(vocoder._network, vocoder._noise, limits=LIMITS))

    return Subject(engine(partial(with_workers, used=used)), engine(lambda kind: kind), used)


# Three first chunks in a batch; a whole stream of one chunk; two that begin beside later chunks, one in a voice of
# another stream, one with too little for audio; the last one has a longer first chunk than the first hop makes.
PLANS = [
    (0, prompt(0), 62, [10, 20, 14]),
    (0, prompt(1, tokens=0), 50, [8, 13, 20]),
    (0, prompt(2, tokens=28), 30, [10]),
    (1, prompt(3, tokens=7), LIMITS.first_chunk_tokens, []),
    (2, prompt(0), 44, [9, 20]),
    (2, prompt(1, tokens=0), 15, [2, 1, 9]),
    (4, prompt(4), 42, [20]),
]


def plans(engine: Token2Wav) -> list[Plan]:
    return [Plan(voice, pieces(engine, ids(tokens, tokens), hops), begin) for begin, voice, tokens, hops in PLANS]


def by_workers(engine: Token2Wav, used: Used) -> Callable[[list[Chunk]], list[Any]]:
    """Renders the first chunks of a batch by the worker for them, and the others by the other one."""

    def step(chunks: list[Chunk]) -> list[Any]:
        results: dict[int, Any] = {}
        for worker in (0, FIRST_CHUNK_WORKER):
            used.clear()
            mine = [row for row, chunk in enumerate(chunks) if engine.is_first_chunk(chunk) == (worker != 0)]
            results |= zip(mine, engine.step([chunks[row] for row in mine], worker), strict=True)
            assert {of for _, of in used} <= {worker}
        return [results[row] for row in range(len(chunks))]

    return step


def assert_same(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


def test_streams_that_change_between_workers_sound_as_those_of_a_plain_engine(subject: Subject) -> None:
    """Slots and voices serve again."""
    engine, plain, used = subject
    assert (engine.workers, plain.workers) == (LIMITS.workers, 1)
    expected = together(plain, plans(plain))
    assert [len(audio) for audio in expected] == [tokens * TOKEN_MEL_RATIO * HOP_SAMPLES for _, _, tokens, _ in PLANS]
    assert min(np.abs(audio).max() for audio in expected) > 0.01
    assert_same(together(engine, plans(engine), by_workers(engine, used)), expected)
    assert engine.counts[RETRIED] == engine.counts[FAILED] == 0


@pytest.mark.parametrize("subject", ["dit", "cosyvoice3"], indirect=True)
def test_new_voices_are_prefilled_by_the_worker_for_first_chunks(subject: Subject) -> None:
    """Three in one batch, one by itself."""
    engine, used = subject.engine, subject.used
    used.clear()
    voices = [prompt(seed, tokens=tokens) for seed, tokens in ((20, 12), (21, 28), (22, 0), (23, 28))]
    engine.prefill(voices[:3])
    assert [engine.prefill_frames(voice) for voice in voices[:3]] == [0, 0, 0]
    for voice in voices:
        engine.close(engine.open(voice))
    assert used == 2 * [("prefill", FIRST_CHUNK_WORKER)]


def test_each_worker_warms_up_its_own_flow_and_vocoder(subject: Subject) -> None:
    for worker in range(LIMITS.workers):
        subject.used.clear()
        subject.engine.warm_up(worker)
        rendered = [each for each in subject.used if each[0] != "prefill"]
        assert rendered == [("flow", worker), ("vocoder", worker)]


@torch.inference_mode()
def test_without_workers_of_both_networks_there_is_one(subject: Subject) -> None:
    engine, plain = subject.engine, subject.plain
    for flow, vocoder in ((engine._flow, plain._vocoder), (plain._flow, engine._vocoder)):
        assert Token2Wav(flow, vocoder).workers == 1


def test_once_the_mels_are_made_another_batch_of_the_worker_may_be_rendered(subject: Subject) -> None:
    """Before the first one's audio is waited for; both are as alone."""
    engine, plain = subject.engine, subject.plain

    def chunks(of: Token2Wav, voice: int) -> list[Any]:
        return [pieces(of, ids(voice, 40), [20])[0].of(of, of.open(prompt(voice)))]

    expected = chunks(plain, 50) + chunks(plain, 51)
    alone = [plain.step([chunk])[0] for chunk in expected]
    with ThreadPoolExecutor(1) as pool:
        second: list[np.ndarray] = []

        def on_solved() -> None:
            second.extend(pool.submit(engine.step, others).result(30))

        first, others = chunks(engine, 50), chunks(engine, 51)
        audio = engine.render(first, on_solved=on_solved)
    assert_same([*audio, *second], alone)
    for of, made in ((engine, first + others), (plain, expected)):
        for chunk in made:
            of.close(chunk.stream)
