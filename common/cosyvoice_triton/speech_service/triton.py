"""The Tritons of the service: one long-lived connection each, health probes, and choice of the least busy one."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import grpc
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from cosyvoice_triton import stacks
from cosyvoice_triton.addresses import channel_options
from cosyvoice_triton.client.answer import AudioPart
from cosyvoice_triton.client.failures import one_line
from cosyvoice_triton.client.grpc_client import chunks
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.llm.checkpoint import follows_instructions, is_demo
from cosyvoice_triton.speech_service.errors import ApiError, from_triton, invalid
from cosyvoice_triton.tasks import TaskScope

logger = logging.getLogger(__name__)

PROBE_SECONDS = 2.0  # a restarted Triton is used again after about as long as its reconnection takes
PROBE_TIMEOUT = 3.0  # of one call
# Failed probes in a row before a backend counts as down: one that is only slow still serves, while an address at which
# nothing listens counts as down at once.
MISSES = 3
_RECONNECTION = [
    # Reconnect to a restarted Triton quickly; gRPC's default backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Detect hosts that disappear without closing the connection.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


@dataclass(frozen=True)
class ServedModel:
    """A speech model that is ready. streams: it is decoupled. demo, instructions: whether its checkpoint is the demo's,
    and was trained to follow instructions; false and true if its files are not on this machine."""

    streams: bool
    demo: bool
    instructions: bool


@dataclass(eq=False)
class Backend:
    """One Triton. models: the speech models that are ready, by name."""

    url: str
    connection: triton.InferenceServerClient
    models: dict[str, ServedModel] = field(default_factory=dict)
    outstanding: int = 0
    misses: int = 0  # failed probes in a row

    async def probe(self) -> None:
        """Update `models`; never raises. An unreachable Triton serves nothing; a slow one keeps its models for MISSES
        probes."""
        try:
            # Model by model, because a gateway forwards no RepositoryIndex.
            names = stacks.orchestrators()
            ready = await asyncio.gather(
                *(self.connection.is_model_ready(name, client_timeout=PROBE_TIMEOUT) for name in names)
            )
            self.models = {
                name: await self._served(name) for name, is_ready in zip(names, ready, strict=True) if is_ready
            }
            self.misses = 0
        except Exception as error:  # any error, also of an answer that cannot be parsed: probing must go on
            self.misses += 1
            gone = isinstance(error, InferenceServerException) and error.status() == str(grpc.StatusCode.UNAVAILABLE)
            if self.models and (gone or self.misses >= MISSES):
                logger.warning("Triton at %s does not answer anymore: %s", self.url, one_line(error)[:200])
                self.models = {}

    async def _served(self, model: str) -> ServedModel:
        """Return what is known of a model. Cached: only reloading the model could change it."""
        if model in self.models:
            return self.models[model]
        config = (await self.connection.get_model_config(model, client_timeout=PROBE_TIMEOUT)).config
        logger.info("Triton at %s serves %s", self.url, model)
        llm = config.parameters["llm_tokenizer_dir"].string_value
        return ServedModel(config.model_transaction_policy.decoupled, is_demo(llm), follows_instructions(llm))

    async def parts(self, model: str, request: Utterance, timeout: float) -> AsyncGenerator[AudioPart, None]:
        """Yield the audio as it arrives; closing the generator ends the request. ApiError."""
        # A model that has just gone counts as streaming: the call fails either way, with Triton's reason.
        offline = model in self.models and not self.models[model].streams
        if offline and (request.pieces is not None or request.source_pieces is not None):
            raise invalid(f"mode tokens, or live audio: the model {model!r} is served for offline requests", "mode")
        call = chunks(self.connection, model, request, timeout, offline=offline)
        try:
            async with contextlib.aclosing(call) as parts:
                async for part in parts:
                    yield part
        except InferenceServerException as error:
            raise from_triton(error.status(), error.message(), timeout) from None


@dataclass
class TritonPool:
    """`async with TritonPool.of(urls) as pool: with pool.lease(model) as (backend, model): ...`"""

    backends: Sequence[Backend]

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, urls: Collection[str]) -> "AsyncIterator[TritonPool]":
        """Hold connections to these addresses, and probe them, while the block runs."""
        options = {url: [*channel_options(url), *_RECONNECTION] for url in urls}
        pool = cls([Backend(url, triton.InferenceServerClient(url, channel_args=options[url])) for url in urls])
        try:
            await pool.probe()
            async with TaskScope() as tasks:
                tasks.spawn(pool._keep_probing())
                yield pool
        finally:
            for backend in pool.backends:
                await backend.connection.close()

    async def probe(self) -> None:
        """Probe every backend once."""
        await asyncio.gather(*(backend.probe() for backend in self.backends))

    async def _keep_probing(self) -> None:
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            await self.probe()

    @property
    def models(self) -> list[str]:
        """Return the served models, in the order in which a request without a name tries them."""
        return [name for name in stacks.orchestrators() if any(name in backend.models for backend in self.backends)]

    def about(self, name: str) -> ServedModel:
        """Return what is known of a model that is served."""
        return next(backend.models[name] for backend in self.backends if name in backend.models)

    @contextlib.contextmanager
    def lease(self, model: str, avoid: Collection[Backend] = ()) -> Iterator[tuple[Backend, str]]:
        """Yield the least busy backend that serves `model` (empty: the first one served), and the model's name.

        ApiError 404 if the model is not served, 503 if no Triton answers.
        """
        served = self.models
        if not served:
            addresses = ", ".join(backend.url for backend in self.backends)
            raise ApiError(503, f"no Triton answers at {addresses}", code="unavailable", retry_after=2)
        name = model or served[0]
        if name not in served:
            raise ApiError(
                404,
                f"the model {name!r} is not served; served: {', '.join(served)}",
                code="model_not_found",
                param="model",
            )
        candidates = [backend for backend in self.backends if name in backend.models and backend not in avoid]
        if not candidates:
            raise ApiError(503, f"every Triton that serves {name!r} failed", code="unavailable", retry_after=2)
        backend = min(candidates, key=lambda each: each.outstanding)
        backend.outstanding += 1
        try:
            yield backend, name
        finally:
            backend.outstanding -= 1
