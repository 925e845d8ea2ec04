"""The LLM behind OpenAI-compatible servers: `trtllm-serve`, `vllm serve`, `transformers serve`.

One POST per utterance, answered by server-sent events. See `openai_dialects` for what is asked and read.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

import aiohttp
from async_timeout import timeout

from common.errors import UnavailableError
from common.llm.interface import LengthRatios, LLMPrompt, Sampling, Timeouts, TokenChunk, TokenStream
from common.llm.openai_dialects import DIALECTS, Asked, Body, Dialect, EventReader
from common.llm.speech_tokens import LLMTokenizer

_REFUSED = (400, 413, 422)  # the request itself is wrong, at least in this dialect
_ABSENT = (404, 405)  # the dialect's path or the model is not there; any other failure is the server's
DOWN_SECONDS = 5.0  # for which a server that has failed is asked only after the others
LEFTOVER_SECONDS = 0.2  # for the end of an answer to follow its last token


@dataclass(eq=False)
class _Endpoint:
    url: str
    dialect: Dialect | None  # unknown until the server accepted one
    outstanding: int = 0
    down_until: float = 0.0


class OpenAILM:
    """Speech from one or several OpenAI-compatible servers of the same model, the least busy one first.

    dialect: a name in DIALECTS, or "auto" to find out at each server's first request.
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
            raise ValueError("no URL of an LLM server is given")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"not the URL of an LLM server: {url!r}")
        known = None if dialect == "auto" else DIALECTS[dialect]
        # Base URLs are given with the version, as OpenAI's clients take them, or without it.
        self._endpoints = [_Endpoint(url.rstrip("/").removesuffix("/v1"), known) for url in urls]
        self._model = model
        self._tokenizer = tokenizer
        self._timeouts = timeouts or Timeouts()
        self._ratios = ratios or LengthRatios()
        self._session: aiohttp.ClientSession | None = None  # made by the first request: it belongs to a running loop

    def generate(self, prompt: LLMPrompt, sampling: Sampling) -> TokenStream:
        return TokenStream(self._generate(prompt, sampling))

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _generate(self, prompt: LLMPrompt, sampling: Sampling) -> AsyncGenerator[TokenChunk, None]:
        sampling = self._ratios.bound(sampling, self._tokenizer.text_length(prompt.target_text))
        asked = Asked(prompt, sampling, self._tokenizer)
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeouts.first_token
        failures: list[str] = []
        # Another server is asked only as long as no token has come, so that nothing is spoken twice.
        for endpoint in sorted(self._endpoints, key=lambda each: (each.down_until > clock(), each.outstanding)):
            if failures and clock() >= deadline:
                break
            endpoint.outstanding += 1
            spoken = False
            try:
                async with aclosing(self._ask(endpoint, asked, deadline)) as chunks:
                    async for chunk in chunks:
                        spoken = True
                        yield chunk
                return
            except UnavailableError as error:
                endpoint.down_until = clock() + DOWN_SECONDS
                if spoken:
                    raise
                failures.append(str(error))
            finally:
                endpoint.outstanding -= 1
        raise UnavailableError("; ".join(failures))

    async def _ask(self, endpoint: _Endpoint, asked: Asked, deadline: float) -> AsyncGenerator[TokenChunk, None]:
        """The answer of one server, its first token by `deadline` on the loop's clock. Yields tokens, or the end.

        Leaving it early closes the connection, which aborts the generation.
        """
        watch = _Deadline(deadline, self._timeouts.first_token)
        response: aiohttp.ClientResponse | None = None
        try:
            async with timeout(watch.remaining()):
                response = await self._open(endpoint, asked)
            watch.start(response.close)
            async with aclosing(self._read(endpoint, response, asked, watch)) as chunks:
                async for chunk in chunks:
                    yield chunk
            await _read_leftover(response)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            if watch.remaining() <= 0:
                raise UnavailableError(f"LLM server {endpoint.url} sent no token for {watch.wait} s") from None
            reason = f"{error or type(error).__name__}"
            if response is None:
                reason = f"cannot be reached: {reason}"
            raise UnavailableError(f"LLM server {endpoint.url} {reason}") from error
        finally:
            watch.cancel()
            if response is not None:
                response.close()  # closes the connection unless all of the answer was read

    async def _read(
        self, endpoint: _Endpoint, response: aiohttp.ClientResponse, asked: Asked, watch: "_Deadline"
    ) -> AsyncGenerator[TokenChunk, None]:
        """The chunks of an answer up to its end. One deadline over pings and events without tokens: tokens move it."""
        reader = EventReader(self._tokenizer, endpoint.url)
        generated, most = 0, asked.sampling.max_tokens
        async for data in response.content.iter_any():
            chunk = reader.feed(data)
            if chunk.tokens:
                generated += len(chunk.tokens)
                watch.move(self._timeouts.token)
            if generated > most:
                raise UnavailableError(f"LLM server {endpoint.url} ignores max_tokens {most}")
            if chunk.tokens or chunk.finish_reason:
                yield chunk
            if reader.ended:
                return
        raise UnavailableError(f"LLM server {endpoint.url} ended in the middle of an answer")

    async def _open(self, endpoint: _Endpoint, asked: Asked) -> aiohttp.ClientResponse:
        """Send the request in the server's dialect, which its first answer tells."""
        session = self._open_session()
        refusals: list[str] = []
        absent = True
        for dialect in [endpoint.dialect] if endpoint.dialect else DIALECTS.values():
            try:
                body = dialect.request(self._model, asked)
            except ValueError as error:
                refusals, absent = [*refusals, str(error)], False
                continue
            response = await _post(session, endpoint.url + dialect.path, body)
            if response.status == 200:
                endpoint.dialect, endpoint.down_until = dialect, 0.0
                return response
            message = await _error_message(response)
            if response.status not in (*_REFUSED, *_ABSENT):
                raise UnavailableError(f"LLM server {endpoint.url} answered HTTP {response.status}: {message}")
            absent = absent and response.status in _ABSENT
            refusals.append(f"HTTP {response.status}: {message}")
        reason = "; ".join(dict.fromkeys(refusals))
        if absent:
            raise UnavailableError(f"LLM server {endpoint.url} does not serve {self._model!r}: {reason}")
        raise ValueError(f"LLM server {endpoint.url} refused the request: {reason}")

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Below the 5 s after which uvicorn closes an idle connection, lest a request meets a closing one.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect),  # the rest: _Deadline
            )
        return self._session


class _Deadline:
    """When the next token has to be there. Moving it is an assignment: its one timer looks only when it rings.

    wait: the seconds that it grants, for messages.
    """

    def __init__(self, at: float, wait: float) -> None:
        self.wait = wait
        self._loop = asyncio.get_running_loop()
        self._at = at
        self._timer: asyncio.TimerHandle | None = None

    def start(self, expire: Callable[[], object]) -> None:
        """Call `expire` when it has passed."""
        self._expire = expire
        self._timer = self._loop.call_at(self._at, self._ring)

    def move(self, seconds: float) -> None:
        """Put it off until `seconds` from now."""
        self.wait = seconds
        self._at = self._loop.time() + seconds

    def remaining(self) -> float:
        return self._at - self._loop.time()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        if self.remaining() > 0:
            self.start(self._expire)
        else:
            self._expire()


async def _read_leftover(response: aiohttp.ClientResponse) -> None:
    """The little that may follow the end, so that the connection can be used again."""
    with suppress(asyncio.TimeoutError, aiohttp.ClientError):
        async with timeout(LEFTOVER_SECONDS):
            await response.read()


async def _post(session: aiohttp.ClientSession, url: str, body: Body) -> aiohttp.ClientResponse:
    """One request; a second where the first met a connection of the pool that the server was just closing."""
    try:
        return await session.post(url, json=body)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
        return await session.post(url, json=body)


async def _error_message(response: aiohttp.ClientResponse) -> str:
    """What the server says about its refusal; closes the response."""
    try:
        content = await response.content.read(500)
    finally:
        response.close()
    return content.decode(errors="replace").strip() or str(response.reason)
