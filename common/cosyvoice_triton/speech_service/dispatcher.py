"""A request's audio as it is generated. All routes use this to call a model.

    Dispatcher.waveforms   chunks of samples, from the least busy Triton
    Dispatcher.encoded     the same as bytes of a format

Both are async generators that must be closed (`aclosing`): this ends the work in Triton when a client disconnects.
An `ApiError` before the first item can become an HTTP status; a later one must end the answer visibly.
"""

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from async_timeout import timeout

from cosyvoice_triton.client.answer import AudioPart
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.refusals import LastRefusal
from cosyvoice_triton.speech_service.audio.encoding import AudioEncoder
from cosyvoice_triton.speech_service.audio.timestamps import Timestamps
from cosyvoice_triton.speech_service.errors import OVERLOADED, ApiError, invalid
from cosyvoice_triton.speech_service.metrics import Metrics
from cosyvoice_triton.speech_service.security.budget import FREE_BYTES
from cosyvoice_triton.speech_service.settings import Settings
from cosyvoice_triton.speech_service.triton import Backend, TritonPool

logger = logging.getLogger(__name__)

_MOMENT = "[pause 20ms]"  # a text that no model has to speak
# That others wait while slow clients send their recordings. Then all of them are let in: nobody was refused meanwhile,
# the memory of all bodies is limited (security/budget.py), and only as many as there are cores are decoded at once.
TURN_SECONDS = 1.0


@dataclass
class SpeechJob:
    """A text to generate as utterances, one after another. `chars`: of the text, with markup.

    `key`: the name of the caller's API key. `samples`: generated so far, at the models' rate and normal speed.
    `timestamps`: of what was generated so far, if they are wanted; then the utterances ask for segments. `warnings`: of
    the models, such as speech cut short.
    """

    utterances: tuple[Utterance, ...]
    chars: int
    model: str = ""
    key: str = ""
    samples: int = 0
    timestamps: Timestamps | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def warned(self) -> dict[str, list[str]]:
        """Return the models' warnings so far as a field of an answer; no field without warnings."""
        return {"warnings": self.warnings} if self.warnings else {}

    def ended(self) -> list[dict[str, Any]]:
        """Return the timestamps of the segments that ended since the last call; none if they are not wanted."""
        return [] if self.timestamps is None else self.timestamps.take()

    @property
    def seconds(self) -> float:
        """Return the seconds of audio generated so far, at normal speed."""
        return self.samples / SAMPLE_RATE

    @property
    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage, and the seconds. input_tokens counts characters, because only Triton has the LLM's
        tokenizer."""
        text = sum(each.pieces.chars for each in self.utterances if each.pieces is not None) or self.chars
        speech = round(self.seconds * TOKEN_RATE)
        about = {"input_tokens": text, "output_tokens": speech, "total_tokens": text + speech}
        return {**about, "seconds": round(self.seconds, 3)}


class Dispatcher:
    """`async with TritonPool(urls) as pool, Dispatcher(pool, settings, metrics) as dispatcher: ...`"""

    def __init__(self, pool: TritonPool, settings: Settings, metrics: Metrics) -> None:
        self.pool = pool
        self.metrics = metrics
        self._settings = settings
        self._live = 0
        self._refusals: dict[str, LastRefusal] = {}  # by model
        # Where requests are read: so that the first of a crowd are refused before the bodies of the others are taken,
        # and before their voices are decoded.
        self._door = asyncio.Lock()
        self._turns = asyncio.Semaphore(os.cpu_count() or 1)
        self.reading = asyncio.Semaphore(os.cpu_count() or 1)
        self._encoders = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="encode")

    async def __aenter__(self) -> "Dispatcher":
        return self

    async def __aexit__(self, *error: object) -> None:
        self._encoders.shutdown(wait=False, cancel_futures=True)

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

        One after another, each after the event loop has seen what the one before has caused: so the first of a crowd
        are refused before the others are looked at.
        """
        since = time.monotonic()
        async with self._door:
            self.check(since=since)
            await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def turn(self, length: str | None) -> AsyncIterator[None]:
        """Let the block read a body of `length` bytes (None: unknown), in turn if it may hold a recording.

        Raises ApiError 429 like `check`, before anything of the body is read.
        """
        since = time.monotonic()
        self.check()
        async with contextlib.AsyncExitStack() as held:
            if length is None or int(length) > FREE_BYTES:
                with contextlib.suppress(asyncio.TimeoutError):
                    async with timeout(TURN_SECONDS):
                        await held.enter_async_context(self._turns)
                self.check(since=since)
            yield

    async def waveforms(self, job: SpeechJob) -> AsyncGenerator[np.ndarray, None]:
        """Yield float32 (N,) at SAMPLE_RATE, at least one for each utterance. If a Triton fails or refuses before the
        first one of an utterance, another is tried. ApiError."""
        with self._live_stream(job), self._counted():
            started = time.perf_counter()
            await self._check_default_voice(job)
            for utterance in job.utterances:
                if limit := int(utterance.parameters.get("max_tokens", 0)):  # of the whole answer
                    if (left := limit - job.usage["output_tokens"]) <= 0:
                        job.warnings.append(f"max_tokens {limit} was reached before {utterance.target_text[:80]!r}")
                        break
                    utterance = replace(utterance, parameters={**utterance.parameters, "max_tokens": left})
                async with contextlib.aclosing(self._generated(job, utterance)) as parts:
                    async for part in parts:
                        if part.warning and part.warning not in job.warnings:
                            job.warnings.append(part.warning)
                        if job.timestamps is not None:
                            await self._add_times(job.timestamps, part)
                        if not part.waveform.size:
                            continue
                        if not job.samples:
                            self.metrics.first_audio.observe(time.perf_counter() - started)
                        job.samples += part.waveform.size
                        yield part.waveform

    async def _check_default_voice(self, job: SpeechJob) -> None:
        """Raise ApiError naming the first utterance without a voice if it is not the first one and there is no default
        voice.

        The answer would otherwise break off there.
        """
        number, unnamed = next(
            ((n, each) for n, each in enumerate(job.utterances, 1) if each.reference is None and not each.speaker),
            (1, job.utterances[0]),
        )
        if number == 1:
            return
        try:
            await self.check_voice(job, Utterance(""))
        except ApiError as error:
            if error.status != 400:
                raise
            raise invalid(
                f"part {number} of input, {unnamed.target_text.strip()[:40]!r}, has no voice: {error.message}", "input"
            ) from None

    async def check_voice(self, job: SpeechJob, utterance: Utterance) -> None:
        """Raise ApiError if the job's model cannot speak in the utterance's voice.

        Only the models know theirs, so they are asked for a pause in it.
        """
        async with contextlib.aclosing(self._generated(job, replace(utterance, target_text=_MOMENT))) as parts:
            async for _ in parts:
                pass

    async def _generated(self, job: SpeechJob, utterance: Utterance) -> AsyncGenerator[AudioPart, None]:
        samples = 0
        failed: set[Backend] = set()
        while True:
            with self.pool.lease(job.model, failed) as (backend, model):
                try:
                    async with contextlib.aclosing(backend.parts(model, utterance, self._settings.timeout)) as parts:
                        async for part in parts:
                            samples += part.waveform.size
                            yield part
                except ApiError as error:
                    failed.add(backend)
                    others = any(model in each.models and each not in failed for each in self.pool.backends)
                    if others and not samples and (error.status == 503 or error.code == OVERLOADED):
                        continue
                    if error.code == OVERLOADED:
                        self._refusals.setdefault(model, LastRefusal()).note(error)
                    raise
            if not samples:
                raise ApiError(502, "the model ended the request without audio", code="upstream_error")
            return

    async def encoded(self, job: SpeechJob, encoder: AudioEncoder) -> AsyncGenerator[bytes, None]:
        """Yield `waveforms` as bytes of the encoder's format; no item is empty."""
        async with contextlib.aclosing(self.waveforms(job)) as chunks:
            async for chunk in chunks:
                if data := await self._run_encoder(encoder, chunk):
                    yield data
            if data := await self._run_encoder(encoder, None):
                yield data

    async def _add_times(self, timestamps: Timestamps, part: AudioPart) -> None:
        """Count a response, in a thread where a segment ends.

        That takes milliseconds, but up to seconds for two minutes of text in pieces, which are one segment.
        """
        if part.segments:
            await asyncio.get_running_loop().run_in_executor(self._encoders, timestamps.add, part)
        else:
            timestamps.add(part)

    async def _run_encoder(self, encoder: AudioEncoder, chunk: np.ndarray | None) -> bytes:
        def work() -> bytes:
            return encoder.finish() if chunk is None else encoder.push(chunk)

        if encoder.direct:
            return work()
        # Shielded: after a cancellation no thread may still use an encoder that is being closed.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._encoders, work))

    @contextlib.contextmanager
    def _live_stream(self, job: SpeechJob) -> Iterator[None]:
        """Occupy one of the slots for live streams, and count what was generated for the job, also if it fails or its
        caller leaves. Raise ApiError 429 if there is no slot."""
        self._require_slot()
        self._live += 1
        self.metrics.live.set(self._live)
        try:
            yield
        finally:
            self._live -= 1
            self.metrics.live.set(self._live)
            if job.samples:
                self.metrics.count(job.key, job.usage)

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
            raise
