"""What every way to the LLM shares: what goes in, how it samples, and the stream of speech tokens that comes out."""

import dataclasses
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from common.config import OrchestratorConfig
from common.constants import MAX_STREAM_TOKENS

MAX_INT32 = 2**31 - 1  # how the LLM's tensors carry integers
MAX_SEED = MAX_INT32  # the narrowest seed among the engines

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class LLMPrompt:
    """One utterance to speak. `prompt_tokens` are speech ids 0..6560 of the reference, which says `prompt_text`.

    Cross-lingual mode leaves both empty: the LLM then knows the text alone. In instruct mode `prompt_text` is an
    `instruction` and there are no prompt tokens.
    """

    target_text: str
    prompt_text: str = ""
    prompt_tokens: Sequence[int] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of one request. The defaults are those of CosyVoice2's Triton runtime.

    temperature 0 is greedy, top_k 0 does not limit, seed None draws one at random; max_tokens ends where the vocoder
    does, and no end token is drawn before min_tokens others. ras_window 0 turns repetition-aware sampling (RAS) off:
    with it, a drawn token that makes up ras_tau or more of the last ras_window tokens is drawn anew, from all tokens.
    Raises ValueError naming the value that is out of range.
    """

    temperature: float = OrchestratorConfig.temperature
    top_p: float = OrchestratorConfig.top_p
    top_k: int = OrchestratorConfig.top_k
    repetition_penalty: float = OrchestratorConfig.repetition_penalty
    max_tokens: int = OrchestratorConfig.max_tokens
    min_tokens: int = 0
    ras_window: int = OrchestratorConfig.ras_window
    ras_tau: float = OrchestratorConfig.ras_tau
    seed: int | None = None

    def __post_init__(self) -> None:
        allowed = {
            "temperature": (0 <= self.temperature <= 10, "0..10"),
            "top_p": (0 < self.top_p <= 1, "above 0, up to 1"),
            "top_k": (0 <= self.top_k <= MAX_INT32, f"0..{MAX_INT32}"),
            "repetition_penalty": (0 < self.repetition_penalty <= 10, "above 0, up to 10"),
            "max_tokens": (1 <= self.max_tokens <= MAX_STREAM_TOKENS, f"1..{MAX_STREAM_TOKENS}"),
            "min_tokens": (0 <= self.min_tokens <= self.max_tokens, f"0..{self.max_tokens}"),
            "ras_window": (0 <= self.ras_window <= MAX_STREAM_TOKENS, f"0..{MAX_STREAM_TOKENS}"),
            "ras_tau": (0 < self.ras_tau <= 1, "above 0, up to 1"),
            "seed": (self.seed is None or 0 <= self.seed <= MAX_SEED, f"0..{MAX_SEED}"),
        }
        for name, (good, range_) in allowed.items():
            if not good:
                raise ValueError(f"{name} {getattr(self, name)!r} is out of range: {range_}")


@dataclass(frozen=True, kw_only=True)
class LengthRatios:
    """Fewest and most speech tokens per token of the target text; the defaults are CosyVoice2's."""

    min: float = OrchestratorConfig.min_token_ratio
    max: float = OrchestratorConfig.max_token_ratio

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max < math.inf or self.max == 0:
            raise ValueError(f"token ratios must be numbers with 0 <= min <= max, not {self.min!r} and {self.max!r}")

    def bound(self, sampling: Sampling, text_tokens: int) -> Sampling:
        """`sampling` with the length of its speech held within the ratios, and never above its own max_tokens.

        A text too long for max_tokens is held to half of them at least, lest its speech is cut for certain.
        """
        most = max(1, min(sampling.max_tokens, int(self.max * text_tokens)))
        least = min(most, max(sampling.min_tokens, min(int(self.min * text_tokens), most // 2)))
        return dataclasses.replace(sampling, min_tokens=least, max_tokens=most)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Longest waits in seconds, below 5 so that a dead or silent LLM becomes an error within that time.

    first_token counts from the request and includes connecting; token is the wait between later ones.
    """

    connect: float = 2.0
    first_token: float = OrchestratorConfig.first_token_timeout
    token: float = OrchestratorConfig.token_timeout

    def __post_init__(self) -> None:
        for name in ("connect", "first_token", "token"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"timeout {name} must be a positive number of seconds: {value!r}")


class TokenChunk(NamedTuple):
    """Speech ids 0..6560 as they arrived, and on the last chunk why the LLM ended."""

    tokens: list[int]
    finish_reason: FinishReason | None = None


class TokenStream:
    """Async iterator over lists of speech ids 0..6560, in the order and grouping in which they arrive.

    Iterate and close it in one task, or close it once the iterating task has ended. After exhaustion
    `finish_reason` is "stop", or "length" where `max_tokens` cut the speech short. While iterating it raises
    UnavailableError where the LLM is down, silent or ends midway, and ValueError where it refuses the request.
    """

    def __init__(self, chunks: AsyncGenerator[TokenChunk, None]) -> None:
        self.finish_reason: FinishReason | None = None
        self._chunks = chunks

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> list[int]:
        async for tokens, finish_reason in self._chunks:
            self.finish_reason = finish_reason or self.finish_reason
            if tokens:
                return tokens
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel what still runs at the LLM and release it. Harmless after the end, and twice."""
        await self._chunks.aclose()


class SpeechLM(Protocol):
    """A way to the LLM."""

    def generate(self, prompt: LLMPrompt, sampling: Sampling) -> TokenStream:
        """Start speaking `prompt`. The first iteration of the stream sends the request."""
        ...

    async def aclose(self) -> None:
        """Release connections; streams still open end with UnavailableError."""
        ...
