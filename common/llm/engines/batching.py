"""Continuous batching: one thread steps all live requests of a model; each may join and leave at any step."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from common.errors import FatalError, UnavailableError, is_fatal
from common.llm.engines.interface import GenerationRequest
from common.llm.engines.sampler import TokenSampler
from common.llm.interface import FinishReason, TokenChunk
from common.process import faults

logger = logging.getLogger(__name__)


class DecoderModel(Protocol):
    """A causal LM whose cache holds independent rows. See `genai.GenAIModel`."""

    context: int
    vocab_size: int
    logit_ids: np.ndarray

    def prefill(self, row: int, input_ids: np.ndarray) -> np.ndarray: ...
    def decode(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray: ...
    def move(self, source: int, target: int, length: int) -> None: ...


# Called by the engine's thread with each token; the last call has a finish reason or is an error. Must not block.
OnToken = Callable[[TokenChunk | Exception], object]


@dataclass(eq=False)
class Generation:
    """A live request, from `submit` until its last token, its error or its cancellation."""

    request: GenerationRequest
    sampler: TokenSampler
    columns: np.ndarray  # of the model's logits that may be sampled
    on_token: OnToken
    length: int = 0  # tokens in its row of the cache
    generated: int = 0
    last_token: int = -1
    cancelled: bool = False

    def cancel(self) -> None:
        """Remove it at the next step, after which `on_token` is not called again. Thread-safe."""
        self.cancelled = True


class BatchingEngine:
    """Serves up to `max_requests` live requests of one model in its own thread.

    speech_ids: the ids that may be sampled in addition to a request's end ids. If the thread fails, all live and later
    requests get FatalError.
    """

    def __init__(self, model: DecoderModel, speech_ids: np.ndarray, max_requests: int) -> None:
        self._model = model
        self._speech_ids = speech_ids
        self._max_requests = max_requests
        self._waiting: deque[Generation] = deque()  # submitted, not yet prefilled
        self._rows: list[Generation] = []  # index: row of the model's cache
        self._wake = threading.Condition()  # guards the waiting queue, the list of rows and the failure
        self._failure: UnavailableError | None = None
        self._thread = threading.Thread(target=self._serve, name="llm-engine", daemon=True)
        self._thread.start()

    @property
    def live(self) -> int:
        """Requests that occupy or wait for a row of the cache; a cancelled one counts until the next step."""
        with self._wake:
            return len(self._waiting) + len(self._rows)

    def submit(self, request: GenerationRequest, on_token: OnToken) -> Generation:
        """Start a request. ValueError if it does not fit, UnavailableError if the engine is full, FatalError if it has
        failed."""
        request.check(self._model.vocab_size, self._model.context)
        allowed = np.union1d(self._speech_ids, np.asarray(request.end_ids))
        candidates, columns, _ = np.intersect1d(self._model.logit_ids, allowed, assume_unique=True, return_indices=True)
        sampler = TokenSampler(request.sampling, candidates, prompt_ids=request.input_ids, end_ids=request.end_ids)
        generation = Generation(request, sampler, columns, on_token)
        with self._wake:
            if self._failure:
                raise self._failure
            if sum(not other.cancelled for other in (*self._waiting, *self._rows)) >= self._max_requests:
                raise UnavailableError(f"the LLM already serves its maximum of {self._max_requests} requests")
            self._waiting.append(generation)
            self._wake.notify()
        return generation

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """The tokens of one request as they are sampled. Closing the generator cancels the request."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue()
        generation = self.submit(request, lambda item: loop.call_soon_threadsafe(arrived.put_nowait, item))
        try:
            finished = False
            while not finished:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                finished = item.finish_reason is not None
        finally:
            generation.cancel()

    def close(self) -> None:
        """Fail all live requests and end the thread."""
        self._fail(UnavailableError("the LLM engine is shut down"))
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._await_work():
                self._prefill_one()
                self._decode_all()
        except Exception as error:
            logger.exception("the LLM engine failed")
            self._fail(FatalError(f"the LLM engine failed: {error}"))
        finally:
            with self._wake:
                self._rows.clear()

    def _await_work(self) -> bool:
        """Wait for a request; False if the engine has failed or is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._rows or self._failure)
            return self._failure is None

    def _prefill_one(self) -> None:
        """Prefill the oldest waiting request. One per step, so that many arrivals do not stall running streams."""
        with self._wake:
            while self._waiting and self._waiting[0].cancelled:
                self._waiting.popleft()
            # A cancelled request may occupy a row until the next decoding step.
            if not self._waiting or len(self._rows) == self._max_requests:
                return
            generation = self._waiting.popleft()
            self._rows.append(generation)
        input_ids = np.asarray(generation.request.input_ids, np.int64)
        row = len(self._rows) - 1
        try:
            logits = self._model.prefill(row, input_ids)
        except Exception as error:
            if is_fatal(error):
                raise
            self._drop(row, error)
            return
        generation.length = len(input_ids)
        self._advance(row, logits)

    def _decode_all(self) -> None:
        """One more token for every row."""
        for row in reversed(range(len(self._rows))):
            if self._rows[row].cancelled:
                self._release(row)
        if not self._rows:
            return
        for generation in self._rows:
            generation.length += 1
        tokens = np.array([generation.last_token for generation in self._rows])
        lengths = np.array([generation.length for generation in self._rows])
        logits = self._model.decode(tokens, lengths)  # (B, V)
        if faults.take("llm_thread"):
            raise RuntimeError("a fault of a test")
        if faults.take("nan_logits"):
            logits[0] = np.nan
        # From the last row down: a release moves the last row into the gap, and that row has been advanced already.
        for row in reversed(range(len(self._rows))):
            self._advance(row, logits[row])

    def _advance(self, row: int, logits: np.ndarray) -> None:
        """Sample a row's next token and report it; free the row if its request has finished or cannot go on."""
        generation = self._rows[row]
        request = generation.request
        scores = logits[generation.columns]
        if not np.isfinite(scores.max()):  # NaN, too
            self._drop(row, FloatingPointError("the LLM's logits are not finite"))
            return
        token = generation.sampler.sample(scores)
        generation.last_token = token
        generation.generated += 1
        finish: FinishReason | None = None
        if token in request.end_ids:
            finish = "stop"
        elif generation.generated == request.sampling.max_tokens:
            finish = "length"
        if finish or generation.cancelled:
            self._release(row)  # before the end is reported: the caller may submit the next request at once
        self._report(generation, TokenChunk([token], finish))

    def _release(self, row: int) -> None:
        """Free a row: the only place where a request leaves the batch. The last row moves into the gap."""
        last = len(self._rows) - 1
        if row != last:
            self._model.move(last, row, self._rows[last].length)
        with self._wake:
            self._rows[row] = self._rows[last]
            self._rows.pop()

    def _drop(self, row: int, error: Exception) -> None:
        """End a request that cannot go on; the others are not affected."""
        generation = self._rows[row]
        self._release(row)
        self._report(generation, error)
        generation.cancel()

    def _fail(self, reason: UnavailableError) -> None:
        with self._wake:
            self._failure = self._failure or reason
            orphans = [*self._waiting, *self._rows]
            self._waiting.clear()
            self._wake.notify()
        for generation in orphans:
            self._report(generation, reason)
            generation.cancel()

    def _report(self, generation: Generation, item: TokenChunk | Exception) -> None:
        if generation.cancelled:
            return
        try:
            generation.on_token(item)
        except RuntimeError:  # its event loop is closed
            generation.cancel()
