"""Sampling of the next tokens of a batch: repetition penalty, temperature, top-k, top-p and repetition-aware sampling.

The one sampler of all engines: a seed gives the same tokens on each, wherever their logits agree. The kernel
`kernels.sampling` computes the same on a GPU in one launch. Nothing branches on the content of the batch, because a
CUDA graph repeats one batch's operations for others.
"""

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cosyvoice_triton.device import on_device
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.interface import MAX_RAS_WINDOW, Sampling

RECENT = MAX_RAS_WINDOW + 1  # sampled tokens that are kept of each request: a window, and the one that is being sampled
NONE = -1  # no token


class SamplingRow(NamedTuple):
    """One request's sampling as numbers. No value is a special case: greedy is a top_k of 1, no RAS a window of 0."""

    temperature: float
    penalty: float
    top_k: float
    top_p: float
    min_tokens: float
    ras_window: float
    ras_limit: float

    @classmethod
    def of(cls, sampling: Sampling, width: int) -> "SamplingRow":
        """Return the row of `sampling`; `width` is the number of tokens that can be sampled."""
        greedy = sampling.temperature == 0
        return cls(
            1.0 if greedy else sampling.temperature,
            sampling.repetition_penalty,
            1.0 if greedy else float(min(sampling.top_k or width, width)),  # 0 stands for all
            sampling.top_p,
            float(sampling.min_tokens),
            0.0 if greedy else float(sampling.ras_window),
            float(sampling.ras_limit),
        )


class BatchSampler:
    """Samples from the candidates (C,), and keeps by slot what each request has sampled.

    bias (C,): added to the logits, minus infinity for what is never sampled. slots: requests that can have state at
    once. seen (slots, C): columns of the prompt and of the answer but its last one. recent (slots, RECENT): the columns
    sampled last, each at its position in the answer modulo the size. If an engine discards a token, the position stays
    the same, and the next column replaces the discarded one.
    """

    def __init__(self, bias: Tensor, slots: int) -> None:
        self.bias = bias
        self.seen = torch.zeros(slots, len(bias), dtype=torch.bool, device=bias.device)
        self.recent = torch.full((slots, RECENT), NONE, device=bias.device)

    def start(self, prompts: Mapping[int, Sequence[int] | np.ndarray]) -> None:
        """Begin requests in these slots, with the columns of their prompts; others than 0..C-1 are ignored."""
        width = self.seen.shape[1]
        columns = np.concatenate([np.asarray(prompt, np.int64) for prompt in prompts.values()])
        own = np.repeat(list(prompts), [len(prompt) for prompt in prompts.values()]) * width + columns
        indices = on_device(np.concatenate([list(prompts), own[(columns >= 0) & (columns < width)]]), self.bias.device)
        slots, marked = indices[: len(prompts)], indices[len(prompts) :]
        self.seen.index_fill_(0, slots, False)
        self.seen.view(-1).index_fill_(0, marked, True)
        self.recent.index_fill_(0, slots, NONE)

    def resume(self, slot: int, prompt: Sequence[int], sampled: Sequence[int]) -> None:
        """Begin a request in a slot, for which these columns were sampled before."""
        self.start({slot: [*prompt, *sampled]})
        recent = [NONE] * RECENT
        for position in range(max(0, len(sampled) - MAX_RAS_WINDOW), len(sampled)):
            recent[position % RECENT] = max(NONE, sampled[position])
        self.recent[slot] = on_device(recent, self.bias.device)

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        keys: Tensor,
        sampling: Tensor,
        ends: Tensor,
        max_top_k: int,
    ) -> Tensor:
        """Sample columns (R, 1) from logits (R, C), at these positions (R,) of the answers in these slots (R,).

        keys (R,): select the random numbers. sampling (7, R, 1): fields of `SamplingRow`, top_k at most `max_top_k`.
        ends (C,) or (R, C): what is not sampled before min_tokens.
        """
        temperatures, penalties, top_ks, top_ps, min_tokens, windows, limits = sampling
        last = self.recent[slots, (positions - 1) % RECENT]
        marks = slots * len(self.bias) + last.clamp(min=0)
        seen = self.seen.view(-1)
        seen[marks] = seen[marks] | (last != NONE)
        scores = logits + self.bias
        penalised = torch.where(scores > 0, scores / penalties, scores * penalties)
        scores = torch.where(self.seen[slots], penalised, scores) / temperatures
        scores = scores.masked_fill(ends & (positions[:, None] < min_tokens), -torch.inf)
        first, second = uniforms(keys, positions)
        sampled = _pick(_nucleus(scores, max_top_k, top_ks, top_ps, windows > 0), first)
        # Repetition-aware sampling: the token is replaced by any other one if the window holds it too often.
        ages = (positions[:, None] - 1 - torch.arange(RECENT, device=slots.device)) % RECENT  # 0: the last token
        repeats = (self.recent[slots] == sampled) & (ages < windows)  # (R, RECENT)
        others = scores.scatter(1, sampled, -torch.inf)
        other = _pick(torch.exp(others - others.amax(1, keepdim=True)), second)
        columns = torch.where(repeats.sum(1, keepdim=True) >= limits, other, sampled)
        self.recent[slots, positions % RECENT] = columns.flatten()
        return columns


class RequestSampler:
    """Samples requests by slot, for engines whose logits are on the CPU."""

    def __init__(self, bias: Tensor, slots: int) -> None:
        """Make a sampler. bias (V,): added to the logits of ids 0..V-1; minus infinity for ids never sampled."""
        candidates = bias.isfinite().nonzero()
        self.first, last = int(candidates[0]), int(candidates[-1])  # ids
        self._sampler = BatchSampler(bias[self.first : last + 1], slots)
        self._positions = torch.zeros(slots, dtype=torch.long)
        self._keys = torch.zeros(slots, dtype=torch.long)
        self._sampling = torch.ones(slots, len(SamplingRow._fields))
        self._ends = torch.zeros(slots, self.width, dtype=torch.bool)

    @property
    def width(self) -> int:
        """Return the number of ids from `first` whose logits `sample` takes."""
        return len(self._sampler.bias)

    def start(self, slot: int, request: GenerationRequest) -> None:
        """Begin a request in a slot."""
        sampling, ends = request.sampling, np.array(request.end_ids) - self.first
        self._sampler.start({slot: request.input_ids - self.first})
        self._positions[slot] = 0
        self._keys[slot] = random_key() if sampling.seed is None else sampling.seed
        self._sampling[slot] = torch.tensor(SamplingRow.of(sampling, self.width))
        self._ends[slot] = False
        self._ends[slot, ends[(ends >= 0) & (ends < self.width)]] = True

    def sample(self, slots: Sequence[int], logits: np.ndarray) -> list[int]:
        """Return the next ids of the requests in these slots, from logits (R, C)."""
        at = torch.tensor(slots)
        rows = self._sampling[at]
        columns = self._sampler.sample(
            torch.from_numpy(logits),
            at,
            self._positions[at],
            self._keys[at],
            rows.T[:, :, None],  # (R, 7) -> (7, R, 1)
            self._ends[at],
            int(rows[:, SamplingRow._fields.index("top_k")].max()),
        )
        self._positions[at] += 1
        return (columns[:, 0] + self.first).tolist()


def random_key() -> int:
    """Return what selects the random numbers of a request without a seed."""
    return random.getrandbits(32)


def _nucleus(scores: Tensor, max_top_k: int, top_ks: Tensor, top_ps: Tensor, ras: Tensor) -> Tensor:
    """Return the weights (R, C) of the columns that top_k and top_p (R, 1) keep of scores (R, C); 0 for others.

    ras (R, 1): with repetition-aware sampling top_p is a share of the whole distribution, otherwise of the tokens left
    by top_k.
    """
    highest, columns = scores.topk(max_top_k)  # (R, C) -> (R, K), descending
    weights = torch.exp(highest - highest[:, :1]) * (torch.arange(max_top_k, device=scores.device) < top_ks)
    everything = torch.exp(scores - highest[:, :1]).sum(1, keepdim=True)
    whole = torch.where(ras, everything, weights.sum(1, keepdim=True))
    weights = weights * (weights.cumsum(1) - weights < top_ps * whole)
    return torch.zeros_like(scores).scatter(1, columns, weights)


def _pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return columns (R, 1) sampled by weights (R, C) with numbers (R, 1) in [0, 1); the last one if a weight is NaN.

    The sums run in the order of columns, not of weights: near-equal weights may swap ranks when a batch of another size
    rounds differently.
    """
    cumulative = weights.cumsum(1, dtype=torch.float64)
    columns = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return columns.clamp(max=weights.shape[1] - 1)  # an index out of range ends a process that uses CUDA


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Return two random numbers (2, R, 1) in [0, 1), float64, which depend on keys (R,) and positions (R,) only."""
    both = torch.arange(2, device=keys.device)[:, None]
    counters = _mixed(keys + 0x9E3779B9) + 2 * positions + both  # (R,) -> (2, R)
    return (_mixed(counters).double() / 2**32)[:, :, None]


def _mixed(bits: Tensor) -> Tensor:
    """Return a 32-bit hash of each integer: Wellons' "hash prospector", whose factors keep products below 2^63."""
    bits = bits & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return bits ^ (bits >> 15)
