"""Which token comes next: repetition penalty, temperature, top-k, top-p and a seeded draw. Knows nothing of models."""

from collections.abc import Sequence

import numpy as np

from common.llm.base import Sampling


class TokenSampler:
    """Draws the tokens of one request, so that its result depends on nothing but its own logits and seed.

    Only `candidates` (ids, ascending) can be drawn: speech tokens and end tokens. `end_ids` cannot before
    `min_tokens` others were.
    """

    def __init__(
        self,
        sampling: Sampling,
        candidates: np.ndarray,
        *,
        prompt_ids: Sequence[int],
        end_ids: Sequence[int],
        min_tokens: int,
    ) -> None:
        self._sampling = sampling
        self._candidates = candidates
        self._seen = np.isin(candidates, np.asarray(prompt_ids))
        self._ends = np.isin(candidates, np.asarray(end_ids))
        self._tokens_before_end = min_tokens
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))

    def sample(self, logits: np.ndarray) -> int:
        """Logits (V,) of the next position -> id of the drawn token."""
        scores = logits[self._candidates].astype(np.float64)
        penalty = self._sampling.repetition_penalty
        seen = scores[self._seen]
        scores[self._seen] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._tokens_before_end > 0:
            self._tokens_before_end -= 1
            scores[self._ends] = -np.inf
        index = self._draw(scores)
        self._seen[index] = True
        return int(self._candidates[index])

    def _draw(self, scores: np.ndarray) -> int:
        """Scores (C,) -> index of the drawn candidate."""
        sampling = self._sampling
        if sampling.temperature == 0:
            return int(scores.argmax())
        scores = scores / sampling.temperature
        if 0 < sampling.top_k < len(scores):
            scores[scores < np.partition(scores, -sampling.top_k)[-sampling.top_k]] = -np.inf
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        if sampling.top_p < 1:
            descending = np.sort(weights)[::-1]
            # The likeliest tokens up to and including the one that reaches top_p.
            last = int(np.searchsorted(np.cumsum(descending), sampling.top_p))
            weights[weights < descending[min(last, len(descending) - 1)]] = 0
        # In order of ids, not of weights: near-equal weights may swap ranks when a batch of another size rounds the
        # logits otherwise, and the draw must not change with them.
        cumulative = np.cumsum(weights)
        return int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
