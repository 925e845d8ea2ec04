"""One request's audio as it is made: the only way from any route to a model.

    SpeechCore.speak      chunks of samples, from whichever Triton has least to do
    SpeechCore.render     the same as bytes of a format

Both are async generators that must be closed (`aclosing`), which is how a client that left ends the work in Triton.
An `ApiError` before the first item can still become a status; one after it must end the answer visibly.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from common.client.requests import Utterance
from common.constants import SAMPLE_RATE, TOKEN_RATE
from common.speech_service.encoding import Renderer
from common.speech_service.errors import ApiError
from common.speech_service.metrics import Metrics
from common.speech_service.settings import Settings
from common.speech_service.triton import Address, TritonPool

logger = logging.getLogger(__name__)


@dataclass
class Job:
    """One piece of speech to make. `samples` counts what was made of it, at the models' rate and own speed."""

    utterance: Utterance
    model: str = ""
    samples: int = 0

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's figures: characters of the text for input_tokens, since the LLM's tokenizer is Triton's."""
        text, speech = len(self.utterance.target_text), round(self.samples * TOKEN_RATE / SAMPLE_RATE)
        return {"input_tokens": text, "output_tokens": speech, "total_tokens": text + speech}


class SpeechCore:
    """`async with TritonPool(urls) as pool, SpeechCore(pool, settings, metrics) as core: ...`"""

    def __init__(self, pool: TritonPool, settings: Settings, metrics: Metrics) -> None:
        self.pool = pool
        self.metrics = metrics
        self._settings = settings
        self._live = 0
        self._encoders = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="encode")

    async def __aenter__(self) -> "SpeechCore":
        return self

    async def __aexit__(self, *error: object) -> None:
        self._encoders.shutdown(wait=False, cancel_futures=True)

    async def speak(self, job: Job) -> AsyncGenerator[np.ndarray, None]:
        """float32 (N,) at SAMPLE_RATE, at least one. ApiError; a Triton that fails before its first is replaced."""
        with self._admitted(), self._counted():
            begun = time.perf_counter()
            failed: set[Address] = set()
            while True:
                with self.pool.lease(job.model, failed) as (address, model):
                    try:
                        async with contextlib.aclosing(
                            address.speak(model, job.utterance, self._settings.timeout)
                        ) as chunks:
                            async for chunk in chunks:
                                if not job.samples:
                                    self.metrics.first_audio.observe(time.perf_counter() - begun)
                                job.samples += chunk.size
                                yield chunk
                    except ApiError as error:
                        failed.add(address)
                        if error.status != 503 or job.samples or not self._others(model, failed):
                            raise
                        continue
                if not job.samples:
                    raise ApiError(502, "the model ended the request without audio", code="upstream_error")
                self.metrics.audio.inc(job.samples / SAMPLE_RATE)
                return

    async def render(self, job: Job, renderer: Renderer) -> AsyncGenerator[bytes, None]:
        """The bytes of `speak`, none of them empty."""
        async with contextlib.aclosing(self.speak(job)) as chunks:
            async for chunk in chunks:
                if data := await self._encode(renderer, chunk):
                    yield data
            if data := await self._encode(renderer, None):
                yield data

    async def _encode(self, renderer: Renderer, chunk: np.ndarray | None) -> bytes:
        def work() -> bytes:
            return renderer.finish() if chunk is None else renderer.push(chunk)

        if renderer.direct:
            return work()
        # Shielded: cancelling must not leave a thread inside an encoder that is being torn down.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._encoders, work))

    def _others(self, model: str, failed: set[Address]) -> bool:
        return any(model in address.models and address not in failed for address in self.pool.addresses)

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        """A place among the live streams. ApiError 429 where there is none: the client knows best when to ask again."""
        if self._live >= self._settings.max_streams:
            raise ApiError(
                429, f"{self._live} streams are being spoken, as many as may be", code="too_many_streams", retry_after=1
            )
        self._live += 1
        self.metrics.live.set(self._live)
        try:
            yield
        finally:
            self._live -= 1
            self.metrics.live.set(self._live)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            self.metrics.errors.labels(str(error.status)).inc()
            if error.status >= 500:
                logger.warning("a stream failed: %s", error.message)
            raise
