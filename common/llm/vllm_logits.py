"""The draw of the next token in vLLM: from speech alone, with the learned bias and repetition-aware sampling.

For the engine `vllm`, and for a server: `vllm serve ... --logits-processors common.llm.vllm_logits:SpeechLogits`.
Clients ask as they would without it, and for repetition-aware sampling by `ras_window` and `ras_tau` in `extra_args`
(`vllm_xargs` over HTTP).

vLLM's own sampler goes over the whole vocabulary, of which speech can use a twentieth: it sorts 158,336 logits for each
token, and has no place for the rest. So requests reach it as greedy ones, and what is drawn here is made the likeliest.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from common.llm.base import Sampling
from common.llm.checkpoint import speech_bias
from common.speech_tokens import LLMTokenizer

ASKED = "speech_sampling"  # in a request's `extra_args`: what was asked for, on its way to the process that samples
NOT_YET = -1  # stands for an id that vLLM has drawn but not read back
NOT_OFFERED = ("frequency_penalty", "presence_penalty", "min_p")


@dataclass
class Row:
    """A request of the batch. `seen`: its row of `SpeechLogits._seen`; `ids`: vLLM's growing list of what was drawn."""

    sampling: Sampling
    seen: int
    ids: list[int]
    unmarked: list[int]
    marked: int = 0  # of `ids`

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

    def news(self) -> list[int]:
        """Ids of the prompt or drawn that this has not told yet."""
        drawn = self.ids[self.marked :]
        drawn = drawn[: drawn.index(NOT_YET)] if NOT_YET in drawn else drawn
        self.marked += len(drawn)
        news, self.unmarked = self.unmarked + drawn, []
        return news


class SpeechLogits(LogitsProcessor):
    """Draws as `sampler.TokenSampler` does, on the GPU for the whole batch; vLLM's `min_tokens` has run before.

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
                "ras_window": extra.pop("ras_window", 0),
                "ras_tau": extra.pop("ras_tau", Sampling.ras_tau),
            }
        try:
            params.extra_args = extra | {ASKED: asdict(Sampling(**asked))}
        except TypeError as error:
            raise ValueError(f"{ASKED} {asked}: {error}") from None
        params.temperature, params.top_p, params.top_k = 0.0, 1.0, 0
        params.repetition_penalty, params.seed = 1.0, None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        model = vllm_config.model_config
        bias = speech_bias(model.model, LLMTokenizer.from_dir(model.model), model.get_vocab_size())
        utterable = np.flatnonzero(np.isfinite(bias))
        self._first = int(utterable[0])
        self._bias = torch.from_numpy(bias[self._first : utterable[-1] + 1]).to(device)  # (C,)
        self._device = device
        self._pinned = is_pin_memory
        self._rows: dict[int, Row] = {}  # by their place in vLLM's batch
        self._batch: list[Row] = []  # in that order
        # Twice the most requests of a batch: one may begin before the one whose place it takes is forgotten.
        most = 2 * vllm_config.scheduler_config.max_num_seqs
        self._seen = torch.zeros(most, len(self._bias), dtype=torch.bool, device=device)
        self._free = list(range(most))

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow vLLM's batch; what depends on nothing but its requests is put on the device here, once."""
        if not process_dict_updates(self._rows, batch_update, self._begin):
            return
        batch = self._batch = [self._rows[place] for place in sorted(self._rows)]
        used = {row.seen for row in batch}
        self._free = [index for index in range(len(self._seen)) if index not in used]
        tops = [min(row.top_k or len(self._bias), len(self._bias)) for row in batch]
        self._most = max(tops, default=0)
        self._within = torch.arange(self._most, device=self._device) < self._column(tops)  # (B, K)
        self._seen_rows = self._tensor([row.seen for row in batch])
        self._penalties = self._column([row.sampling.repetition_penalty for row in batch])
        self._temperatures = self._column([row.sampling.temperature or 1.0 for row in batch])
        self._top_ps = self._column([row.sampling.top_p for row in batch])
        self._limits = self._column([row.ras_limit for row in batch])
        self._penalised = any(row.sampling.repetition_penalty != 1 for row in batch)
        self._aware = any(row.aware for row in batch)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (B, V) with what is drawn made infinite, in place."""
        if not self._batch:
            return logits
        scores = logits[:, self._first : self._first + len(self._bias)] + self._bias  # (B, V) -> (B, C)
        if self._penalised:
            self._mark()
            penalised = torch.where(scores > 0, scores / self._penalties, scores * self._penalties)
            scores = torch.where(self._seen.index_select(0, self._seen_rows), penalised, scores)
        drawn = self._draw(scores / self._temperatures)
        return logits.scatter_(1, drawn + self._first, torch.inf)

    def _draw(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, C) -> columns drawn (B, 1)."""
        highest, columns = scores.topk(self._most)  # (B, C) -> (B, K), descending
        weights = torch.exp(highest - highest[:, :1]) * self._within
        whole = weights.sum(1, keepdim=True)
        if self._aware:  # top_p is a share of the whole distribution; elsewhere one of what top_k has left
            everything = torch.exp(scores - highest[:, :1])
            whole = torch.where(self._limits.isfinite(), everything.sum(1, keepdim=True), whole)
        weights = weights * (weights.cumsum(1) - weights < self._top_ps * whole)
        # By column, not by rank: near-equal weights may swap ranks when a batch of another size rounds otherwise.
        noise = self._noise(scores, draw=0).gather(1, columns)
        drawn = columns.gather(1, (weights / noise).argmax(1, keepdim=True))
        if self._aware:
            anew = (everything / self._noise(scores, draw=1)).argmax(1, keepdim=True)
            drawn = torch.where(self._count(drawn) >= self._limits, anew, drawn)
        return drawn

    def _noise(self, scores: torch.Tensor, draw: int) -> torch.Tensor:
        """(B, C), exponential: the largest quotient weight / noise is a draw by weight.

        A seeded request's depends on its seed and position alone: vLLM draws for some steps what it then discards.
        """
        noise = torch.empty_like(scores).exponential_()
        for index, row in enumerate(self._batch):
            if row.sampling.seed is not None:
                generator = torch.Generator(self._device)
                generator.manual_seed((row.sampling.seed << 24) + 2 * len(row.ids) + draw)
                noise[index].exponential_(generator=generator)
        return noise

    def _count(self, drawn: torch.Tensor) -> torch.Tensor:
        """(B, 1): how often the column drawn (B, 1) is among the last `ras_window` of its request."""
        windows = [row.ids[-row.sampling.ras_window :] if row.aware else [] for row in self._batch]
        longest = max(map(len, windows))
        recent = self._tensor([window + [NOT_YET] * (longest - len(window)) for window in windows])  # (B, W)
        return (recent == drawn + self._first).sum(1, keepdim=True)

    def _mark(self) -> None:
        """Note in `_seen` what was drawn since the last step, and the prompts of new requests."""
        width = len(self._bias)
        marks = [
            row.seen * width + column
            for row in self._batch
            for token in row.news()
            if 0 <= (column := token - self._first) < width
        ]
        if marks:
            self._seen.view(-1).index_fill_(0, self._tensor(marks), True)

    def _begin(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> Row:
        seen = self._free.pop()
        self._seen[seen] = False
        asked: dict[str, Any] = (params.extra_args or {})[ASKED]
        return Row(Sampling(**asked), seen, output_ids, list(prompt_ids or ()))

    def _column(self, values: list[Any]) -> torch.Tensor:
        """One value for each row: (B, 1)."""
        return self._tensor(values)[:, None]

    def _tensor(self, values: list[Any]) -> torch.Tensor:
        """On the device, without waiting for what it does."""
        return torch.tensor(values, pin_memory=self._pinned).to(self._device, non_blocking=True)
