"""Request bodies and event formats of the OpenAI-compatible servers.

vllm           /v1/completions, ids in, ids out      `vllm serve`
trtllm         /v1/completions, ids in, ids out      `trtllm-serve`
text           /v1/completions, text in, text out    either of them, with the tokenizer of the server
transformers   /v1/completions, text in, text out    `transformers serve`
chat           /v1/chat/completions with CosyVoice2's template in the server's tokenizer

The last three get the prompt's text and the target text as one, with a blank between them where they would share a
token: the first word then gets the token that it has after a blank.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import FinishReason, LLMPrompt, Sampling, TokenChunk
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer, SpeechTokenParser, speech_token_text

Body = dict[str, Any]
_ENDED = b"[DONE]"
_LONGEST_LINE = 1 << 20  # bytes; an event with one token has a few hundred


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
    _reject_ras(request.sampling)
    return _extended(request.sampling, request.tokenizer) | {"prompt": request.ids(), "detokenize": False}


def _text(request: CompletionRequest) -> Body:
    _reject_ras(request.sampling)
    # Speech tokens may be special tokens in the checkpoint's tokenizer; skipping them would leave an empty answer.
    return _extended(request.sampling, request.tokenizer) | {"prompt": request.text(), "skip_special_tokens": False}


def _transformers(request: CompletionRequest) -> Body:
    """Return the sampling as a generation config of transformers in JSON, which replaces the model's own."""
    _reject_ras(request.sampling)
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
    _reject_ras(request.sampling)
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


def _reject_ras(sampling: Sampling) -> None:
    if sampling.ras_window:
        raise ValueError(f"ras_window {sampling.ras_window}: only `vllm serve` can run repetition-aware sampling")


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
