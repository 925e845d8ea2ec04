"""An engine with a worker for first chunks, by plain operations: each worker has a form of the flow and the vocoder
over the same streams. With CUDA graphs it is in `test_gpu`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import HOP_SAMPLES, TOKEN_MEL_RATIO
from cosyvoice_triton.monitoring.metrics import FAILED, RETRIED
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.base import StreamingFlow
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER
from cosyvoice_triton.token2wav.stream import Chunk
from cosyvoice_triton.token2wav.vocoder.base import BatchVocoder

from tests.support.streams import Plan, ids, pieces, prompt, together
from tests.token2wav.conftest import FLOWS

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
