"""The LLM behind OpenAI-compatible servers: `trtllm-serve`, `vllm serve`, `transformers serve`.

`POST {url}/v1/completions` with the prompt template as text, answered by server-sent events whose text is
`<|s_12|><|s_7|>`.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from common.errors import UnavailableError
from common.llm.base import FinishReason, LLMPrompt, Sampling, Timeouts, TokenChunk, TokenStream
from common.speech_tokens import LLMTokenizer, SpeechTokenParser

Body = dict[str, Any]
# Body of a request from what every server understands, the sampling and the end ids.
Dialect = Callable[[Body, Sampling, Sequence[int]], Body]

_REFUSED = (400, 413, 422)  # the request itself is wrong; any other failure is the server's or the operator's


def extended_dialect(common: Body, sampling: Sampling, end_ids: Sequence[int]) -> Body:
    """Sampling beyond OpenAI's as fields of the body: `trtllm-serve` and `vllm serve`."""
    return common | {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # 0 does not limit here, which vLLM and TensorRT-LLM both understand.
        "top_k": sampling.top_k,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(end_ids),
        # Speech tokens may be special in the checkpoint's tokenizer; skipped, the answer would be empty text.
        "skip_special_tokens": False,
    }


def generation_config_dialect(common: Body, sampling: Sampling, end_ids: Sequence[int]) -> Body:
    """Sampling as transformers' generation config in JSON, replacing the model's own: `transformers serve`."""
    greedy = sampling.temperature == 0
    sampled = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    config = {
        "do_sample": not greedy,
        **({} if greedy else sampled),
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": sampling.max_tokens,
        "eos_token_id": list(end_ids),
        "pad_token_id": end_ids[0],
    }
    return common | {"generation_config": json.dumps(config)}


@dataclass(eq=False)
class _Endpoint:
    url: str
    dialect: Dialect | None = None  # unknown until the server accepted one
    outstanding: int = 0
    down: bool = False  # its last connection failed: asked only after the others


class OpenAILM:
    """Speech from one or several OpenAI-compatible servers of the same model, the least busy one first."""

    def __init__(
        self, urls: Sequence[str], model: str, tokenizer: LLMTokenizer, timeouts: Timeouts | None = None
    ) -> None:
        if not urls:
            raise ValueError("no URL of an LLM server is given")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"not the URL of an LLM server: {url!r}")
        # Base URLs are given with the version, as OpenAI's clients take them, or without it.
        self._endpoints = [_Endpoint(url.rstrip("/").removesuffix("/v1")) for url in urls]
        self._model = model
        self._tokenizer = tokenizer
        self._timeouts = timeouts or Timeouts()
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=self._timeouts.connect),  # the rest has deadlines, see _ask
            # Below the 5 s after which uvicorn closes an idle connection, lest a request meets a closing one.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0),
            # The servers are parts of this service: a proxy meant for the internet has no place in between.
            trust_env=False,
        )

    def generate(self, prompt: LLMPrompt, sampling: Sampling) -> TokenStream:
        return TokenStream(self._generate(prompt, sampling))

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _generate(self, prompt: LLMPrompt, sampling: Sampling) -> AsyncGenerator[TokenChunk, None]:
        text = self._tokenizer.prompt_string(prompt.prompt_text, prompt.target_text, prompt.prompt_tokens)
        common: Body = {"model": self._model, "prompt": text, "max_tokens": sampling.max_tokens, "stream": True}
        if sampling.seed is not None:
            common["seed"] = sampling.seed
        failures = []
        deadline = time.monotonic() + self._timeouts.first_token
        # Another server is asked only where no connection came about, so that nothing is generated twice.
        for endpoint in sorted(self._endpoints, key=lambda endpoint: (endpoint.down, endpoint.outstanding)):
            endpoint.outstanding += 1
            try:
                async with aclosing(self._ask(endpoint, common, sampling, deadline)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                endpoint.down = True
                failures.append(f"{endpoint.url}: {error or type(error).__name__}")
            except httpx.HTTPError as error:
                raise UnavailableError(f"LLM server {endpoint.url}: {error or type(error).__name__}") from error
            finally:
                endpoint.outstanding -= 1
        raise UnavailableError(f"no LLM server can be reached: {'; '.join(failures)}")

    async def _ask(
        self, endpoint: _Endpoint, common: Body, sampling: Sampling, deadline: float
    ) -> AsyncGenerator[TokenChunk, None]:
        """The answer of one server, its first token by `deadline` on the monotonic clock.

        Leaving it early closes the connection, which aborts the generation.
        """
        events = self._events(endpoint, common, sampling)
        async with aclosing(events):
            parser = SpeechTokenParser()
            generated, wait = 0, self._timeouts.first_token
            while True:
                try:
                    # One deadline over connecting, pings and events without tokens; only a token moves it.
                    event = await asyncio.wait_for(anext(events), deadline - time.monotonic())
                except asyncio.TimeoutError:
                    raise UnavailableError(f"LLM server {endpoint.url} sent no token for {wait} s") from None
                except StopAsyncIteration:
                    raise UnavailableError(f"LLM server {endpoint.url} ended in the middle of an answer") from None
                chunk = _read_event(event, parser, endpoint.url)
                if chunk.tokens:
                    generated, wait = generated + len(chunk.tokens), self._timeouts.token
                    deadline = time.monotonic() + wait
                if generated > sampling.max_tokens:
                    raise UnavailableError(f"LLM server {endpoint.url} ignores max_tokens {sampling.max_tokens}")
                yield chunk
                if chunk.finish_reason:
                    break
            # The little that may follow is read, so that the connection can be used again.
            with suppress(asyncio.TimeoutError, StopAsyncIteration, httpx.HTTPError, UnavailableError):
                if not parser.ended:
                    await asyncio.wait_for(anext(events), 0.2)

    async def _events(self, endpoint: _Endpoint, common: Body, sampling: Sampling) -> AsyncGenerator[str, None]:
        """The data of the server-sent events, up to the end of the answer."""
        response = await self._open(endpoint, common, sampling)
        try:
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    yield data
        finally:
            await response.aclose()

    async def _open(self, endpoint: _Endpoint, common: Body, sampling: Sampling) -> httpx.Response:
        """Send the request in the server's dialect, which its first answer tells."""
        dialects = [endpoint.dialect] if endpoint.dialect else [extended_dialect, generation_config_dialect]
        refusals = []
        for dialect in dialects:
            body = dialect(common, sampling, self._tokenizer.end_ids)
            request = self._client.build_request("POST", f"{endpoint.url}/v1/completions", json=body)
            response = await self._client.send(request, stream=True)
            endpoint.down = False
            if response.status_code == 200:
                endpoint.dialect = dialect
                return response
            message = await _error_message(response)
            if response.status_code not in _REFUSED:
                raise UnavailableError(f"LLM server {endpoint.url} answered HTTP {response.status_code}: {message}")
            refusals.append(f"HTTP {response.status_code}: {message}")
        raise ValueError(f"LLM server {endpoint.url} refused the request: {'; '.join(refusals)}")


def _read_event(data: str, parser: SpeechTokenParser, url: str) -> TokenChunk:
    """One event of a completion: `{"choices": [{"text": ..., "finish_reason": ...}]}`."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise UnavailableError(f"LLM server {url} failed in the middle of an answer: {str(event['error'])[:500]}")
        if not event["choices"]:  # usage statistics
            return TokenChunk([])
        choice = event["choices"][0]
        text, reason = choice.get("text") or "", choice.get("finish_reason")
        tokens = parser.feed(text)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UnavailableError(f"LLM server {url} sent what is no completion: {data[:200]!r}") from None
    if reason not in (None, "", "stop", "length"):
        raise UnavailableError(f"LLM server {url} ended the answer with {reason!r}")
    finish: FinishReason | None = "stop" if parser.ended else (reason or None)
    return TokenChunk(tokens, finish)


async def _error_message(response: httpx.Response) -> str:
    """What the server says about its refusal; closes the response."""
    try:
        content = await response.aread()
    finally:
        await response.aclose()
    return content.decode(errors="replace").strip()[:500] or response.reason_phrase
