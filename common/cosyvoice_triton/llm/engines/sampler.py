"""Sampling of the next token: repetition penalty, temperature, top-k, top-p and repetition-aware sampling."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from cosyvoice_triton.llm.interface import Sampling

# Of all requests without a seed: making a generator for each would take 10 us. Thread-safe.
_UNSEEDED = np.random.default_rng()


class TokenSampler:
    """Samples the tokens of one request; with a seed, the result depends only on it and the request's own logits.

    Only `candidates` (ids, ascending) are sampled: speech tokens and end tokens. `end_ids` are excluded until
    `sampling.min_tokens` others have been sampled.
    """

    def __init__(
        self,
        sampling: Sampling,
        candidates: np.ndarray,
        *,
        prompt_ids: np.ndarray,
        end_ids: Sequence[int],
    ) -> None:
        self._sampling = sampling
        self._candidates = candidates
        self._seen = np.isin(candidates, prompt_ids)
        self._ends = np.isin(candidates, np.asarray(end_ids))
        self._tokens_before_end = sampling.min_tokens
        self._recent: deque[int] = deque(maxlen=sampling.ras_window)  # indices of candidates
        self._random = _UNSEEDED if sampling.seed is None else np.random.default_rng(sampling.seed)

    def sample(self, logits: np.ndarray) -> int:
        """Logits (C,) of the candidates at the next position -> id of the sampled token."""
        scores = logits.astype(np.float64)
        penalty = self._sampling.repetition_penalty
        if penalty != 1:
            seen = scores[self._seen]
            scores[self._seen] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._tokens_before_end > 0:
            self._tokens_before_end -= 1
            scores[self._ends] = -np.inf
        index = self._choose(scores)
        self._seen[index] = True
        return int(self._candidates[index])

    def _choose(self, scores: np.ndarray) -> int:
        """Scores (C,) -> index of the sampled candidate."""
        sampling = self._sampling
        if sampling.temperature == 0:
            return int(scores.argmax())
        scores = scores / sampling.temperature
        index = self._pick(*self._nucleus(scores))
        if sampling.ras_window:
            if self._recent.count(index) >= sampling.ras_limit:
                scores[index] = -np.inf
                index = self._pick(np.arange(len(scores)), np.exp(scores - scores.max()))
            self._recent.append(index)
        return index

    def _nucleus(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Indices (K,), ascending, and weights (K,) of the candidates that top_k and top_p keep of scores (C,)."""
        sampling, highest = self._sampling, scores.max()
        kept = np.arange(len(scores))
        if 0 < sampling.top_k < len(scores):
            kept = np.flatnonzero(scores >= np.partition(scores, -sampling.top_k)[-sampling.top_k])
        weights = np.exp(scores[kept] - highest)
        if sampling.top_p < 1:
            # With RAS, top_p is a share of the whole distribution; otherwise of the tokens left by top_k.
            whole = np.exp(scores - highest).sum() if sampling.ras_window else weights.sum()
            descending = np.sort(weights)[::-1]
            # The most probable tokens up to and including the one that reaches top_p.
            last = int(np.searchsorted(np.cumsum(descending), sampling.top_p * whole))
            enough = weights >= descending[min(last, len(descending) - 1)]
            kept, weights = kept[enough], weights[enough]
        return kept, weights

    def _pick(self, kept: np.ndarray, weights: np.ndarray) -> int:
        # In order of ids, not of weights: near-equal weights may swap ranks when a batch of another size rounds the
        # logits differently, and the result must not change with them.
        cumulative = np.cumsum(weights)
        return int(kept[np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")])
