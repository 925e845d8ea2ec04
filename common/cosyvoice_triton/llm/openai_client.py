"""Client of OpenAI-compatible LLM servers: `trtllm-serve`, `vllm serve`, `transformers serve`.

One POST per utterance, answered by server-sent events. Request bodies and events are of a dialect:

vllm           /v1/completions, ids in, ids out      `vllm serve`
trtllm         /v1/completions, ids in, ids out      `trtllm-serve`
text           /v1/completions, text in, text out    either of them, with the tokenizer of the server
transformers   /v1/completions, text in, text out    `transformers serve`
chat           /v1/chat/completions with CosyVoice2's template in the server's tokenizer

The last three get the prompt's text and the target text as one, with a blank between them where they would share a
token: the first word then gets the token that it has after a blank.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
from async_timeout import timeout, timeout_at

from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import FinishReason, LengthRatios, LLMPrompt, Sampling, Timeouts, TokenChunk
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer, SpeechTokenParser, speech_token_text
from cosyvoice_triton.monitoring import tracing

Body = dict[str, Any]
_ENDED = b"[DONE]"
_LONGEST_LINE = 1 << 20  # bytes; an event with one token has a few hundred
_REJECTED = (400, 413, 422)  # the request is invalid, at least in this dialect
_ABSENT = (404, 405)  # the dialect's path or the model does not exist; any other status is a failure of the server
DOWN_SECONDS = 5.0  # a server that failed is tried only after the others for this long
DRAIN_SECONDS = 0.2  # for the rest of an answer after its last token: a new connection costs less than a longer wait


class CompletionRequest(NamedTuple):
    """One utterance to request from a server."""

    prompt: LLMPrompt
    sampling: Sampling
    tokenizer: LLMTokenizer

    def ids(self) -> list[int]:
        return self.tokenizer.encode_prompt(self.prompt).tolist()

    def text(self) -> str:
        return self.tokenizer.prompt_string(self.prompt)


@dataclass(frozen=True)
class Dialect:
    """`body` returns the fields that not all servers share. ValueError if the dialect cannot express the request."""

    name: str
    path: str
    body: Callable[[CompletionRequest], Body]

    def request_body(self, model: str, request: CompletionRequest) -> Body:
        sampling = request.sampling
        if sampling.ras_window and self.body is not _vllm:
            raise ValueError(f"ras_window {sampling.ras_window}: only `vllm serve` can run repetition-aware sampling")
        common: Body = {"model": model, "stream": True, "max_tokens": sampling.max_tokens}
        if sampling.seed is not None:
            common["seed"] = sampling.seed
        return common | self.body(request)


def _vllm(request: CompletionRequest) -> Body:
    body = _extended(request.sampling, request.tokenizer) | {"prompt": request.ids(), "return_token_ids": True}
    if request.sampling.ras_window:  # for cosyvoice_triton.llm.vllm_logits in the server
        body["vllm_xargs"] = {"ras_window": request.sampling.ras_window, "ras_tau": request.sampling.ras_tau}
    return body


def _trtllm(request: CompletionRequest) -> Body:
    return _extended(request.sampling, request.tokenizer) | {"prompt": request.ids(), "detokenize": False}


def _text(request: CompletionRequest) -> Body:
    # Speech tokens may be special tokens in the checkpoint's tokenizer; skipping them would leave an empty answer.
    return _extended(request.sampling, request.tokenizer) | {"prompt": request.text(), "skip_special_tokens": False}


def _transformers(request: CompletionRequest) -> Body:
    """Return the sampling as a generation config of transformers in JSON, which replaces the model's own."""
    sampling, end_ids = request.sampling, request.tokenizer.end_ids
    greedy = sampling.temperature == 0
    sampled = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    config = {
        "do_sample": not greedy,
        **({} if greedy else sampled),
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "eos_token_id": list(end_ids),
        "pad_token_id": end_ids[0],
    }
    return {"prompt": request.text(), "generation_config": json.dumps(config)}


def _chat(request: CompletionRequest) -> Body:
    prompt = request.prompt
    messages = [{"role": "user", "content": request.tokenizer.joined_text(prompt)}]
    if prompt.speech_tokens:
        messages.append({"role": "assistant", "content": speech_token_text(prompt.speech_tokens)})
    return _extended(request.sampling, request.tokenizer) | {"messages": messages, "skip_special_tokens": False}


def _extended(sampling: Sampling, tokenizer: LLMTokenizer) -> Body:
    """Return the sampling fields that `vllm serve` and `trtllm-serve` share and OpenAI's API lacks."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,  # 0 is unlimited for both
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": list(tokenizer.end_ids),
    }


# In the order in which they are tried at a server of unknown dialect.
DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("vllm", "/v1/completions", _vllm),
        Dialect("trtllm", "/v1/completions", _trtllm),
        Dialect("text", "/v1/completions", _text),
        Dialect("transformers", "/v1/completions", _transformers),
        Dialect("chat", "/v1/chat/completions", _chat),
    )
}


class EventReader:
    """Read speech ids from the server-sent events of a completion, which may arrive in pieces.

    {"choices": [{"token_ids": [...], "finish_reason": ...}]}, or "text", or a chat's {"delta": {"content": ...}}.
    """

    def __init__(self, tokenizer: LLMTokenizer, url: str) -> None:
        self.ended = False  # an end token or a finish reason was read
        self._tokenizer = tokenizer
        self._url = url
        self._parser = SpeechTokenParser(tokenizer.rules)
        self._unfinished = b""

    def feed(self, data: bytes) -> TokenChunk:
        """Return the tokens that `data` completes. UnavailableError if an event is invalid or reports a failure."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > _LONGEST_LINE:
            raise self._invalid_event(self._unfinished)
        tokens: list[int] = []
        finish: FinishReason | None = None
        for line in lines:
            if not line.startswith(b"data:") or (content := line[5:].strip()) == _ENDED:
                continue
            new, finish = self._read(content)
            tokens += new
            if finish:
                self.ended = True
                break
        return TokenChunk(tokens, finish)

    def _read(self, content: bytes) -> tuple[list[int], FinishReason | None]:
        """Return the speech ids of one event, and the finish reason if it is the last."""
        try:
            event = json.loads(content)
            if "error" in event:
                raise UnavailableError(
                    f"LLM server {self._url} failed in the middle of an answer: {str(event['error'])[:500]}"
                )
            if not event["choices"]:  # usage statistics
                return [], None
            choice = event["choices"][0]
            reason = choice.get("finish_reason")
            tokens, ended = self._tokens(choice)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._invalid_event(content) from None
        if reason not in (None, "", "stop", "length"):
            raise UnavailableError(f"LLM server {self._url} ended the answer with {reason!r}")
        return tokens, "stop" if ended else (reason or None)

    def _invalid_event(self, content: bytes) -> UnavailableError:
        return UnavailableError(f"LLM server {self._url} sent an invalid event: {content[:200]!r}")

    def _tokens(self, choice: Body) -> tuple[list[int], bool]:
        """Return the speech ids of a choice, and whether an end token follows them."""
        if (ids := choice.get("token_ids")) is not None:
            for position, token in enumerate(ids):
                if token in self._tokenizer.end_ids:
                    return self._tokenizer.to_speech_ids(ids[:position]), True
            return self._tokenizer.to_speech_ids(ids), False
        text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
        return self._parser.feed(text or ""), self._parser.ended


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
