"""Sampling of the next token in vLLM: speech and end tokens only, with learned bias and repetition-aware sampling.

Used by the engine `vllm` and by servers: `vllm serve ... --logits-processors common.llm.vllm_logits:SpeechLogits`.
Clients send the usual sampling values, and `ras_window` and `ras_tau` for repetition-aware sampling in `extra_args`
(`vllm_xargs` over HTTP).

vLLM's own sampler sorts all 158,336 logits for each token, although speech uses only a twentieth of the vocabulary, and
it supports neither the bias nor repetition-aware sampling. So requests reach it as greedy ones, and the token sampled
here gets an infinite logit.
"""

import random
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from common.llm.checkpoint import speech_bias
from common.llm.interface import MAX_RAS_WINDOW, Sampling
from common.llm.speech_tokens import LLMTokenizer

SAMPLING_KEY = "speech_sampling"  # of a request's `extra_args`: passes its sampling to the process that samples
RECENT = MAX_RAS_WINDOW + 1  # sampled tokens that are kept of each request: a window, and the one that is being sampled
NONE = -1  # no token
GRAPH_TOP_K = 64  # the largest top_k of a step that is captured as a CUDA graph
INTEGERS = ("top_k", "seed", "min_tokens", "max_tokens", "ras_window")
UNSUPPORTED = ("frequency_penalty", "presence_penalty", "min_p")


class SamplingRow(NamedTuple):
    """One request's sampling as numbers; no value is a special case: greedy is a top_k of 1, no RAS a window of 0."""

    temperature: float
    penalty: float
    top_k: float
    top_p: float
    min_tokens: float
    ras_window: float
    ras_limit: float

    @classmethod
    def of(cls, sampling: Sampling, width: int) -> "SamplingRow":
        """`width`: the number of tokens that can be sampled."""
        greedy = sampling.temperature == 0
        return cls(
            1.0 if greedy else sampling.temperature,
            sampling.repetition_penalty,
            1.0 if greedy else float(min(sampling.top_k or width, width)),
            sampling.top_p,
            float(sampling.min_tokens),
            0.0 if greedy else float(sampling.ras_window),
            float(sampling.ras_limit),
        )


@dataclass
class BatchEntry:
    """A request of the batch. `slot`: index of its state on the device; `ids`: vLLM's growing list of its tokens.

    `key`: selects its random numbers; its seed, if it has one.
    """

    sampling: Sampling
    slot: int
    key: int
    ids: list[int]


class SpeechLogits(LogitsProcessor):
    """Samples like `sampler.TokenSampler`, on the GPU for the whole batch.

    The ids of speech and end tokens are consecutive: columns `first` to `first + C` of the logits.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Move the sampling values to `extra_args`, in the process that accepts requests.

        Raises ValueError, which the client receives, before an invalid value reaches the process that serves all
        requests.
        """
        params = sampling_params
        for name in UNSUPPORTED:
            if value := getattr(params, name):
                raise ValueError(f"{name} {value} is not supported for speech")
        extra = dict(params.extra_args or {})
        given = extra.pop(SAMPLING_KEY, None)  # present if vLLM validates twice
        if given is None:
            given = {
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": max(0, params.top_k),
                "repetition_penalty": params.repetition_penalty,
                "seed": params.seed,
                "min_tokens": params.min_tokens,
                "max_tokens": params.max_tokens or Sampling.max_tokens,
                "ras_window": extra.pop("ras_window", 0),
                "ras_tau": extra.pop("ras_tau", Sampling.ras_tau),
            }
        try:
            sampling = asdict(Sampling(**given))
        except TypeError as error:
            raise ValueError(f"{SAMPLING_KEY} {given}: {error}") from None
        for name in INTEGERS:
            if not isinstance(value := sampling[name], int | None):
                raise ValueError(f"{name} {value!r} is not an integer")
        params.extra_args = extra | {SAMPLING_KEY: sampling}
        params.temperature, params.top_p, params.top_k, params.repetition_penalty = 0.0, 1.0, 0, 1.0
        params.seed, params.min_tokens = None, 0

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        model = vllm_config.model_config
        tokenizer = LLMTokenizer.from_dir(model.model)
        bias = speech_bias(model.model, tokenizer, model.get_vocab_size())
        candidates = np.flatnonzero(np.isfinite(bias))
        self._first = int(candidates[0])
        self._bias = torch.from_numpy(bias[self._first : candidates[-1] + 1]).to(device)
        self._width = width = len(self._bias)  # C
        self._ends = torch.zeros(width, dtype=torch.bool, device=device)
        self._ends[[end - self._first for end in tokenizer.end_ids]] = True
        self._device = device
        self._pinned = is_pin_memory
        self._entries: dict[int, BatchEntry] = {}  # by index in vLLM's batch
        self._batch: list[BatchEntry] = []  # in that order
        max_requests = vllm_config.scheduler_config.max_num_seqs
        # Twice as many: a request may be added before the one that it replaces is removed. The last slot is scratch:
        # padding rows write to it.
        slots = 2 * max_requests + 1
        self._free = list(range(slots - 1))
        self._seen = torch.zeros(slots, width, dtype=torch.bool, device=device)  # tokens of the prompt and sampled ones
        # The columns sampled last, each at its position in the answer modulo the size. vLLM discards some tokens: then
        # the position stays the same, and the next column takes the place of the discarded one.
        self._recent = torch.full((slots, RECENT), NONE, device=device)
        self._keys_of_unseeded = random.Random()  # not the module's generator, which vLLM seeds
        # Inputs and outputs of a step, by row, at fixed addresses for the CUDA graphs
        rows = _padded(max_requests)
        self._logits = torch.zeros(rows, width, device=device)
        self._slots = torch.full((rows,), slots - 1, device=device)
        self._keys = torch.zeros(rows, dtype=torch.long, device=device)
        self._positions = torch.zeros(rows, dtype=torch.long, device=device)
        self._sampling = torch.ones(len(SamplingRow._fields), rows, 1, device=device)
        self._chosen = torch.zeros(rows, 1, dtype=torch.long, device=device)  # ids
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if device.type == "cuda":
            self._capture(rows)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow changes of vLLM's batch, and copy what depends only on its requests to the device."""
        if not process_dict_updates(self._entries, batch_update, self._add):
            return
        batch = self._batch = [self._entries[index] for index in sorted(self._entries)]
        used = {row.slot for row in batch}
        scratch = len(self._seen) - 1
        self._free = [slot for slot in range(scratch) if slot not in used]
        padding = _padded(len(batch)) - len(batch)
        sampling = [SamplingRow.of(row.sampling, self._width) for row in batch]
        self._max_top_k = max((int(each.top_k) for each in sampling), default=0)
        self._copy(self._slots, [row.slot for row in batch] + [scratch] * padding)
        self._copy(self._keys, [row.key for row in batch])
        for values, target in zip(zip(*sampling, strict=True), self._sampling[:, :, 0], strict=False):
            self._copy(target, list(values))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (B, V); the logit of each sampled token is set to infinity, in place."""
        if not (count := len(self._batch)):
            return logits
        self._logits[:count] = logits[:, self._first : self._first + self._width]  # (B, V) -> (B, C)
        self._copy(self._positions, [len(row.ids) for row in self._batch])
        rows = _padded(count)
        if self._max_top_k > GRAPH_TOP_K or rows not in self._graphs:
            self._step(rows, self._max_top_k)
        else:
            self._graphs[rows].replay()
        return logits.scatter_(1, self._chosen[:count], torch.inf)

    def _step(self, rows: int, max_top_k: int) -> None:
        """Sample for the first rows, whose top_k is at most `max_top_k`.

        Must not branch on the content of the batch, because a CUDA graph repeats it for other batches.
        """
        slots, positions = self._slots[:rows], self._positions[:rows]
        temperatures, penalties, top_ks, top_ps, min_tokens, windows, limits = self._sampling[:, :rows]  # (R, 1) each
        last = self._recent[slots, (positions - 1) % RECENT]
        marks = slots * self._width + last.clamp(min=0)
        seen = self._seen.view(-1)
        seen[marks] = seen[marks] | (last != NONE)
        scores = self._logits[:rows] + self._bias
        penalised = torch.where(scores > 0, scores / penalties, scores * penalties)
        scores = torch.where(self._seen[slots], penalised, scores) / temperatures
        scores = scores.masked_fill(self._ends & (positions[:, None] < min_tokens), -torch.inf)
        first, second = _uniforms(self._keys[:rows], positions)
        sampled = _pick(_nucleus(scores, max_top_k, top_ks, top_ps, windows > 0), first)
        # Repetition-aware sampling: the token is replaced by any other one if the window holds it too often.
        ages = (positions[:, None] - 1 - torch.arange(RECENT, device=self._device)) % RECENT  # 0: the last token
        repeats = (self._recent[slots] == sampled) & (ages < windows)  # (R, RECENT)
        others = scores.scatter(1, sampled, -torch.inf)
        other = _pick(torch.exp(others - others.amax(1, keepdim=True)), second)
        columns = torch.where(repeats.sum(1, keepdim=True) >= limits, other, sampled)
        self._recent[slots, positions % RECENT] = columns.flatten()
        self._chosen[:rows] = columns + self._first

    def _add(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> BatchEntry:
        slot = self._free.pop()
        self._seen[slot] = False
        columns = [token - self._first for token in (*(prompt_ids or ()), *output_ids)]
        if seen := [column for column in columns if 0 <= column < self._width]:
            self._seen[slot].index_fill_(0, self._tensor(seen), True)
        recent = [NONE] * RECENT
        for position in range(max(0, len(output_ids) - MAX_RAS_WINDOW), len(output_ids)):
            recent[position % RECENT] = max(NONE, output_ids[position] - self._first)
        self._copy(self._recent[slot], recent)
        sampling = Sampling(**(params.extra_args or {})[SAMPLING_KEY])
        key = self._keys_of_unseeded.getrandbits(32) if sampling.seed is None else sampling.seed
        return BatchEntry(sampling, slot, key, output_ids)

    def _capture(self, max_rows: int) -> None:
        """Capture a step for each batch size: launching its kernels one by one takes longer than running them."""
        pool = torch.cuda.graph_pool_handle()
        for rows in sorted({_padded(count) for count in range(1, max_rows + 1)}):
            self._step(rows, GRAPH_TOP_K)
            torch.cuda.synchronize()
            self._graphs[rows] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graphs[rows], pool=pool):
                self._step(rows, GRAPH_TOP_K)

    def _copy(self, target: torch.Tensor, values: list[Any]) -> None:
        """Copy `values` to the first elements of `target`."""
        target[: len(values)].copy_(torch.tensor(values, pin_memory=self._pinned), non_blocking=True)

    def _tensor(self, values: list[Any]) -> torch.Tensor:
        """`values` on the device, without synchronizing with it."""
        return torch.tensor(values, pin_memory=self._pinned).to(self._device, non_blocking=True)


def _padded(rows: int) -> int:
    """The number of rows that a step computes: a power of two."""
    return 1 << max(0, rows - 1).bit_length()


def _nucleus(
    scores: torch.Tensor, max_top_k: int, top_ks: torch.Tensor, top_ps: torch.Tensor, ras: torch.Tensor
) -> torch.Tensor:
    """Scores (R, C) -> weights (R, C) of the columns that top_k and top_p (R, 1) keep, 0 for others.

    ras (R, 1): with it, top_p is a share of the whole distribution; otherwise of the tokens left by top_k.
    """
    highest, columns = scores.topk(max_top_k)  # (R, C) -> (R, K), descending
    weights = torch.exp(highest - highest[:, :1]) * (torch.arange(max_top_k, device=scores.device) < top_ks)
    everything = torch.exp(scores - highest[:, :1]).sum(1, keepdim=True)
    whole = torch.where(ras, everything, weights.sum(1, keepdim=True))
    weights = weights * (weights.cumsum(1) - weights < top_ps * whole)
    return torch.zeros_like(scores).scatter(1, columns, weights)


def _pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Weights (R, C), numbers (R, 1) in [0, 1) -> columns (R, 1), sampled by weight; the last one if a weight is NaN.

    In order of columns, not of weights, as by `sampler.TokenSampler`: near-equal weights may swap ranks when a batch of
    another size rounds differently.
    """
    cumulative = weights.cumsum(1, dtype=torch.float64)
    columns = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return columns.clamp(max=weights.shape[1] - 1)  # an index out of range ends a process that uses CUDA


def _uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Keys (R,) and positions (R,) -> two numbers (2, R, 1) in [0, 1), float64, which depend on nothing else."""
    draws = torch.arange(2, device=keys.device)[:, None]
    counters = _mixed(keys + 0x9E3779B9) + 2 * positions + draws  # (R,) -> (2, R)
    return (_mixed(counters).double() / 2**32)[:, :, None]


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """A 32-bit hash, for each of the integers: Wellons' "hash prospector", whose factors keep products below 2^63."""
    bits = bits & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return bits ^ (bits >> 15)
