"""CosyVoice2's repetition-aware sampling, restated as probabilities from VALL-E 2 (arXiv:2406.05370, section 3.2) and
the description of upstream's `ras_sampling`, and a test of samples against them.

A token is sampled from the nucleus: the most probable tokens, as many as needed to reach top_p of all probability, at
most top_k. If it makes up tau or more of the last `window` tokens, it is replaced by a sample from all tokens. The
paper leaves the token among them, upstream excludes it.
"""

from collections.abc import Sequence

import numpy as np

CASES = {  # logits of 40 tokens
    "spread": np.random.default_rng(1).normal(0, 2, 40),
    "flat": np.random.default_rng(1).normal(0, 0.5, 40),  # 25 tokens hold less than 0.8
    "peaked": np.log([0.9, *[0.1 / 39] * 39]),
}
# window, tau, and the positions of a token that is always sampled first and replaced if the window holds it too often
WINDOWS = [
    (1, 1.0, [0, 2, 4, 6]),
    (10, 0.1, [0, 11, 22]),
    (10, 0.15, [0, 1, 11, 12, 22, 23]),
    (64, 0.01, [0, 65, 130, 195]),
]


def ras_probabilities(
    logits: np.ndarray, recent: Sequence[int], *, top_p: float, top_k: int, window: int, tau: float
) -> np.ndarray:
    """(C,) probabilities of the next token after the tokens `recent`."""
    probabilities = np.exp(logits - np.logaddexp.reduce(logits))
    nucleus: list[int] = []
    mass = 0.0
    for token in sorted(range(len(logits)), key=lambda token: -probabilities[token]):
        if len(nucleus) == top_k or mass >= top_p:
            break
        nucleus.append(token)
        mass += probabilities[token]
    result = np.zeros(len(logits))
    for token in nucleus:
        share = probabilities[token] / mass
        if list(recent[-window:]).count(token) >= window * tau:
            others = probabilities.copy()
            others[token] = 0.0
            result += share * others / others.sum()
        else:
            result[token] += share
    return result


def deviation(expected: Sequence[np.ndarray], sampled: Sequence[int]) -> float:
    """The largest deviation of a token's count from its expectation, in standard deviations; about 3 if all is well.

    expected: (C,) probabilities at each step, given the tokens that were really sampled before.
    """
    shares = np.array(expected)
    counts = np.bincount(sampled, minlength=shares.shape[1])
    return float(np.max(np.abs(counts - shares.sum(0)) / np.sqrt(np.maximum((shares * (1 - shares)).sum(0), 1.0))))
