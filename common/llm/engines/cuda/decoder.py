"""The state of all requests on the device, and the two functions that change it: prefill and step."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.device import on_device
from common.llm.batch_sampler import BatchSampler, SamplingRow
from common.llm.engines.cuda.graphs import SizedGraphs
from common.llm.engines.cuda.operations import CONSECUTIVE, PAGE, Operations, Places
from common.llm.engines.cuda.pages import SCRATCH
from common.llm.engines.cuda.scheduler import FAULT, NOTHING, PromptPiece
from common.llm.engines.cuda.weights import Weights
from common.llm.engines.interface import GenerationRequest

RING = 16  # steps whose tokens are kept on the device until they are copied


class DeviceBurst(NamedTuple):
    """Tokens of some steps, on their way to the host."""

    ring: Tensor
    steps: list[int]  # their places in the ring
    rows: int
    arrived: torch.cuda.Event | None

    def columns(self) -> np.ndarray:
        """(steps, rows): columns, NOTHING or FAULT. Waits until the steps have been computed."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.ring.numpy()[self.steps, : self.rows]


class Decoder:
    """Up to `slots` requests with keys and values in `pages` pages. Owned by one thread.

    max_prefill: tokens of a prefill at most. graphs: both functions are captured as CUDA graphs, one for each size.
    """

    def __init__(
        self, weights: Weights, operations: Operations, slots: int, pages: int, max_prefill: int, *, graphs: bool
    ) -> None:
        self._weights, self._operations, self._scratch = weights, operations, slots
        self.max_prefill, self.first = max_prefill, weights.first
        sizes, device = weights.sizes, weights.embedding.device
        self._device = device
        shape = (sizes.layers, pages, sizes.kv_heads, PAGE, sizes.head_dim)
        self._keys = torch.zeros(shape, dtype=weights.embedding.dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        width, rows = len(weights.bias), slots + 1  # the last slot is for rows without a request
        self._tables = self._integers(rows, -(-sizes.context // PAGE)).fill_(SCRATCH)
        # By slot
        self._numbers = self._integers(rows, 5)
        # Id of the last token, which the next step computes; tokens before it; tokens of the answer; the most of these
        self._last, self._lengths, self._drawn, self._most, self._seeds = self._numbers.T
        self._ended = torch.ones(rows, dtype=torch.bool, device=device)
        self._ends = torch.zeros(rows, width, dtype=torch.bool, device=device)
        self._end_ids: dict[int, tuple[int, ...]] = {}  # what that has of each slot
        self._sampling = torch.ones(rows, len(SamplingRow._fields), device=device)
        self._sampler = BatchSampler(weights.bias, rows)
        # Inputs and outputs at fixed addresses
        self._batch = self._integers(slots).fill_(self._scratch)
        self._prompts = self._integers(3, max_prefill)  # ids, slots, positions
        self._ring = torch.zeros(RING, slots, dtype=torch.int32, device=device)
        self._steps = self._integers(1)  # on the device; `_launched` counts the same on the host
        self._launched = 0
        self._run_step: Callable[[int], None] = self._step
        self._run_prefill: Callable[[int], None] = self._prefill
        if graphs:
            batches = set(map(self._padded_rows, range(1, slots + 1)))
            self._run_step = SizedGraphs(self._step, batches, "steps of the LLM").run
            prefills = set(map(self._padded_tokens, range(1, max_prefill + 1)))
            self._run_prefill = SizedGraphs(self._prefill, prefills, "prompts of the LLM").run
            self._steps.zero_()  # the graphs have been tried

    def place(self, pages: Mapping[int, Sequence[int]]) -> None:
        """Give slots their pages, for the prefills of requests."""
        rows = np.full((len(pages), 1 + max(map(len, pages.values()))), SCRATCH)  # a slot, and its pages
        for row, (slot, of_slot) in zip(rows, pages.items(), strict=True):
            row[0], row[1 : 1 + len(of_slot)] = slot, of_slot
        slots, tables = on_device(rows, self._device).split([1, rows.shape[1] - 1], dim=1)
        self._tables[:, : tables.shape[1]].index_copy_(0, slots[:, 0], tables)

    def start(self, requests: Mapping[int, GenerationRequest]) -> None:
        """Put requests into their slots, to be in the batch of the next steps: all their tokens but the last one are
        prefilled. Apart from `place`, because the GPU computes the prefill meanwhile; together, because each operation
        takes the host as long for one as for many."""
        numbers, sampling = [], []
        for slot, request in requests.items():
            self._end_by(slot, request.end_ids)
            ids, seed = request.input_ids, request.sampling.seed
            seed = random.getrandbits(32) if seed is None else seed
            numbers.append((slot, ids[-1], len(ids) - 1, 0, request.sampling.max_tokens, seed))
            sampling.append(SamplingRow.of(request.sampling, self._ends.shape[1]))
        # One copy to the device for both: the bits of the floats travel as integers.
        together = np.hstack([np.array(numbers, np.int64), np.array(sampling, np.float64).view(np.int64)])
        integers, floats = on_device(together, self._device).split([len(numbers[0]), len(sampling[0])], dim=1)
        slots = integers[:, 0]
        self._numbers.index_copy_(0, slots, integers[:, 1:])
        self._sampling.index_copy_(0, slots, floats.view(torch.float64).float())
        self._ended.index_fill_(0, slots, False)
        self._sampler.start({slot: np.asarray(request.input_ids) - self.first for slot, request in requests.items()})

    def _end_by(self, slot: int, ids: tuple[int, ...]) -> None:
        """Set the end tokens of a slot, which nearly all requests have in common."""
        if self._end_ids.get(slot) == ids:
            return
        ends = np.zeros(self._ends.shape[1], bool)
        ends[[end - self.first for end in ids if 0 <= end - self.first < len(ends)]] = True
        self._ends[slot] = on_device(ends, self._device)
        self._end_ids[slot] = ids

    def prefill(self, pieces: Sequence[PromptPiece]) -> None:
        """Write the keys and values of these tokens, which are at most `max_prefill` with the padding of each piece."""
        columns, count = np.zeros((3, self.max_prefill), np.int64), 0  # ids, slots, positions
        columns[1] = self._scratch
        for slot, begin, ids in pieces:
            piece = slice(count, count + len(ids))
            columns[0, piece], columns[1, piece], columns[2, piece] = ids, slot, begin + np.arange(len(ids))
            count += -(-len(ids) // CONSECUTIVE) * CONSECUTIVE
        size = self._padded_tokens(count)
        self._prompts[:, :size] = on_device(columns[:, :size], self._device)
        self._run_prefill(size)

    def select(self, slots: Sequence[int]) -> None:
        """The batch of the next steps."""
        rows = self._padded_rows(len(slots))
        filled = [*slots, *[self._scratch] * (rows - len(slots))]
        self._batch[:rows] = on_device(filled, self._device)

    def step(self, rows: int, count: int) -> DeviceBurst:
        """Launch `count` steps of the selected batch, which has that many rows."""
        assert count <= RING
        for _ in range(count):
            self._run_step(self._padded_rows(rows))
        steps = [(self._launched + i) % RING for i in range(count)]
        self._launched += count
        if self._device.type != "cuda":
            return DeviceBurst(self._ring.clone(), steps, rows, None)
        copy = torch.empty_like(self._ring, device="cpu", pin_memory=True).copy_(self._ring, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return DeviceBurst(copy, steps, rows, arrived)

    def spoil(self, page: int) -> None:
        """Make keys and values of a page numbers that are not finite, as a fault of the GPU would."""
        self._keys[:, page] = torch.nan
        self._values[:, page] = torch.nan

    def _prefill(self, count: int) -> None:
        ids, slots, positions = self._prompts[:, :count]
        self._hidden(ids, slots, positions, CONSECUTIVE)

    def _step(self, rows: int) -> None:
        """One token of each of the first rows of the batch. Must not branch on values of the device."""
        batch = self._batch[:rows]
        slots = batch.masked_fill(self._ended[batch], self._scratch)
        lengths, drawn = self._lengths[slots], self._drawn[slots]
        x = self._hidden(self._last[slots], slots, lengths, 1)
        logits = self._operations.head(x, self._weights.head, self._weights.sizes.eps)
        broken = ~(logits + self._weights.bias).amax(1).isfinite()
        columns = self._operations.draw(
            logits, self._sampler, slots, drawn, self._seeds[slots], self._sampling[slots], self._ends
        )
        idle = slots == self._scratch
        stops = self._ends[slots, columns]
        self._last[slots] = (columns + self.first).masked_fill(idle, 0)
        self._lengths[slots] = (lengths + 1).masked_fill(idle, 0)
        self._drawn[slots] = (drawn + 1).masked_fill(idle, 0)
        self._ended[slots] = idle | broken | stops | (drawn + 1 >= self._most[slots])
        told = columns.masked_fill(broken, FAULT).masked_fill(idle, NOTHING)
        self._ring[:, :rows].index_copy_(0, self._steps % RING, told[None].int())
        self._steps += 1

    def _hidden(self, ids: Tensor, slots: Tensor, positions: Tensor, consecutive: int) -> Tensor:
        """Ids (T,) in these slots (T,) at these positions (T,) -> (T, hidden), not normalised"""
        weights, operations, eps = self._weights, self._operations, self._weights.sizes.eps
        places = Places(slots, positions, self._keys, self._values, self._tables, weights.rotary, consecutive)
        x = weights.embedding[ids].float()
        for index, layer in enumerate(weights.layers):
            q = operations.project_heads(x, layer.qkv, layer.qkv_bias, eps, places, index)
            operations.project_add(operations.attend(q, places, index), layer.out, x)
            operations.project_add(operations.gated(x, layer.gate_up, eps), layer.down, x)
        return x

    def _padded_rows(self, rows: int) -> int:
        return min(padded_rows(rows), self._scratch)

    def _padded_tokens(self, tokens: int) -> int:
        return min(padded_tokens(tokens), self.max_prefill)

    def _integers(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.long, device=self._device)


def padded_rows(rows: int) -> int:
    """The next power of two up to 32, beyond it the next multiple of 32."""
    return 1 << (rows - 1).bit_length() if rows <= 32 else -(-rows // 32) * 32


def padded_tokens(tokens: int) -> int:
    """The next multiple of 64 up to 1,024, beyond it the next multiple of 256: the more tokens, the less padding costs,
    and each size is a CUDA graph."""
    multiple = 64 if tokens <= 1024 else 256
    return -(-tokens // multiple) * multiple
