"""How the OpenAI-compatible servers want to be asked, and how their events are read.

vllm           /v1/completions, ids in, ids out      `vllm serve`
trtllm         /v1/completions, ids in, ids out      `trtllm-serve`
text           /v1/completions, text in, text out    either of them, with a tokenizer of its own
transformers   /v1/completions, text in, text out    `transformers serve`
chat           /v1/chat/completions with CosyVoice2's template in the server's tokenizer
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.errors import UnavailableError
from common.llm.interface import FinishReason, LLMPrompt, Sampling, TokenChunk
from common.llm.speech_tokens import LLMTokenizer, SpeechTokenParser, speech_token_text, spoken_text

Body = dict[str, Any]
_ENDED = b"[DONE]"
_LONGEST_LINE = 1 << 20  # bytes; an event with one token has a few hundred


class Asked(NamedTuple):
    """One utterance to ask a server for."""

    prompt: LLMPrompt
    sampling: Sampling
    tokenizer: LLMTokenizer

    def ids(self) -> list[int]:
        return self.tokenizer.encode_prompt(self.prompt.prompt_text, self.prompt.target_text, self.prompt.prompt_tokens)

    def text(self) -> str:
        return self.tokenizer.prompt_string(self.prompt.prompt_text, self.prompt.target_text, self.prompt.prompt_tokens)


@dataclass(frozen=True)
class Dialect:
    """`body` adds to what every server understands; ValueError where the dialect cannot express the request."""

    name: str
    path: str
    body: Callable[[Asked], Body]

    def request(self, model: str, asked: Asked) -> Body:
        sampling = asked.sampling
        common: Body = {"model": model, "stream": True, "max_tokens": sampling.max_tokens}
        if sampling.seed is not None:
            common["seed"] = sampling.seed
        return common | self.body(asked)


def _vllm(asked: Asked) -> Body:
    body = _extended(asked.sampling, asked.tokenizer) | {"prompt": asked.ids(), "return_token_ids": True}
    if asked.sampling.ras_window:  # for common.llm.vllm_logits in the server
        body["vllm_xargs"] = {"ras_window": asked.sampling.ras_window, "ras_tau": asked.sampling.ras_tau}
    return body


def _trtllm(asked: Asked) -> Body:
    _refuse_ras(asked.sampling)
    return _extended(asked.sampling, asked.tokenizer) | {"prompt": asked.ids(), "detokenize": False}


def _text(asked: Asked) -> Body:
    _refuse_ras(asked.sampling)
    # Speech tokens may be special in the checkpoint's tokenizer; skipped, the answer would be empty text.
    return _extended(asked.sampling, asked.tokenizer) | {"prompt": asked.text(), "skip_special_tokens": False}


def _transformers(asked: Asked) -> Body:
    """Sampling as transformers' generation config in JSON, replacing the model's own."""
    _refuse_ras(asked.sampling)
    sampling, end_ids = asked.sampling, asked.tokenizer.end_ids
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
    return {"prompt": asked.text(), "generation_config": json.dumps(config)}


def _chat(asked: Asked) -> Body:
    _refuse_ras(asked.sampling)
    messages = [{"role": "user", "content": spoken_text(asked.prompt.prompt_text, asked.prompt.target_text)}]
    if asked.prompt.prompt_tokens:
        messages.append({"role": "assistant", "content": speech_token_text(asked.prompt.prompt_tokens)})
    return _extended(asked.sampling, asked.tokenizer) | {"messages": messages, "skip_special_tokens": False}


def _extended(sampling: Sampling, tokenizer: LLMTokenizer) -> Body:
    """Sampling beyond OpenAI's as fields of the body, which `vllm serve` and `trtllm-serve` have in common."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,  # 0 does not limit, to both of them
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": list(tokenizer.end_ids),
    }


def _refuse_ras(sampling: Sampling) -> None:
    if sampling.ras_window:
        raise ValueError(f"ras_window {sampling.ras_window}: only `vllm serve` can run repetition-aware sampling")


# In the order in which they are tried at a server that has not told which is its own.
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
    """Server-sent events of a completion, in pieces as they arrive, into speech ids.

    {"choices": [{"token_ids": [...], "finish_reason": ...}]}, or "text", or a chat's {"delta": {"content": ...}}.
    """

    def __init__(self, tokenizer: LLMTokenizer, url: str) -> None:
        self.ended = False  # an end token was uttered, or the server gave a reason for the end
        self._tokenizer = tokenizer
        self._url = url
        self._parser = SpeechTokenParser()
        self._unfinished = b""

    def feed(self, data: bytes) -> TokenChunk:
        """What `data` completes. Raises UnavailableError where it is not an answer, or the server reports a failure."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > _LONGEST_LINE:
            raise self._no_completion(self._unfinished)
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
        """Speech ids of one event, and the reason if it is the last."""
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
            raise self._no_completion(content) from None
        if reason not in (None, "", "stop", "length"):
            raise UnavailableError(f"LLM server {self._url} ended the answer with {reason!r}")
        return tokens, "stop" if ended else (reason or None)

    def _no_completion(self, content: bytes) -> UnavailableError:
        return UnavailableError(f"LLM server {self._url} sent what is no completion: {content[:200]!r}")

    def _tokens(self, choice: Body) -> tuple[list[int], bool]:
        """Speech ids of a choice, and whether an end token follows them."""
        if (ids := choice.get("token_ids")) is not None:
            for position, token in enumerate(ids):
                if token in self._tokenizer.end_ids:
                    return self._tokenizer.to_speech_ids(ids[:position]), True
            return self._tokenizer.to_speech_ids(ids), False
        text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
        return self._parser.feed(text or ""), self._parser.ended
