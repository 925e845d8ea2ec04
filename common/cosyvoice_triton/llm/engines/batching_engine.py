"""Continuous batching: one thread steps all live requests of a model; each may join and leave at any step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cosyvoice_triton.errors import is_fatal
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.engines.threaded_engine import Generation, OnTokens, ThreadedEngine
from cosyvoice_triton.llm.interface import FinishReason, TokenChunk
from cosyvoice_triton.llm.sampler import RequestSampler
from cosyvoice_triton.monitoring import faults
from cosyvoice_triton.profiles import LLMNumbers


@dataclass(eq=False, kw_only=True)
class RowGeneration(Generation):
    """A request that is computed in a row of the model's cache. slot: of the sampler."""

    slot: int = -1
    generated: int = 0
    length: int = 0  # tokens in its row of the cache
    last_token: int = -1


class BatchingEngine(ThreadedEngine[RowGeneration]):
    """Requests in the rows of one model's cache: a request's index in the list of rows is its row."""

    def __init__(self, model: Any, bias: np.ndarray, max_requests: int, numbers: LLMNumbers) -> None:
        """Make the engine. model: as `genai.GenAIModel`. bias (vocabulary,): added to the logits; minus infinity for
        ids that are never sampled."""
        self._model = model
        self._sampler = RequestSampler(torch.from_numpy(bias), max_requests)
        begin = self._sampler.first - int(model.logit_ids[0])
        self._columns = slice(begin, begin + self._sampler.width)  # of the logits
        self._free_slots = list(range(max_requests))
        super().__init__(max_requests, [], numbers)

    def _accept(self, request: GenerationRequest, on_tokens: OnTokens) -> RowGeneration:
        request.check(self._model.vocab_size, self._model.context)
        return RowGeneration(request, on_tokens)

    def step(self) -> float:
        self._prefill_one()
        self._wake_readers()  # the first token does not wait for the others' next ones
        self._decode_all()
        return 0.0

    def _prefill_one(self) -> None:
        """Prefill the oldest waiting request. One per step, so that many arrivals do not stall running streams."""
        with self._wake:
            while self._waiting and self._waiting[0].cancelled:
                self._waiting.popleft()
            # A cancelled request may occupy a row until the next decoding step.
            if not self._waiting or len(self._rows) == self._max_requests:
                return
            generation = self._waiting.popleft()
            self._rows.append(generation)
        generation.slot = self._free_slots.pop()
        self._sampler.start(generation.slot, generation.request)
        input_ids = generation.request.input_ids
        row = len(self._rows) - 1
        try:
            logits = self._model.prefill(row, input_ids)
        except Exception as error:
            if is_fatal(error):
                raise
            self._drop(row, error)
            return
        generation.length = len(input_ids)
        self._advance([row], logits[None])

    def _decode_all(self) -> None:
        for row in reversed(range(len(self._rows))):
            if self._rows[row].cancelled:
                self._release(row)
        if not self._rows:
            return
        for generation in self._rows:
            generation.length += 1
        tokens = np.array([generation.last_token for generation in self._rows])
        lengths = np.array([generation.length for generation in self._rows])
        logits = self._model.decode(tokens, lengths)  # (B, V)
        if faults.take("llm_thread"):
            raise SystemExit("a fault of a test")  # no Exception: the thread must not end in silence
        if faults.take("nan_logits"):
            logits[0] = np.nan
        self._advance(range(len(self._rows)), logits)

    def _advance(self, rows: Sequence[int], logits: np.ndarray) -> None:
        """Sample the next token of these rows, from logits (R, V), and report it."""
        scores = logits[:, self._columns]
        finite = np.isfinite(scores.max(1))  # NaN, too
        tokens = self._sampler.sample([self._rows[row].slot for row in rows], scores)
        # From the last row down: a release moves the last row into the gap, and that row has been advanced already.
        for row, token, good in reversed(list(zip(rows, tokens, finite, strict=True))):
            if good:
                self._report(row, token)
            else:
                self._drop(row, FloatingPointError("the LLM's logits are not finite"))

    def _report(self, row: int, token: int) -> None:
        """Report a row's next token; free the row if its request has finished."""
        generation = self._rows[row]
        request = generation.request
        generation.last_token = token
        generation.generated += 1
        finish: FinishReason | None = None
        if token in request.end_ids:
            finish = "stop"
        elif generation.generated == request.sampling.max_tokens:
            finish = "length"
        if finish or generation.cancelled:
            self._release(row)  # before the end is reported: the caller may submit the next request at once
        generation.report(TokenChunk([token], finish))

    def _release(self, row: int) -> None:
        """Free a row: the only place where a request leaves the batch. The last row moves into the gap."""
        last = len(self._rows) - 1
        if row != last:
            self._model.move(last, row, self._rows[last].length)
        self._free_slots.append(self._rows[row].slot)
        with self._wake:
            self._rows[row] = self._rows[last]
            self._rows.pop()

    def _drop(self, row: int, error: Exception) -> None:
        """End a request that cannot go on; the others are not affected."""
        generation = self._rows[row]
        self._release(row)
        generation.report(error)
        generation.cancel()
