"""The Tritons behind the service: who serves which model, who has least to do, one long-lived connection to each."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Collection, Iterator
from dataclasses import dataclass, field

import grpc
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from common import stacks
from common.client.grpc_client import chunks, complete
from common.client.requests import Utterance
from common.speech_service.errors import ApiError, from_triton

logger = logging.getLogger(__name__)

PROBE_SECONDS = 2.0
PROBE_TIMEOUT = 3.0
MISSES = 3
_CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A Triton that comes back is found at once, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A host that vanished is noticed, though nothing says so.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


@dataclass(eq=False)
class Address:
    """One Triton. models: the speech models that are ready, and whether each streams (is decoupled)."""

    url: str
    connection: triton.InferenceServerClient
    models: dict[str, bool] = field(default_factory=dict)
    outstanding: int = 0
    misses: int = 0  # looks in a row that had no answer

    async def probe(self) -> None:
        """Look what it serves; never raises. One that nobody listens at serves nothing, one that is slow is trusted
        for MISSES looks."""
        try:
            index = await self.connection.get_model_repository_index(client_timeout=PROBE_TIMEOUT)
            ready = {model.name for model in index.models if model.state == "READY"}
            self.models = {name: await self._streams(name) for name in stacks.orchestrators() if name in ready}
            self.misses = 0
        except Exception as error:  # whatever it is, the next look must come
            self.misses += 1
            gone = isinstance(error, InferenceServerException) and error.status() == str(grpc.StatusCode.UNAVAILABLE)
            if self.models and (gone or self.misses >= MISSES):
                logger.warning("Triton at %s does not answer any more: %s", self.url, _reason(error))
                self.models = {}

    async def _streams(self, model: str) -> bool:
        """Whether a model is served for streaming, which only loading it anew could change."""
        if model in self.models:
            return self.models[model]
        answer = await self.connection.get_model_config(model, client_timeout=PROBE_TIMEOUT)
        logger.info("Triton at %s serves %s", self.url, model)
        return bool(answer.config.model_transaction_policy.decoupled)

    async def speak(self, model: str, request: Utterance, timeout: float) -> AsyncGenerator[np.ndarray, None]:
        """float32 (N,) as they come, none of them empty; closing the iterator ends the request. ApiError."""
        try:
            if self.models.get(model, True):
                async with contextlib.aclosing(chunks(self.connection, model, request, timeout)) as waveforms:
                    async for waveform in waveforms:
                        if waveform is not None and waveform.size:
                            yield waveform.reshape(-1)  # (1, N) -> (N,)
                return
            waveform = await complete(self.connection, model, request, timeout)
            if waveform is not None and waveform.size:
                yield waveform.reshape(-1)
        except grpc.aio.AioRpcError as error:
            raise from_triton(str(error.code()), error.details()) from None
        except InferenceServerException as error:
            raise from_triton(error.status(), error.message()) from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


class TritonPool:
    """`async with TritonPool(urls) as pool: with pool.lease(model) as address: ...`"""

    def __init__(self, urls: Collection[str]) -> None:
        self._urls = urls
        self.addresses: list[Address] = []
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "TritonPool":
        self.addresses = [Address(url, triton.InferenceServerClient(url, channel_args=_CHANNEL)) for url in self._urls]
        await self.probe()
        self._watch = asyncio.create_task(self._keep_probing())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for address in self.addresses:
            await address.connection.close()

    async def probe(self) -> None:
        """Look at every address once."""
        await asyncio.gather(*(address.probe() for address in self.addresses))

    async def _keep_probing(self) -> None:
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            await self.probe()

    @property
    def models(self) -> list[str]:
        """The served models, in the order in which a request without a name tries them."""
        return [name for name in stacks.orchestrators() if any(name in address.models for address in self.addresses)]

    @contextlib.contextmanager
    def lease(self, model: str, avoid: Collection[Address] = ()) -> Iterator[tuple[Address, str]]:
        """The address that serves `model` (empty: the first served one) with least to do, and the model's name.

        ApiError 404 where nobody ever heard of the model, 503 where nobody answers.
        """
        served = self.models
        if not served:
            raise ApiError(503, f"no Triton answers at {', '.join(self._urls)}", code="unavailable", retry_after=2)
        name = model or served[0]
        if name not in served:
            raise ApiError(
                404,
                f"the model {name!r} is not served; served: {', '.join(served)}",
                code="model_not_found",
                param="model",
            )
        able = [address for address in self.addresses if name in address.models and address not in avoid]
        if not able:
            raise ApiError(503, f"every Triton that serves {name!r} failed", code="unavailable", retry_after=2)
        address = min(able, key=lambda one: one.outstanding)
        address.outstanding += 1
        try:
            yield address, name
        finally:
            address.outstanding -= 1
