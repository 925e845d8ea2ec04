"""An answer's audio as it is generated. All routes use this to call a model.

    Dispatcher.waveforms   chunks of samples, from the least busy Triton
    Dispatcher.encoded     the same as bytes of the answer's format

Both are async generators that must be closed (`aclosing`): this ends the work in Triton when a client disconnects.
An `ApiError` before the first item can become an HTTP status; a later one must end the answer visibly.
"""

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
from async_timeout import timeout

from cosyvoice_triton.client.answer import AudioPart
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.refusals import LastRefusal, RefusalLog
from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.audio.encoding import AudioEncoder
from cosyvoice_triton.speech_service.audio.timestamps import Timestamps
from cosyvoice_triton.speech_service.errors import NOTHING, OVERLOADED, ApiError, invalid
from cosyvoice_triton.speech_service.metrics import Metrics
from cosyvoice_triton.speech_service.security.budget import FREE_BYTES
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.speech_service.triton import Backend, TritonPool

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_PROBE_TEXT = "[pause 20ms]"  # checks a voice without cost: no LLM or vocoder has to run for a pause
# A slow client holds its upload slot while it sends, so a waiting one proceeds without a slot after this time. That is
# safe: nobody was refused meanwhile, the memory of all bodies is limited (security/budget.py), and only as many
# recordings as there are cores are decoded at once.
UPLOAD_WAIT_SECONDS = 1.0
# A model notices that a listener has left, and gives the place back, within some hundredths of a second, on a busy
# machine later. Whoever is refused meanwhile tries again for at most so long, one for each who left.
LEAVE_SECONDS, RETRY_SECONDS = 2.0, 0.05
SILENCE_SAMPLES = SAMPLE_RATE // 10  # of an answer without words


class Dispatcher:
    """Speaks by the Tritons of a pool, until it is closed."""

    def __init__(self, pool: TritonPool, settings: Settings, metrics: Metrics) -> None:
        self.pool = pool
        self.metrics = metrics
        self._settings = settings
        self._live = 0
        self._refusals: dict[str, LastRefusal] = {}  # by model
        self._refused = RefusalLog()
        # Requests pass these one after another, so that once the first of a burst is refused, the others are refused
        # before their bodies are read and their voices decoded. One for each core: more would only share the CPU.
        self._admission = asyncio.Lock()
        self._left: deque[float] = deque(maxlen=settings.max_streams)  # when listeners left, whose places become free
        self._uploads = asyncio.Semaphore(os.cpu_count() or 1)
        self.decoding = asyncio.Semaphore(os.cpu_count() or 1)
        self._encoders = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="encode")

    def close(self) -> None:
        """End the threads that encode, and log what was refused."""
        self._encoders.shutdown(wait=False, cancel_futures=True)
        self._refused.write()

    def check(self, model: str | None = None, since: float = math.inf) -> None:
        """Raise ApiError 429 for a request that would be refused now, or would have been at any time since it began to
        wait: before it costs anything. model: "" the default; None: not known yet, so all are full."""
        served = self.pool.models
        models = served if model is None else [model or next(iter(served), "")]
        kept = [refusal.error(since) for name in models if (refusal := self._refusals.get(name)) is not None]
        refusals = [error for error in kept if error is not None]
        with self._counted():
            self._require_slot()
            if refusals and len(refusals) == len(models):
                raise refusals[0].with_traceback(None)

    async def admit(self) -> None:
        """Return when the request may be routed; ApiError 429 like `check`.

        Requests are admitted one after another, and the event loop runs once after each: live streams go on during a
        burst, and the refusal of its first request answers the others.
        """
        since = time.monotonic()
        async with self._admission:
            self.check(since=since)
            await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def upload_slot(self, length: str | None) -> AsyncIterator[None]:
        """Limit how many blocks read bodies at once, among those that may hold a recording. `length`: bytes of the
        body, None if unknown.

        Raise ApiError 429 like `check`, before anything of the body is read.
        """
        since = time.monotonic()
        self.check()
        async with contextlib.AsyncExitStack() as held:
            if length is None or int(length) > FREE_BYTES:
                with contextlib.suppress(asyncio.TimeoutError):
                    async with timeout(UPLOAD_WAIT_SECONDS):
                        await held.enter_async_context(self._uploads)
                self.check(since=since)
            yield

    async def waveforms(self, answer: SpeechAnswer) -> AsyncGenerator[np.ndarray, None]:
        """Yield float32 (N,) at SAMPLE_RATE, at least one for each utterance. If a Triton fails or refuses before the
        first one of an utterance, another is tried. ApiError."""
        with self._live_stream(answer), self._counted():
            started = time.perf_counter()
            await self._check_default_voice(answer)
            waiting = deque(answer.utterances)
            while waiting:
                if (utterance := _within_limit(answer, waiting.popleft())) is None:
                    break
                answer.encoder.begin(utterance.loudness)
                async with contextlib.aclosing(self._spoken(answer, utterance)) as parts:
                    async for part in parts:
                        if part.warning and part.warning not in answer.warnings:
                            answer.warnings.append(part.warning)
                        if answer.timestamps is not None:
                            await self._add_times(answer.timestamps, part)
                        if not part.waveform.size:
                            continue
                        if not answer.samples:
                            self.metrics.first_audio.observe(time.perf_counter() - started)
                        answer.samples += part.waveform.size
                        yield part.waveform
                        if part.segments and answer.instead is not None:
                            break
                if answer.instead is not None:
                    waiting, answer.instead = deque(answer.instead()), None

    async def _check_default_voice(self, answer: SpeechAnswer) -> None:
        """Raise ApiError naming the first utterance without a voice if it is not the first one and there is no default
        voice.

        The answer would otherwise break off there.
        """
        voices = [each.reference is not None or bool(each.speaker) for each in answer.utterances]
        if not voices[0] or all(voices):
            return
        first = voices.index(False)
        try:
            await self.check_voice(answer.model, Utterance(""))
        except ApiError as error:
            if error.status != 400:
                raise
            part = f"part {first + 1} of input, {answer.utterances[first].target_text.strip()[:40]!r}"
            raise invalid(f"{part}, has no voice: {error.message}", "input") from None

    async def check_voice(self, model: str, utterance: Utterance) -> None:
        """Raise ApiError if the model cannot speak in the utterance's voice.

        Only the models know theirs, so they are asked for a pause in it.
        """
        async with contextlib.aclosing(self._generated(model, replace(utterance, target_text=_PROBE_TEXT))) as parts:
            async for _ in parts:
                pass

    async def _spoken(self, answer: SpeechAnswer, utterance: Utterance) -> AsyncGenerator[AudioPart, None]:
        """Yield `_generated`; for a text without words a short silence and a warning, unless that is to be an error."""
        try:
            async with contextlib.aclosing(self._generated(answer.model, utterance)) as parts:
                async for part in parts:
                    yield part
        except ApiError as error:
            if error.code != NOTHING or answer.no_words == "error":
                raise
            yield AudioPart(np.zeros(SILENCE_SAMPLES, np.float32), [("", SILENCE_SAMPLES)], error.message)

    async def _generated(self, model: str, utterance: Utterance) -> AsyncGenerator[AudioPart, None]:
        samples, wait_until = 0, 0.0
        failed: set[Backend] = set()
        while True:
            with self.pool.lease(model, failed) as (backend, name):
                try:
                    async with contextlib.aclosing(backend.parts(name, utterance, self._settings.timeout)) as parts:
                        async for part in parts:
                            samples += part.waveform.size
                            yield part
                except ApiError as error:
                    failed.add(backend)
                    others = any(name in each.models and each not in failed for each in self.pool.backends)
                    # Only before any audio: another Triton would begin the utterance again, with other tokens.
                    if others and not samples and (error.status == 503 or error.code == OVERLOADED):
                        continue
                    if error.code == OVERLOADED:
                        wait_until = wait_until or (self._left.popleft() + LEAVE_SECONDS if self._left else -math.inf)
                        if time.monotonic() < wait_until:
                            failed.clear()
                            await asyncio.sleep(RETRY_SECONDS)
                            continue
                        self._refusals.setdefault(name, LastRefusal()).note(error)
                    raise
                except (GeneratorExit, asyncio.CancelledError):  # its listener has left
                    self._left.append(time.monotonic())
                    self._refusals.pop(name, None)
                    raise
            if not samples:
                raise ApiError(502, "the model ended the request without audio", code="upstream_error")
            return

    async def encoded(self, answer: SpeechAnswer) -> AsyncGenerator[bytes, None]:
        """Yield `waveforms` as bytes of the answer's format, in frames if its encoder has them; no item is empty."""
        encoder, due = answer.encoder, 0.0
        async with contextlib.aclosing(self._encoded(answer)) as parts:
            async for part in parts:
                if encoder.frame_seconds:
                    await asyncio.sleep(due - (now := time.monotonic()))
                    due = max(due, now) + encoder.frame_seconds  # after a gap not faster, as a telephone has no buffer
                yield part

    async def _encoded(self, answer: SpeechAnswer) -> AsyncGenerator[bytes, None]:
        encoder = answer.encoder
        async with contextlib.aclosing(self.waveforms(answer)) as chunks:
            async for chunk in chunks:
                for part in encoder.framed(await self._run_encoder(encoder, chunk)):
                    yield part
            for part in encoder.framed(await self._run_encoder(encoder, None), last=True):
                yield part

    async def _add_times(self, timestamps: Timestamps, part: AudioPart) -> None:
        """Count a response: at once where none of its segments ends, so that the first audio waits for no thread.
        Otherwise it takes milliseconds, but up to seconds for two minutes of text in pieces, which are one segment."""
        if part.segments:
            await self._in_thread(partial(timestamps.add, part))
        else:
            timestamps.add(part)

    async def _run_encoder(self, encoder: AudioEncoder, chunk: np.ndarray | None) -> bytes:
        work = encoder.finish if chunk is None else partial(encoder.push, chunk)
        return work() if encoder.direct else await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        """Shielded: after a cancellation no thread may still use an encoder that is being closed."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._encoders, work))

    @contextlib.contextmanager
    def _live_stream(self, answer: SpeechAnswer) -> Iterator[None]:
        """Occupy one of the slots for live streams, and count what was generated, also if the request fails
        or its caller leaves. Raise ApiError 429 if there is no slot."""
        self._require_slot()
        self._live += 1
        try:
            with self.metrics.live.track_inprogress():
                yield
        finally:
            self._live -= 1
            if answer.samples:
                self.metrics.count(answer.key, answer.usage)

    def _require_slot(self) -> None:
        if self._live >= self._settings.max_streams:
            raise ApiError(
                429, f"the limit of {self._live} concurrent streams is reached", code="too_many_streams", retry_after=1
            )

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            self.metrics.errors.labels(str(error.status)).inc()
            if error.status >= 500:
                logger.warning("a stream failed: %s", error.message)
            if error.status == 429:
                self._refused.note(error.code or "")
            raise


def _within_limit(answer: SpeechAnswer, utterance: Utterance) -> Utterance | None:
    """Return the utterance with what is left of `max_tokens`, which is of the whole answer; None, with a warning, if
    nothing is."""
    if limit := int(utterance.parameters.get("max_tokens", 0)):
        if (left := limit - answer.usage["output_tokens"]) <= 0:
            answer.warnings.append(f"max_tokens {limit} was reached before {utterance.target_text[:80]!r}")
            return None
        utterance = replace(utterance, parameters={**utterance.parameters, "max_tokens": left})
    return utterance
