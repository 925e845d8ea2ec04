"""CosyVoice2's repetition-aware sampling, restated from VALL-E 2 (arXiv:2406.05370, section 3.2) and the description
of upstream's `ras_sampling`.

A token is sampled from the nucleus: the most probable tokens, as many as needed to reach top_p of all probability, at
most top_k. If it makes up tau or more of the last `window` tokens, it is replaced by a sample from all tokens. The
paper leaves the token among them, upstream excludes it.
"""

from collections.abc import Sequence

import numpy as np
from cosyvoice_triton.llm.interface import Sampling

# window, tau, and the positions of a token that is always sampled first and replaced if the window holds it too often
WINDOWS = [
    (1, 1.0, [0, 2, 4, 6]),
    (10, 0.1, [0, 11, 22]),
    (10, 0.15, [0, 1, 11, 12, 22, 23]),
    (64, 0.01, [0, 65, 130, 195]),
]


def reference_tokens(
    logits: np.ndarray, numbers: Sequence[tuple[float, float]], sampling: Sampling, prompt: Sequence[int], end: int
) -> list[int]:
    """The tokens that are sampled from the same logits (C,) at each position, with two random numbers for each."""
    sampled: list[int] = []
    for first, second in numbers:
        scores = logits.astype(np.float64)
        for token in {*prompt, *sampled}:
            scores[token] *= (
                1 / sampling.repetition_penalty if scores[token] > 0 else sampling.repetition_penalty
            )  # towards minus infinity
        scores /= sampling.temperature
        if len(sampled) < sampling.min_tokens:
            scores[end] = -np.inf
        weights = np.exp(scores - scores.max())
        ranks = np.argsort(-weights)[: sampling.top_k or None]
        whole = weights.sum() if sampling.ras_window else weights[ranks].sum()
        before = np.cumsum(weights[ranks]) - weights[ranks]  # of the more probable tokens
        kept = np.sort(ranks[before < sampling.top_p * whole])
        token = _picked(kept, weights[kept], first)
        window = sampled[-sampling.ras_window :] if sampling.ras_window else []
        if window and window.count(token) >= sampling.ras_window * sampling.ras_tau:
            weights[token] = 0
            token = _picked(np.arange(len(weights)), weights, second)
        sampled.append(token)
    return sampled


def _picked(tokens: np.ndarray, weights: np.ndarray, number: float) -> int:
    sums = np.cumsum(weights)
    return int(tokens[np.searchsorted(sums, number * sums[-1], side="right")])
