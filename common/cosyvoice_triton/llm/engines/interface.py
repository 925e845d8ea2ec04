"""The interface of an LLM engine: a loaded model that serves many requests, token ids in, token ids out."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cosyvoice_triton.constants import SPEECH_VOCAB
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import URGENT_TOKENS, FinishReason, LengthRatios, LLMPrompt, Sampling, TokenChunk
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer

WARM_UP_STREAMS, WARM_UP_TOKENS = 32, 4


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to generate, after the prompt `input_ids` (n,) int64. It ends after the first of `end_ids`, which is
    part of the answer.

    urgent_tokens, played, silent_ids: see `LLMPrompt`, here as ids of the LLM; only the engine `cuda` heeds them.
    """

    input_ids: np.ndarray = field(repr=False)
    sampling: Sampling
    end_ids: tuple[int, ...]
    urgent_tokens: int = URGENT_TOKENS
    played: bool = False
    silent_ids: frozenset[int] = frozenset()

    def check(self, vocab_size: int, context: int) -> None:
        """Raise ValueError if a model with these limits cannot serve it; `context` counts prompt and new tokens."""
        prompt, new = len(self.input_ids), self.sampling.max_tokens
        if not prompt:
            raise ValueError("input_ids is empty")
        for name, ids in (("input_ids", self.input_ids), ("end_id", self.end_ids)):
            low, high = int(np.min(ids)), int(np.max(ids))
            if low < 0 or high >= vocab_size:
                worst = low if low < 0 else high
                raise ValueError(f"{name} holds {worst}, outside the vocabulary 0..{vocab_size - 1}")
        if prompt + new > context:
            raise ValueError(f"{prompt} prompt tokens and {new} new ones exceed the LLM's context of {context}")


class Engine(Protocol):
    """Serves concurrent requests; each may start, end and be cancelled at any time."""

    @property
    def live(self) -> int:
        """Return the number of requests that occupy capacity, cancelled ones included until they are released."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield ids of the LLM as they are sampled; closing the generator cancels the request.

        The first iteration raises ValueError if the request cannot be served, UnavailableError if the engine is full;
        every iteration raises UnavailableError if the engine has failed.
        """
        ...

    def close(self) -> None:
        """End all live requests and the engine."""
        ...


@dataclass(eq=False)
class EngineLM:
    """Speech tokens from an engine of this process, which it owns."""

    engine: Engine
    tokenizer: LLMTokenizer
    ratios: LengthRatios = LengthRatios()

    async def aclose(self) -> None:
        self.engine.close()

    async def generate(self, prompt: LLMPrompt, sampling: Sampling) -> AsyncGenerator[TokenChunk, None]:
        tokenizer = self.tokenizer
        ids = tokenizer.encode_prompt(prompt)
        sampling = self.ratios.bound(sampling, prompt, tokenizer.text_length(prompt.target_text))
        silent = frozenset(tokenizer.first_speech_id + token for token in prompt.silent_tokens)
        request = GenerationRequest(ids, sampling, tokenizer.end_ids, prompt.urgent_tokens, prompt.played, silent)
        async with aclosing(self.engine.generate(request)) as chunks:
            async for tokens, reason in chunks:
                yield TokenChunk(tokenizer.to_speech_ids(tokens), reason)


async def warm_up(engine: Engine, tokenizer: LLMTokenizer, max_requests: int) -> None:
    """Run one request alone, then up to `max_requests` together. A GPU engine compiles kernels at its first requests,
    which takes seconds for large batches. Raises what the engine raises."""
    for concurrent in (1, min(WARM_UP_STREAMS, max_requests)):
        await asyncio.gather(*(speak_once(engine, tokenizer) for _ in range(concurrent)))


async def speak_once(engine: Engine, tokenizer: LLMTokenizer) -> None:
    """Run one short request. Raises what the engine raises."""
    sampling = Sampling(max_tokens=WARM_UP_TOKENS, min_tokens=WARM_UP_TOKENS)
    request = GenerationRequest(tokenizer.encode_prompt(LLMPrompt("a", "", [0])), sampling, tokenizer.end_ids)
    async with aclosing(engine.generate(request)) as chunks:
        async for _ in chunks:
            pass


def finish_reason(reason: str | None) -> FinishReason | None:
    """Return a GPU engine's finish reason as ours, None while the request runs. UnavailableError for any other."""
    known: dict[str | None, FinishReason | None] = {None: None, "stop": "stop", "length": "length"}
    if reason not in known:
        raise UnavailableError(f"the LLM engine ended the answer with {reason!r}")
    return known[reason]


def require_speech_tokens(tokenizer: LLMTokenizer, vocab_size: int, source: object) -> None:
    """Raise ValueError if the vocabulary of the model in `source` is too small for the speech tokens of `tokenizer`."""
    last = max(tokenizer.first_speech_id + SPEECH_VOCAB - 1, *tokenizer.end_ids)
    if vocab_size <= last:
        raise ValueError(
            f"{source} has a vocabulary of {vocab_size}, too small for the tokenizer's speech and end tokens "
            f"{tokenizer.first_speech_id}..{last}: not the checkpoint of a CosyVoice LLM"
        )


def candidate_ids(tokenizer: LLMTokenizer) -> np.ndarray:
    """Return the ids (C,), ascending, that may be sampled: speech tokens and end tokens."""
    return np.union1d(
        np.arange(tokenizer.first_speech_id, tokenizer.first_speech_id + SPEECH_VOCAB), np.asarray(tokenizer.end_ids)
    )
