"""The draw of the next token in vLLM: from speech alone, with the learned bias and repetition-aware sampling.

For the engine `vllm`, and for a server: `vllm serve ... --logits-processors common.llm.vllm_logits:SpeechLogits`.
Clients ask as they would without it, and for repetition-aware sampling by `ras_window` and `ras_tau` in `extra_args`
(`vllm_xargs` over HTTP).

vLLM's own sampler goes over the whole vocabulary, of which speech can use a twentieth: it sorts 158,336 logits for each
token, and has no place for the rest. So requests reach it as greedy ones, and what is drawn here is made the likeliest.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from common.llm.checkpoint import speech_bias
from common.llm.interface import Sampling
from common.llm.speech_tokens import LLMTokenizer

ASKED = "speech_sampling"  # in a request's `extra_args`: what was asked for, on its way to the process that samples
NOT_YET = -1  # stands for an id that vLLM has drawn but not read back
NEVER = -2
GRAPH_TOP_K = 64  # the largest top_k of a step that is recorded
INTEGERS = ("top_k", "seed", "min_tokens", "max_tokens", "ras_window")
NOT_OFFERED = ("frequency_penalty", "presence_penalty", "min_p")


class Settings(NamedTuple):
    """Of one request's draws, none of which is a special case: greedy is a top_k of 1."""

    temperature: float
    penalty: float
    top_k: float
    top_p: float
    min_tokens: float

    @classmethod
    def of(cls, sampling: Sampling, top_k: int) -> "Settings":
        return cls(
            sampling.temperature or 1.0,
            sampling.repetition_penalty,
            float(top_k),
            sampling.top_p,
            float(sampling.min_tokens),
        )


@dataclass
class Row:
    """A request of the batch. `slot` is where its state lies on the device, `ids` vLLM's growing list of its tokens."""

    sampling: Sampling
    slot: int
    ids: list[int]

    @property
    def top_k(self) -> int:
        """Of the likeliest; 0 is all of them."""
        return self.sampling.top_k if self.sampling.temperature else 1

    @property
    def aware(self) -> bool:
        """Of repetitions."""
        return bool(self.sampling.ras_window and self.sampling.temperature)

    @property
    def ras_limit(self) -> float:
        """So often among the last tokens, and a token is drawn anew."""
        return self.sampling.ras_window * self.sampling.ras_tau if self.aware else math.inf


class SpeechLogits(LogitsProcessor):
    """Draws as `sampler.TokenSampler` does, on the GPU for the whole batch.

    Ids of speech and of ends lie together: columns `first` to `first + C` of the logits.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Take the sampling over from vLLM, in the process that accepts requests. Raises ValueError, which the sender
        is told, before something wrong reaches the process that serves all of them."""
        params = sampling_params
        for name in NOT_OFFERED:
            if value := getattr(params, name):
                raise ValueError(f"{name} {value}: speech is sampled without it")
        extra = dict(params.extra_args or {})
        asked = extra.pop(ASKED, None)  # already taken over
        if asked is None:
            asked = {
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
            sampling = asdict(Sampling(**asked))
        except TypeError as error:
            raise ValueError(f"{ASKED} {asked}: {error}") from None
        for name in INTEGERS:
            if not isinstance(value := sampling[name], int | None):
                raise ValueError(f"{name} {value!r} is not an integer")
        params.extra_args = extra | {ASKED: sampling}
        params.temperature, params.top_p, params.top_k, params.repetition_penalty = 0.0, 1.0, 0, 1.0
        params.seed, params.min_tokens = None, 0

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        model = vllm_config.model_config
        tokenizer = LLMTokenizer.from_dir(model.model)
        bias = speech_bias(model.model, tokenizer, model.get_vocab_size())
        utterable = np.flatnonzero(np.isfinite(bias))
        self._first = int(utterable[0])
        self._bias = torch.from_numpy(bias[self._first : utterable[-1] + 1]).to(device)
        self._width = width = len(self._bias)  # C
        self._ends = torch.zeros(width, dtype=torch.bool, device=device)
        self._ends[[end - self._first for end in tokenizer.end_ids]] = True
        self._device = device
        self._pinned = is_pin_memory
        self._rows: dict[int, Row] = {}  # by their place in vLLM's batch
        self._batch: list[Row] = []  # in that order
        most = vllm_config.scheduler_config.max_num_seqs
        # Twice as many: a request may begin before the one whose place it takes is forgotten. The last is nobody's.
        slots = 2 * most + 1
        self._free = list(range(slots - 1))
        self._seen = torch.zeros(slots, width, dtype=torch.bool, device=device)  # prompts and what was drawn
        self._drawn = torch.zeros(slots, dtype=torch.long, device=device)  # the last draw's column,
        self._drawn_at = torch.full((slots,), NEVER, device=device)  # and how many tokens there were before it
        # What a step works on, by row, at addresses that stay
        rows = _padded(most)
        self._logits = torch.zeros(rows, width, device=device)
        self._noise = torch.ones(2, rows, width, device=device)
        self._slots = torch.full((rows,), slots - 1, device=device)
        self._positions = torch.zeros(rows, dtype=torch.long, device=device)
        self._settings = torch.ones(len(Settings._fields), rows, 1, device=device)
        self._limits = torch.full((rows, 1), torch.inf, device=device)
        self._chosen = torch.zeros(rows, 1, dtype=torch.long, device=device)  # ids
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if device.type == "cuda":
            self._capture(rows)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow vLLM's batch; what depends on nothing but its requests is put on the device here, once."""
        if not process_dict_updates(self._rows, batch_update, self._begin):
            return
        batch = self._batch = [self._rows[place] for place in sorted(self._rows)]
        used = {row.slot for row in batch}
        nobody = len(self._seen) - 1
        self._free = [slot for slot in range(nobody) if slot not in used]
        rest = _padded(len(batch)) - len(batch)
        settings = [Settings.of(row.sampling, min(row.top_k or self._width, self._width)) for row in batch]
        self._most = max((int(one.top_k) for one in settings), default=0)
        self._aware = any(row.aware for row in batch)
        self._put(self._slots, [row.slot for row in batch] + [nobody] * rest)
        self._put(self._limits[:, 0], [row.ras_limit for row in batch] + [math.inf] * rest)
        for values, target in zip(zip(*settings, strict=True), self._settings[:, :, 0], strict=False):
            self._put(target, list(values))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (B, V) with what is drawn made infinite, in place."""
        if not (count := len(self._batch)):
            return logits
        self._logits[:count] = logits[:, self._first : self._first + self._width]  # (B, V) -> (B, C)
        self._put(self._positions, [len(row.ids) for row in self._batch])
        self._draw_noise(count)
        rows = _padded(count)
        if self._aware or self._most > GRAPH_TOP_K or rows not in self._graphs:
            self._step(rows, self._most)
        else:
            self._graphs[rows].replay()
        return logits.scatter_(1, self._chosen[:count], torch.inf)

    def _step(self, rows: int, most: int) -> None:
        """Draw for the first rows; none of them has a larger top_k than `most`."""
        slots, positions = self._slots[:rows], self._positions[:rows]
        temperatures, penalties, top_ks, top_ps, least = self._settings[:, :rows]  # (R, 1) each
        # The last draw counts only now that its request is a token further: vLLM draws for some what it discards.
        marks = slots * self._width + self._drawn[slots]
        seen = self._seen.view(-1)
        seen[marks] = seen[marks] | (positions == self._drawn_at[slots] + 1)
        scores = self._logits[:rows] + self._bias
        penalised = torch.where(scores > 0, scores / penalties, scores * penalties)
        scores = torch.where(self._seen[slots], penalised, scores) / temperatures
        scores = scores.masked_fill(self._ends & (positions[:, None] < least), -torch.inf)
        drawn = self._draw(scores, most, top_ks, top_ps)
        self._drawn[slots] = drawn.flatten()
        self._drawn_at[slots] = positions
        self._chosen[:rows] = drawn + self._first

    def _draw(self, scores: torch.Tensor, most: int, top_ks: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
        """Scores (R, C) -> columns (R, 1)."""
        noise, limits = self._noise[:, : len(scores)], self._limits[: len(scores)]
        highest, columns = scores.topk(most)  # (R, C) -> (R, K), descending
        weights = torch.exp(highest - highest[:, :1]) * (torch.arange(most, device=self._device) < top_ks)
        whole = weights.sum(1, keepdim=True)
        if self._aware:  # top_p is a share of the whole distribution; elsewhere one of what top_k has left
            everything = torch.exp(scores - highest[:, :1])
            whole = torch.where(limits.isfinite(), everything.sum(1, keepdim=True), whole)
        weights = weights * (weights.cumsum(1) - weights < top_ps * whole)
        # The largest quotient weight / noise is a draw by weight. The noise is a column's, not a rank's: near-equal
        # weights may swap ranks when a batch of another size rounds otherwise.
        drawn = columns.gather(1, (weights / noise[0].gather(1, columns)).argmax(1, keepdim=True))
        if self._aware:
            anew = (everything / noise[1]).argmax(1, keepdim=True)
            drawn = torch.where(self._count(drawn) >= limits, anew, drawn)
        return drawn

    def _draw_noise(self, count: int) -> None:
        """Exponential. A seeded request's depends on its seed and position alone."""
        draws = 2 if self._aware else 1
        self._noise[:draws, :count].exponential_()
        for index, row in enumerate(self._batch):
            if row.sampling.seed is not None:
                generator = torch.Generator(self._device)
                generator.manual_seed((row.sampling.seed << 24) + len(row.ids))
                for draw in range(draws):
                    self._noise[draw, index].exponential_(generator=generator)

    def _count(self, drawn: torch.Tensor) -> torch.Tensor:
        """(R, 1): how often the column drawn (R, 1) is among the last `ras_window` of its request."""
        windows = [row.ids[-row.sampling.ras_window :] if row.aware else [] for row in self._batch]
        windows += [[]] * (len(drawn) - len(windows))
        longest = max(map(len, windows))
        recent = self._tensor([window + [NOT_YET] * (longest - len(window)) for window in windows])  # (R, W)
        return (recent == drawn + self._first).sum(1, keepdim=True)

    def _begin(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> Row:
        slot = self._free.pop()
        self._seen[slot] = False
        self._drawn_at[slot] = NEVER
        columns = [token - self._first for token in (*(prompt_ids or ()), *output_ids)]
        if said := [column for column in columns if 0 <= column < self._width]:
            self._seen[slot].index_fill_(0, self._tensor(said), True)
        asked: dict[str, Any] = (params.extra_args or {})[ASKED]
        return Row(Sampling(**asked), slot, output_ids)

    def _capture(self, most: int) -> None:
        """Record a step for each size of batch: one by one, its kernels take the CPU longer than the GPU."""
        self._aware, pool = False, torch.cuda.graph_pool_handle()
        for rows in sorted({_padded(count) for count in range(1, most + 1)}):
            self._step(rows, GRAPH_TOP_K)
            torch.cuda.synchronize()
            self._graphs[rows] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graphs[rows], pool=pool):
                self._step(rows, GRAPH_TOP_K)

    def _put(self, target: torch.Tensor, values: list[Any]) -> None:
        """Into the first elements of `target`."""
        target[: len(values)].copy_(torch.tensor(values, pin_memory=self._pinned), non_blocking=True)

    def _tensor(self, values: list[Any]) -> torch.Tensor:
        """On the device, without waiting for what it does."""
        return torch.tensor(values, pin_memory=self._pinned).to(self._device, non_blocking=True)


def _padded(rows: int) -> int:
    """Rows that a step computes for so many: a power of two."""
    return 1 << max(0, rows - 1).bit_length()
