"""Shortens runs of silent speech tokens: the LLM sometimes says nothing for seconds.

The LLM's own context keeps what is dropped. Source: `llm_job` of upstream's CosyVoice3 model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cosyvoice_triton.config import OrchestratorConfig


@dataclass(frozen=True, kw_only=True)
class SilenceRules:
    """tokens: the ids 0..6560 that are silent; most: how many of them in a row are spoken, 0 for any number."""

    tokens: frozenset[int] = frozenset(OrchestratorConfig.silent_tokens)
    most: int = OrchestratorConfig.max_silent_tokens


class SilenceFilter:
    """Drops what exceeds the rules from the tokens of one segment, which may arrive in any grouping."""

    def __init__(self, rules: SilenceRules):
        self._rules = rules
        self._run = 0  # silent tokens since the last other one, dropped ones included

    def kept(self, tokens: Sequence[int]) -> list[int]:
        """The tokens of the next arrival that are to be spoken."""
        kept = []
        for token in tokens:
            self._run = self._run + 1 if token in self._rules.tokens else 0
            if self._rules.most == 0 or self._run <= self._rules.most:
                kept.append(token)
        return kept
