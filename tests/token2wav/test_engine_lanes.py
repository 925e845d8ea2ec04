"""An engine that renders first chunks apart, with a stand-in for CUDA graphs and their kernels that runs on a CPU; on a
GPU it is in `test_gpu`."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import HOP_SAMPLES, LOOKAHEAD_TOKENS, TOKEN_MEL_RATIO
from cosyvoice_triton.monitoring.environment import TEST_FAULTS
from cosyvoice_triton.monitoring.metrics import EVICTED, FAILED, RETRIED, Values
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.token2wav.engine import Token2Wav, Worker
from cosyvoice_triton.token2wav.flow.cached_flow import CachedStreaming
from cosyvoice_triton.token2wav.flow.cosyvoice3_flow import CosyVoice3Streaming
from cosyvoice_triton.token2wav.flow.dit_flow import DiTStreaming
from cosyvoice_triton.token2wav.flow.unet_flow import UNetStreaming
from cosyvoice_triton.token2wav.gpu import graphs as graphs_module
from cosyvoice_triton.token2wav.gpu import limits as limits_module
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER
from cosyvoice_triton.token2wav.stream import Chunk, Stream
from cosyvoice_triton.token2wav.vocoder.hift_vocoder import StreamingVocoder
from cosyvoice_triton.voice.prompt import Prompt

from tests.support.graphs_on_cpu import CONTEXT, LIMITS, Noted, OnGpu, engine_of, flow_of, replace_kernels
from tests.support.streams import Piece, dit_pieces, ids, prompt, unet_pieces
from tests.token2wav.test_graphs import InPlaceOf, Replayed

TOLERANCE = 1e-3  # between batches, as in test_engine
# Few graphs, which are made fast: a prompt has at most 28 tokens, the fewest of which CosyVoice3 keeps something.
SMALL = {
    "LONGEST_PROMPT": 28,
    "CONTEXT_TOKENS": CONTEXT,
    "PROMPT_FRAMES": (32,),
    "WINDOW_TOKENS": (24, 56),
    "WINDOW_FRAMES": (48, 112),
}
# Tokens of the longest of three chunks -> frames of a row of the graph that holds them, for first chunks and others.
PADDED: dict[type, tuple[int, tuple[int, int]]] = {
    DiTStreaming: (10, (24, 32)),
    UNetStreaming: (30, (80, 112)),
    CosyVoice3Streaming: (30, (64, 64)),
}
GRAPHS = 3  # that a batch replays: encoder, estimator, vocoder


class Subject(NamedTuple):
    """Two engines of the same networks: one with graphs, which renders first chunks apart, and a plain one. expected:
    the audio of PLANS, of the plain one."""

    engine: Token2Wav
    plain: Token2Wav
    expected: list[np.ndarray]


@pytest.fixture(scope="module", autouse=True)
def one_thread_each() -> Iterator[None]:
    """Of an operation: two operations at a time then round as one alone, and other tests keep a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def pretended_gpu() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        patch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # as from a GPU
        patch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda _: None)
        patch.setattr(graphs_module, "_warm_up", lambda function, inputs: function(*inputs))
        patch.setattr(graphs_module, "_capture", Noted)
        patch.setattr(Replayed, "made", [])
        for name, value in SMALL.items():
            patch.setattr(limits_module, name, value)
        patch.setattr(UNetStreaming, "_fused", lambda self, *_: InPlaceOf(self._network))
        replace_kernels(patch)
        yield patch


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Noted]:
    """Those of the test."""
    noted: list[Noted] = []
    monkeypatch.setattr(Noted, "replays", noted)
    return noted


@pytest.fixture(scope="module", params=["dit", "unet", "cosyvoice3"])
def subject(request: pytest.FixtureRequest, pretended_gpu: pytest.MonkeyPatch) -> Iterator[Subject]:
    kind: str = request.param
    names = {"dit": "dit_network", "unet": "unet_network", "cosyvoice3": "rotary_network"}
    network = request.getfixturevalue(names[kind])
    causal = kind == "cosyvoice3"
    hift = request.getfixturevalue("causal_hift" if causal else "vocoder")
    hift = hift if causal else hift._plain.hift
    with pytest.MonkeyPatch.context() as patch:
        for layer in (network.spk_embed_affine_layer, hift.conv_pre):
            patch.setitem(layer._parameters, "weight", OnGpu(layer.weight, requires_grad=False))
        engine, plain = (engine_of(network, hift, graphs) for graphs in (True, False))
        yield Subject(engine, plain, spoken(plain, []))


class Plan(NamedTuple):
    """A stream that begins at a turn, and has a chunk in each turn from then on."""

    begin: int
    voice: Prompt
    tokens: int
    hops: list[int]

    def pieces(self, engine: Token2Wav) -> list[Piece]:
        return pieces(engine, ids(self.tokens, self.tokens), self.hops)


# Three first chunks in a batch; a whole stream of one chunk; two that begin beside later chunks, one in a voice of
# another stream, one with too little for audio; the last one has a longer first chunk than the first hop makes.
PLANS = [
    Plan(0, prompt(0), 62, [10, 20, 14]),
    Plan(0, prompt(1, tokens=0), 50, [8, 13, 20]),
    Plan(0, prompt(2, tokens=28), 30, [10]),
    Plan(1, prompt(3, tokens=7), LIMITS.first_chunk_tokens, []),
    Plan(2, prompt(0), 44, [9, 20]),
    Plan(2, prompt(1, tokens=0), 15, [2, 1, 9]),
    Plan(4, prompt(4), 42, [20]),
]


def pieces(engine: Token2Wav, tokens: np.ndarray, hops: list[int]) -> list[Piece]:
    return (unet_pieces if engine._flow.cumulative else dit_pieces)(tokens, hops)


def spoken(engine: Token2Wav, replays: list[Noted]) -> list[np.ndarray]:
    """The audio of the plans' streams as far as they come, each batch by the graphs of its worker alone."""
    audio: list[list[np.ndarray]] = [[] for _ in PLANS]
    live: dict[int, tuple[Stream, list[Piece]]] = {}
    for turn in range(max(plan.begin + len(plan.hops) for plan in PLANS) + 1):
        replays.clear()
        opened = [row for row, plan in enumerate(PLANS) if plan.begin == turn]
        live |= {row: (engine.open(PLANS[row].voice), PLANS[row].pieces(engine)) for row in opened}
        assert {replay.worker for replay in replays} <= {min(FIRST_CHUNK_WORKER, engine.workers - 1)}
        chunks = {row: left.pop(0).of(engine, stream) for row, (stream, left) in live.items()}
        for starts in (True, False):
            worker = min(FIRST_CHUNK_WORKER if starts else 0, engine.workers - 1)
            rows = [row for row, chunk in chunks.items() if engine.is_first_chunk(chunk) == starts]
            replays.clear()
            for row, result in zip(rows, engine.render([chunks[row] for row in rows], worker), strict=True):
                if isinstance(result, Exception):
                    assert str(result) == "a bad chunk"
                    engine.close(live.pop(row)[0])
                else:
                    audio[row].append(result)
            assert {replay.worker for replay in replays} <= {worker}
            assert len(replays) >= (GRAPHS if rows and engine._flow._graphed else 0)
        for row in [row for row, (_, left) in live.items() if not left]:
            engine.close(live.pop(row)[0])
    assert not live
    return [np.concatenate([np.zeros(0, np.float32), *parts]) for parts in audio]


def assert_same(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


def test_streams_that_change_between_lanes_sound_as_those_of_a_plain_engine(
    subject: Subject, replays: list[Noted], caplog: pytest.LogCaptureFixture
) -> None:
    """Slots and voices serve again. Every chunk fits a graph, except for the first one that is too long."""
    engine, plain, expected = subject
    assert (engine.workers, plain.workers) == (LIMITS.workers, 1)
    assert [len(audio) for audio in expected] == [plan.tokens * TOKEN_MEL_RATIO * HOP_SAMPLES for plan in PLANS]
    assert min(np.abs(audio).max() for audio in expected) > 0.01
    for _ in range(2):
        assert_same(spoken(engine, replays), expected)
    assert engine.counts[RETRIED] == engine.counts[FAILED] == 0
    beyond = "the vocoder's first chunks: a length of 40 is beyond the largest CUDA graph"
    assert {record.getMessage().split(",")[0] for record in caplog.records} <= {beyond}


OfFault = Callable[[str], tuple[list[np.ndarray], Values]]


@pytest.fixture
def of_fault(subject: Subject, replays: list[Noted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OfFault:
    """The audio of PLANS if the first batch of first chunks has that fault, and how much more went wrong."""

    def speak(fault: str) -> tuple[list[np.ndarray], Values]:
        before = subject.engine.counts
        monkeypatch.setenv(TEST_FAULTS, str(tmp_path))
        (tmp_path / fault).touch()
        audio = spoken(subject.engine, replays)
        assert not (tmp_path / fault).exists()
        return audio, {name: count - before[name] for name, count in subject.engine.counts.items()}

    return speak


def test_a_first_chunk_that_is_not_finite_is_rendered_again_and_its_stream_goes_on(
    subject: Subject, of_fault: OfFault
) -> None:
    """It is one of three in a batch."""
    audio, more = of_fault("nan_mel")
    assert_same(audio, subject.expected)
    assert (more[RETRIED], more[FAILED]) == (1, 0)


@pytest.mark.parametrize("subject", ["dit"], indirect=True)
def test_a_voice_that_is_not_finite_is_made_again_for_all_workers(subject: Subject, of_fault: OfFault) -> None:
    audio, more = of_fault("nan_voice")
    assert_same(audio, subject.expected)
    assert (more[RETRIED], more[EVICTED]) == (1, 1)


def test_a_first_chunk_that_fails_leaves_the_others_of_its_batch_as_they_are(
    subject: Subject, of_fault: OfFault
) -> None:
    audio, more = of_fault("bad_chunk")
    assert_same(audio[1:], subject.expected[1:])
    assert len(audio[0]) == 0 and (more[RETRIED], more[FAILED]) == (0, 1)


def test_new_voices_are_prefilled_by_the_graphs_of_first_chunks(subject: Subject, replays: list[Noted]) -> None:
    """Three in one batch, one by itself; the streams in them sound the same, also in their later chunks."""
    engine, plain, _ = subject
    voices = [prompt(seed, tokens=tokens) for seed, tokens in ((20, 12), (21, 28), (22, 0), (23, 28))]
    made = 2 if isinstance(engine._flow, CachedStreaming) else 0  # by the encoder and the estimator
    audio: list[list[np.ndarray]] = []
    for of in (engine, plain):
        replays.clear()
        of.prefill(voices[:3])
        assert [of.prefill_frames(voice) for voice in voices[:3]] == [0, 0, 0]
        assert [replay.worker for replay in replays] == [FIRST_CHUNK_WORKER] * (made if of is engine else 0)
        replays.clear()
        streams = [of.open(voice) for voice in voices]
        assert [replay.worker for replay in replays] == [FIRST_CHUNK_WORKER] * (made if of is engine else 0)
        plan = pieces(of, ids(0, 40), [10, 20])
        workers = [min(FIRST_CHUNK_WORKER, of.workers - 1), *[0] * (len(plan) - 1)]
        turns = [
            of.step([piece.of(of, s) for s in streams], worker) for piece, worker in zip(plan, workers, strict=True)
        ]
        audio.append([np.concatenate(parts) for parts in zip(*turns, strict=True)])
        for stream in streams:
            of.close(stream)
    assert_same(*audio)


def test_each_worker_warms_up_its_own_graphs(
    subject: Subject, replays: list[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    used, plain = list[Worker](), Worker.used
    monkeypatch.setattr(Worker, "used", lambda worker: used.append(worker) or plain(worker))
    for worker in range(LIMITS.workers):
        replays.clear()
        used.clear()
        subject.engine.warm_up(worker)
        assert used[1] is subject.engine._workers[worker]  # the first is the one in which the stream is opened
        assert [replay.worker for replay in replays][-GRAPHS:] == [worker] * GRAPHS
        assert {replay.worker for replay in replays} <= {
            FIRST_CHUNK_WORKER,
            worker,
        }  # the voice is prefilled by the first
    tokens, frames = PADDED[type(subject.engine._flow)]
    padded = [subject.engine.padded(3, tokens, worker) for worker in (FIRST_CHUNK_WORKER, 0)]
    assert padded == [4 * length // TOKEN_MEL_RATIO for length in frames]


@pytest.mark.parametrize("hop", [1, 5])
def test_the_warm_up_renders_a_first_chunk_of_any_first_hop(
    subject: Subject, hop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of: Any = subject.plain
    limits = replace(LIMITS, first_hop_tokens=hop)
    engine = engine_of(of._flow._network, of._vocoder._hift, graphs=False, limits=limits)
    rendered: list[int] = []
    render = engine.render

    def noted(chunks: Sequence[Chunk], worker: int) -> list[np.ndarray | Exception]:
        rendered.extend(chunk.new for chunk in chunks)
        return render(chunks)

    monkeypatch.setattr(engine, "render", noted)
    engine.warm_up(FIRST_CHUNK_WORKER)
    assert rendered == [hop]


@torch.inference_mode()
def test_without_graphs_of_both_networks_there_is_one_worker(subject: Subject) -> None:
    engine, plain, _ = subject
    for flow, vocoder in ((engine._flow, plain._vocoder), (plain._flow, engine._vocoder)):
        assert Token2Wav(flow, vocoder).workers == 1


def test_where_the_memory_is_too_small_for_more_lanes_one_has_graphs_for_all(
    subject: Subject, replays: list[Noted]
) -> None:
    of: Any = subject.plain
    engine = engine_of(of._flow._network, of._vocoder._hift, graphs=True, limits=replace(LIMITS, workers=1))
    assert engine.workers == 1
    assert_same(spoken(engine, replays), subject.expected)
    replays.clear()
    engine.prefill([prompt(seed, tokens=28) for seed in (20, 21)])
    assert len(replays) == (2 if isinstance(of._flow, CachedStreaming) else 0)  # by the encoder and the estimator


class Turns:
    """Two threads go on in turns, one replay each; after the end of one, the other goes on alone."""

    def __init__(self) -> None:
        self._side = threading.local()
        self._may_go = {"starts": threading.Semaphore(1), "batches": threading.Semaphore(0)}
        self._other = {"starts": "batches", "batches": "starts"}
        self._ended = False

    @contextmanager
    def taken(self, side: str) -> Iterator[None]:
        """By this thread."""
        assert self._may_go[side].acquire(timeout=60)
        self._side.name = side
        try:
            yield
        finally:
            del self._side.name
            self._ended = True
            self._may_go[self._other[side]].release()

    def give_way(self) -> None:
        side = getattr(self._side, "name", None)
        if side is not None and not self._ended:
            self._may_go[self._other[side]].release()
            assert self._may_go[side].acquire(timeout=60)


VOICES = [prompt(seed, tokens=tokens) for seed, tokens in ((30, 12), (31, 20), (32, 0), (33, 5))]
LATER = 4  # chunks of each stream that a thread renders in batches


def firsts(engine: Token2Wav, turn: int) -> list[np.ndarray]:
    """The audio of first chunks of two streams, which end then."""
    voices = [VOICES[turn % 4], VOICES[(turn + 1) % 4]]
    streams = [engine.open(voice) for voice in voices]
    piece = pieces(engine, ids(turn, 30), [8 + turn % 3])[0]
    audio = engine.step([piece.of(engine, stream) for stream in streams], FIRST_CHUNK_WORKER)
    for stream in streams:
        engine.close(stream)
    return audio


def later(engine: Token2Wav, streams: list[Stream]) -> list[list[np.ndarray]]:
    """The audio of the chunks after the first ones of two streams, which end then."""
    tokens = [ids(100 + row, 90) for row in range(len(streams))]
    plans = [pieces(engine, of, [10, 20, 20, 20])[1:] for of in tokens]
    audio = []
    for turn in zip(*plans, strict=True):
        audio.append(engine.step([piece.of(engine, stream) for piece, stream in zip(turn, streams, strict=True)]))
    for stream in streams:
        engine.close(stream)
    return audio


def begun(engine: Token2Wav) -> list[Stream]:
    """The streams of `later`, after their first chunks."""
    streams = [engine.open(voice) for voice in VOICES[:2]]
    plans = [pieces(engine, ids(100 + row, 90), [10]) for row in range(2)]
    engine.step([plan[0].of(engine, stream) for plan, stream in zip(plans, streams, strict=True)], FIRST_CHUNK_WORKER)
    return streams


def assert_equal(actual: list[list[np.ndarray]], expected: list[list[np.ndarray]]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_a_batch_and_first_chunks_in_turns_are_each_as_alone(
    subject: Subject, replays: list[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread waits, at every graph, between its inputs and the replay and between that and the result, until the
    other one is there, too."""
    engine = subject.engine
    for voice in VOICES:
        engine.close(engine.open(voice))

    def all_firsts() -> list[list[np.ndarray]]:
        return [firsts(engine, turn) for turn in range(LATER)]

    alone = all_firsts(), later(engine, begun(engine))
    streams, turns = begun(engine), Turns()
    replays.clear()
    monkeypatch.setattr(Noted, "meanwhile", staticmethod(turns.give_way))

    def taking(side: str, render: Callable[[], list[list[np.ndarray]]]) -> list[list[np.ndarray]]:
        with turns.taken(side):
            return render()

    with ThreadPoolExecutor(2) as pool:
        rendered = [
            pool.submit(taking, "starts", all_firsts),
            pool.submit(taking, "batches", partial(later, engine, streams)),
        ]
    for result, expected in zip(rendered, alone, strict=True):
        assert_equal(result.result(), expected)
    assert [replay.worker for replay in replays] == [FIRST_CHUNK_WORKER, 0] * GRAPHS * LATER


def test_first_chunks_and_new_voices_beside_batches_are_as_alone(subject: Subject) -> None:
    """Two threads that do not wait for each other."""
    engine = subject.engine
    alone, firsts_alone = later(engine, begun(engine)), [firsts(engine, turn) for turn in range(4)]
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        for stranger in range(2):
            streams = begun(engine)
            done.clear()
            batches = pool.submit(later, engine, streams)
            batches.add_done_callback(lambda _: done.set())
            while True:
                assert_equal([firsts(engine, turn) for turn in range(4)], firsts_alone)
                voice = replace(VOICES[1], embedding=VOICES[1].embedding + stranger)
                engine.close(engine.open(voice))
                if done.is_set():
                    break
            assert_equal(batches.result(), alone)


@pytest.mark.parametrize(("kind", "boundary"), [("dit", 1), ("dit", 5), ("unet", 1), ("unet", 5)])
@pytest.mark.parametrize("first_hop", [7, 15])
def test_a_start_is_any_first_chunk_of_the_first_hop(
    kind: str, boundary: int, first_hop: int, request: pytest.FixtureRequest, vocoder: StreamingVocoder
) -> None:
    """As the hop schedule makes them, also of a text that ends in the first hop; no longer one, and no later one."""
    limits = BatchLimits(max_streams=1, first_hop_tokens=first_hop, max_hop_tokens=20, chunk_boundary=boundary)
    network = request.getfixturevalue(f"{kind}_network")
    engine = Token2Wav(flow_of(network, graphs=False, limits=limits), vocoder)
    rules = HopRules(first_hop=first_hop, max_hop=20, boundary=boundary)
    longest = 0
    for voice in [prompt(0, tokens=tokens) for tokens in range(3, 3 + boundary)]:
        for count in range(1, 50):
            schedule = rules.schedule(len(voice.tokens))
            hops = list(iter(partial(schedule.next_hop, count, ended=True), None))
            plan = pieces(engine, ids(count, count), [hop.length for hop in hops[:-1]])
            stream = engine.open(voice)
            for index, piece in enumerate(plan):
                chunk = piece.of(engine, stream)
                assert engine.is_first_chunk(chunk) == (index == 0)
                longest = max(longest, 0 if index else chunk.new)
                stream.rendered += chunk.new
            engine.close(stream)
    assert longest == limits.first_chunk_tokens == first_hop + boundary - 1 + LOOKAHEAD_TOKENS - 1
    stream = engine.open(prompt(0))
    for final in (False, True):
        count = longest + (0 if final else LOOKAHEAD_TOKENS)
        of_limit, beyond = (engine.chunk(stream, ids(0, count + more), final=final) for more in (0, 1))
        assert of_limit.new == longest and engine.is_first_chunk(of_limit) and not engine.is_first_chunk(beyond)
