"""Client of OpenAI-compatible LLM servers: `trtllm-serve`, `vllm serve`, `transformers serve`.

One POST per utterance, answered by server-sent events. See `openai_dialects` for request bodies and events.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

import aiohttp
from async_timeout import timeout, timeout_at

from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import LengthRatios, LLMPrompt, Sampling, Timeouts, TokenChunk
from cosyvoice_triton.llm.openai_dialects import DIALECTS, Body, CompletionRequest, Dialect, EventReader
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.monitoring import tracing

_REJECTED = (400, 413, 422)  # the request is invalid, at least in this dialect
_ABSENT = (404, 405)  # the dialect's path or the model does not exist; any other status is a failure of the server
DOWN_SECONDS = 5.0  # a server that failed is tried only after the others for this long
DRAIN_SECONDS = 0.2  # for the rest of an answer after its last token: a new connection costs less than a longer wait


@dataclass(eq=False)
class _Endpoint:
    url: str
    dialect: Dialect | None  # None until the server has accepted one
    outstanding: int = 0
    down_until: float = 0.0


class OpenAILM:
    """Speech tokens from one or several OpenAI-compatible servers of the same model, the least busy one first.

    dialect: a name in DIALECTS, or "auto" to try them at each server's first request.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        tokenizer: LLMTokenizer,
        timeouts: Timeouts | None = None,
        ratios: LengthRatios | None = None,
        dialect: str = "auto",
    ) -> None:
        if not urls:
            raise ValueError("no URL of an LLM server is configured")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"not the URL of an LLM server: {url!r}")
        known = None if dialect == "auto" else DIALECTS[dialect]
        # A base URL may end with the version, as for OpenAI's clients.
        self._endpoints = [_Endpoint(url.rstrip("/").removesuffix("/v1"), known) for url in urls]
        self._model = model
        self._tokenizer = tokenizer
        self._timeouts = timeouts or Timeouts()
        self._ratios = ratios or LengthRatios()
        self._session: aiohttp.ClientSession | None = None  # created by the first request: it needs a running loop

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, prompt: LLMPrompt, sampling: Sampling) -> AsyncGenerator[TokenChunk, None]:
        sampling = self._ratios.bound(sampling, prompt, self._tokenizer.text_length(prompt.target_text))
        request = CompletionRequest(prompt, sampling, self._tokenizer)
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeouts.first_token
        failures: list[str] = []
        # Another server is tried only if no token has arrived, so that nothing is generated twice.
        for endpoint in sorted(self._endpoints, key=lambda each: (each.down_until > clock(), each.outstanding)):
            if failures and clock() >= deadline:
                break
            endpoint.outstanding += 1
            started = False
            try:
                async with aclosing(self._stream(endpoint, request, deadline)) as chunks:
                    async for chunk in chunks:
                        started = True
                        yield chunk
                return
            except UnavailableError as error:
                endpoint.down_until = clock() + DOWN_SECONDS
                if started:
                    raise
                failures.append(str(error))
            finally:
                endpoint.outstanding -= 1
        raise UnavailableError("; ".join(failures))

    async def _stream(
        self, endpoint: _Endpoint, request: CompletionRequest, deadline: float
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield the answer of one server; its first token must arrive by `deadline` on the loop's clock.

        Closing the generator early closes the connection, which aborts the request at the server.
        """
        clock, wait = asyncio.get_running_loop().time, self._timeouts.first_token
        reader = EventReader(self._tokenizer, endpoint.url)
        generated, limit = 0, request.sampling.max_tokens
        response: aiohttp.ClientResponse | None = None
        try:
            async with timeout_at(deadline):
                response = await self._open(endpoint, request)
            while not reader.ended:
                async with timeout_at(deadline):
                    data = await response.content.readany()
                if not data:
                    raise UnavailableError(f"LLM server {endpoint.url} ended in the middle of an answer")
                chunk = reader.feed(data)
                if chunk.tokens:  # only they extend the deadline, pings and others do not
                    generated, wait = generated + len(chunk.tokens), self._timeouts.token
                    deadline = clock() + wait
                if generated > limit:
                    raise UnavailableError(f"LLM server {endpoint.url} ignores max_tokens {limit}")
                if chunk.tokens or chunk.finish_reason:
                    yield chunk
            await _drain(response)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            if clock() >= deadline:
                raise UnavailableError(f"LLM server {endpoint.url} sent no token for {wait} s") from None
            reason = f"{error or type(error).__name__}"
            if response is None:
                reason = f"cannot be reached: {reason}"
            raise UnavailableError(f"LLM server {endpoint.url} {reason}") from error
        finally:
            if response is not None:
                response.close()  # closes the connection unless the whole answer was read

    async def _open(self, endpoint: _Endpoint, request: CompletionRequest) -> aiohttp.ClientResponse:
        """Send the request in the server's dialect; if that is unknown, in each dialect until one is accepted."""
        session = self._open_session()
        rejections: list[str] = []
        absent = True
        for dialect in [endpoint.dialect] if endpoint.dialect else DIALECTS.values():
            try:
                body = dialect.request_body(self._model, request)
            except ValueError as error:
                rejections, absent = [*rejections, str(error)], False
                continue
            response = await _post(session, endpoint.url + dialect.path, body)
            if response.status == 200:
                endpoint.dialect, endpoint.down_until = dialect, 0.0
                return response
            message = await _error_message(response)
            if response.status not in (*_REJECTED, *_ABSENT):
                raise UnavailableError(f"LLM server {endpoint.url} answered HTTP {response.status}: {message}")
            absent = absent and response.status in _ABSENT
            rejections.append(f"HTTP {response.status}: {message}")
        reason = "; ".join(dict.fromkeys(rejections))
        if absent:
            raise UnavailableError(f"LLM server {endpoint.url} does not serve {self._model!r}: {reason}")
        raise ValueError(f"LLM server {endpoint.url} rejected the request: {reason}")

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Without a limit, because each stream has a connection while it is generated.
                # uvicorn closes an idle connection after 5 s; stay below, or a request may use one that is closing.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect),  # the rest: `_stream`
            )
        return self._session


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the rest of the answer, so that the connection can be reused."""
    with suppress(asyncio.TimeoutError, aiohttp.ClientError):
        async with timeout(DRAIN_SECONDS):
            await response.read()


async def _post(session: aiohttp.ClientSession, url: str, body: Body) -> aiohttp.ClientResponse:
    """Send a request; once more if the first attempt used a pooled connection that the server was closing."""
    try:
        return await session.post(url, json=body, headers=tracing.carried())
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
        return await session.post(url, json=body, headers=tracing.carried())


async def _error_message(response: aiohttp.ClientResponse) -> str:
    """Return the server's error message, and close the response."""
    try:
        content = await response.content.read(500)
    finally:
        response.close()
    return content.decode(errors="replace").strip() or str(response.reason)
