"""The interface of the offline tools' LLM backends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import FinishReason, LLMPrompt, Sampling


@dataclass(frozen=True)
class GeneratedTokens:
    """Speech ids (n,) int64 0..6560, at least one. finish_reason: "length" if the token limit cut generation short."""

    tokens: np.ndarray
    finish_reason: FinishReason | None

    @classmethod
    def of(cls, prompt: LLMPrompt, tokens: Sequence[int], finish_reason: FinishReason | None) -> "GeneratedTokens":
        """UnavailableError if there is no token."""
        if not tokens:
            raise UnavailableError(f"the LLM returned no speech token for the text {prompt.target_text[:80]!r}")
        return cls(np.asarray(tokens, np.int64), finish_reason)


class BatchLM(Protocol):
    """An LLM that is given all its prompts at once."""

    def generate(self, prompts: Sequence[LLMPrompt], sampling: Sampling) -> list[GeneratedTokens | Exception]:
        """For each prompt its tokens, or the error."""
        ...

    def close(self) -> None:
        """Release the LLM; harmless if called twice."""
        ...
