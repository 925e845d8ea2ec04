"""Shortens runs of silent speech tokens: the LLM sometimes says nothing for seconds.

The LLM's own context keeps what is dropped. Source: `llm_job` of upstream's CosyVoice3 model.
"""

from collections.abc import Collection, Sequence

MAX_SILENT_TOKENS = 5  # spoken of a run: 0.2 s, as upstream


class SilenceFilter:
    """Drops the rest of each run from the tokens of one segment, which may arrive in any grouping.

    silent: the ids in 0..6560 that are silent, `Stack.silent_tokens`.
    """

    def __init__(self, silent: Collection[int]):
        self._silent = silent
        self._run = 0  # silent tokens since the last other one, dropped ones included

    def kept(self, tokens: Sequence[int]) -> list[int]:
        """Return those of the tokens that arrived next that are to be spoken."""
        kept = []
        for token in tokens:
            self._run = self._run + 1 if token in self._silent else 0
            if self._run <= MAX_SILENT_TOKENS:
                kept.append(token)
        return kept
