"""The threads of a token2wav service that render, each one batch at a time."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.policy.admission import Admission
from cosyvoice_triton.token2wav.serving.session import Session

SWITCH_SECONDS = 0.0005  # until a thread lets another one run Python: 5 ms would delay first chunks
MEASURED_CHUNKS = (1, 8)  # of the batches that are rendered before the first listener comes

Work = Callable[[], Sequence[np.ndarray | Exception]]


class RenderedBatch(NamedTuple):
    """What became of a batch: a result for the first request of each session, and the seconds that it took."""

    batch: Sequence[Session]
    results: Sequence[np.ndarray | BaseException]
    seconds: float


class Worker:
    """A thread that renders with one of the engine's workers.

    The service gives it a batch, and takes that back with its results when it is done.
    """

    def __init__(self, number: int, *, max_chunks: int = 1, on_done: Callable[[], None], clock: Callable[[], float]):
        """Start a worker. number: of the engine's worker. max_chunks: of a batch. on_done: called from the thread after
        each batch."""
        self.number = number
        self.max_chunks = max_chunks
        self._on_done = on_done
        self._clock = clock
        self._rendering: Future[RenderedBatch] | None = None
        self._thread = ThreadPoolExecutor(1, f"token2wav-worker-{number}")

    @property
    def idle(self) -> bool:
        """Return whether it can be given a batch."""
        return self._rendering is None

    def call(self, function: Callable[[], object]) -> None:
        """Run a function in the thread and wait for it. Raises what it raises."""
        self._thread.submit(function).result()

    def render(self, batch: Sequence[Session], work: Work) -> None:
        """Begin a batch. An exception of `work` is the result of all its requests."""
        self._rendering = self._thread.submit(self._rendered, batch, work)
        self._rendering.add_done_callback(lambda _: self._on_done())

    def take(self) -> RenderedBatch | None:
        """Return the batch that is done; None if there is none."""
        if self._rendering is None or not self._rendering.done():
            return None
        rendered = self._rendering.result()
        self._rendering = None
        return rendered

    def close(self) -> None:
        """End the thread after what it renders, which may then be taken."""
        self._thread.shutdown()

    def _rendered(self, batch: Sequence[Session], work: Work) -> RenderedBatch:
        begun = self._clock()
        results: Sequence[np.ndarray | BaseException]
        try:
            results = work()
        except (Exception, asyncio.CancelledError) as error:  # one that no batch would survive
            results = [error] * len(batch)
        return RenderedBatch(batch, results, self._clock() - begun)


def measure(engine: Token2Wav, admission: Admission, clock: Callable[[], float]) -> None:
    """Render first chunks, one alone and several together, so that admission knows what they cost. Raises what that
    raises."""
    prompt, tokens = engine.sample(engine.limits.first_hop_tokens)
    for warm in (False, True):  # the first batch of a size takes longer
        for size in MEASURED_CHUNKS:
            streams = [engine.open(prompt) for _ in range(min(size, engine.limits.max_streams))]
            try:
                chunks, begun = [engine.chunk(stream, tokens, final=True) for stream in streams], clock()
                results = engine.render(chunks)
                if warm:
                    samples = sum(len(result) for result in results if not isinstance(result, Exception))
                    computed = engine.padded(len(chunks), chunks[0].computed)
                    admission.rendered(len(chunks), computed, samples / SAMPLE_RATE, clock() - begun)
            finally:
                for stream in streams:
                    engine.close(stream)
