"""Sampling of the next token in vLLM: speech and end tokens only, with learned bias and repetition-aware sampling.

Used by the engine `vllm` and by servers: `vllm serve ... --logits-processors
cosyvoice_triton.llm.vllm_logits:SpeechLogits`.
Clients send the usual sampling values, and `ras_window` and `ras_tau` for repetition-aware sampling in `extra_args`
(`vllm_xargs` over HTTP).

vLLM's own sampler sorts all 158,336 logits for each token, although speech uses only a twentieth of the vocabulary, and
it supports neither the bias nor repetition-aware sampling. So requests reach it as greedy ones, and the token sampled
here gets an infinite logit.
"""

import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from cosyvoice_triton.llm.checkpoint import speech_bias
from cosyvoice_triton.llm.interface import Sampling
from cosyvoice_triton.llm.sampler import BatchSampler, SamplingRow
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer

SAMPLING_KEY = "speech_sampling"  # of a request's `extra_args`: passes its sampling to the process that samples
GRAPH_TOP_K = 64  # the largest top_k of a step that is captured as a CUDA graph
INTEGERS = ("top_k", "seed", "min_tokens", "max_tokens", "ras_window")
UNSUPPORTED = ("frequency_penalty", "presence_penalty", "min_p")


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
    """Samples with `BatchSampler`, on the GPU for the whole batch.

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
        speech = torch.from_numpy(bias[self._first : candidates[-1] + 1]).to(device)
        self._width = width = len(speech)  # C
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
        self._scratch = slots - 1
        self._sampler = BatchSampler(speech, slots)
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
        self._free = [slot for slot in range(self._scratch) if slot not in used]
        padding = _padded(len(batch)) - len(batch)
        sampling = [SamplingRow.of(row.sampling, self._width) for row in batch]
        self._max_top_k = max((int(each.top_k) for each in sampling), default=0)
        self._copy(self._slots, [row.slot for row in batch] + [self._scratch] * padding)
        self._copy(self._keys, [row.key for row in batch])
        for values, target in zip(zip(*sampling, strict=True), self._sampling[:, :, 0], strict=False):
            self._copy(target, list(values))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Sample, and set the logit of each sampled token in logits (B, V) to infinity, in place."""
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
        columns = self._sampler.sample(
            self._logits[:rows],
            self._slots[:rows],
            self._positions[:rows],
            self._keys[:rows],
            self._sampling[:, :rows],
            self._ends,
            max_top_k,
        )
        self._chosen[:rows] = columns + self._first

    def _add(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> BatchEntry:
        slot = self._free.pop()
        sampled = [token - self._first for token in output_ids]
        self._sampler.resume(slot, [token - self._first for token in prompt_ids or ()], sampled)
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
        target[: len(values)].copy_(torch.tensor(values, pin_memory=self._pinned), non_blocking=True)


def _padded(rows: int) -> int:
    """Return the number of rows that a step computes, a power of two."""
    return 1 << max(0, rows - 1).bit_length()
