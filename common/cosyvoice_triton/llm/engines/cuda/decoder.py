"""The state of all requests on the device, and the two functions that change it: prefill and decode step."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from cosyvoice_triton.device import new_stream, on_device
from cosyvoice_triton.llm.engines.cuda.operations import (
    CONSECUTIVE,
    PAGE,
    RING_STEPS,
    SCRATCH_PAGE,
    AttentionMetadata,
    Plain,
    PromptPiece,
    Requests,
    Residual,
)
from cosyvoice_triton.llm.engines.cuda.weights import Weights
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.sampler import SamplingRow, random_key


class SizedGraphs:
    """One function of a batch size as CUDA graphs, one for each size.

    The function reads and writes tensors that it owns, whose contents change between replays. One replay runs at a
    time.
    """

    def __init__(self, function: Callable[[int], None], sizes: Iterable[int], name: str) -> None:
        """Capture `function` for these sizes. `name` is shown while they are captured."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool, device = torch.cuda.graph_pool_handle(), torch.cuda.current_device()
        stream = new_stream(device, urgent=True)  # every listener waits for tokens; token2wav's batches are long
        # Largest first: the smaller ones then fit into the memory that its graph took.
        for size in tqdm(sorted(sizes, reverse=True), desc=f"capturing {name}", unit="graph"):
            function(size)  # compiles and loads its kernels
            torch.cuda.synchronize()
            graph = self._graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                function(size)

    def run(self, size: int) -> None:
        """Launch the graph of this size. KeyError if it was not captured."""
        self._graphs[size].replay()


class DeviceSteps(NamedTuple):
    """Steps that were launched, and the copy of their results that is on its way to the host."""

    ring: Tensor  # a copy of the ring buffer
    steps: list[int]  # their rows in it
    rows: int
    copied: torch.cuda.Event | None  # None on a CPU, where it is a copy already

    def columns(self) -> np.ndarray:
        """Return (steps, rows) columns, NOTHING or FAULT. Waits until the steps have been computed."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.ring.numpy()[self.steps, : self.rows]


class Decoder:
    """The network with up to `slots` requests, whose keys and values are in `pages` pages. One thread owns it. It
    launches work, and the device computes it in the order of the launches.

    max_prefill: the most tokens of one prefill, each piece padded to a multiple of CONSECUTIVE. first: id of column 0
    of the logits. graphs: both functions are captured as CUDA graphs for every size.
    """

    def __init__(
        self, weights: Weights, operations: Plain, slots: int, pages: int, max_prefill: int, *, graphs: bool
    ) -> None:
        self._weights, self._operations, self._scratch = weights, operations, slots
        self.max_prefill, self.first = max_prefill, weights.first
        sizes, device = weights.sizes, weights.embedding.device
        self._device = device
        shape = (sizes.layers, pages, sizes.kv_heads, PAGE, sizes.head_dim)
        self._keys = torch.zeros(shape, dtype=weights.embedding.dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        # The last slot is for rows without a request.
        self._block_tables = self._integers(slots + 1, -(-sizes.context // PAGE)).fill_(SCRATCH_PAGE)
        self._requests = Requests(weights.bias, self.first, slots)
        self._end_ids: dict[int, tuple[int, ...]] = {}  # what it has of each slot
        # Inputs at fixed addresses
        self._batch = self._integers(slots).fill_(self._scratch)
        self._prompts = self._integers(3, max_prefill)  # ids, slots, positions
        self._launched = 0  # steps: what the device counts, too
        self._prefilled: deque[torch.cuda.Event] = deque(maxlen=2)  # of the latest prefills
        self._run_step: Callable[[int], None] = self._step
        self._run_prefill: Callable[[int], None] = self._prefill
        if graphs:
            batches = set(map(self._padded_rows, range(1, slots + 1)))
            self._run_step = SizedGraphs(self._step, batches, "steps of the LLM").run
            prefills = set(map(self._padded_tokens, range(1, max_prefill + 1)))
            self._run_prefill = SizedGraphs(self._prefill, prefills, "prompts of the LLM").run
            self._requests.steps.zero_()  # the graphs have been tried

    def set_block_tables(self, pages: Mapping[int, Sequence[int]]) -> None:
        """Give slots their pages, which the prefills of their requests fill."""
        rows = np.full((len(pages), 1 + max(map(len, pages.values()))), SCRATCH_PAGE)  # a slot, and its pages
        for row, (slot, of_slot) in zip(rows, pages.items(), strict=True):
            row[0], row[1 : 1 + len(of_slot)] = slot, of_slot
        slots, tables = on_device(rows, self._device).split([1, rows.shape[1] - 1], dim=1)
        self._block_tables[:, : tables.shape[1]].index_copy_(0, slots[:, 0], tables)

    def fill_slots(self, requests: Mapping[int, GenerationRequest]) -> None:
        """Put requests into their slots, so that steps can compute them. All their tokens but the last are prefilled.

        Done after the prefill's launch, because the GPU computes it meanwhile; and for many requests at once, because
        the host takes as long for an operation on one as on many.
        """
        state, numbers, sampling = self._requests, [], []
        for slot, request in requests.items():
            self._end_by(slot, request.end_ids)
            ids, seed = request.input_ids, request.sampling.seed
            seed = random_key() if seed is None else seed
            numbers.append((slot, ids[-1], len(ids) - 1, 0, request.sampling.max_tokens, seed))
            sampling.append(SamplingRow.of(request.sampling, state.ends.shape[1]))
        # One copy to the device for both: the bits of the floats travel as integers.
        together = np.hstack([np.array(numbers, np.int64), np.array(sampling, np.float64).view(np.int64)])
        integers, floats = on_device(together, self._device).split([len(numbers[0]), len(sampling[0])], dim=1)
        slots = integers[:, 0]
        state.numbers.index_copy_(0, slots, integers[:, 1:])
        state.sampling.index_copy_(0, slots, floats.view(torch.float64).float())
        state.ended.index_fill_(0, slots, False)
        state.sampler.start({slot: request.input_ids - self.first for slot, request in requests.items()})

    def _end_by(self, slot: int, ids: tuple[int, ...]) -> None:
        """Set the end tokens of a slot. Nearly all requests have the same, so a slot mostly has them already."""
        if self._end_ids.get(slot) == ids:
            return
        ends = np.zeros(self._requests.ends.shape[1], bool)
        ends[[end - self.first for end in ids if 0 <= end - self.first < len(ends)]] = True
        self._requests.ends[slot] = on_device(ends, self._device)
        self._end_ids[slot] = ids

    def prefill(self, pieces: Sequence[PromptPiece]) -> None:
        """Launch the prefill of these tokens: write their keys and values. At most `max_prefill`, padding included."""
        columns, count = np.zeros((3, self.max_prefill), np.int64), 0  # ids, slots, positions
        columns[1] = self._scratch
        for slot, begin, ids in pieces:
            piece = slice(count, count + len(ids))
            columns[0, piece], columns[1, piece], columns[2, piece] = ids, slot, begin + np.arange(len(ids))
            count += -(-len(ids) // CONSECUTIVE) * CONSECUTIVE
        size = self._padded_tokens(count)
        self._prompts[:, :size] = on_device(columns[:, :size], self._device)
        self._run_prefill(size)
        if self._device.type == "cuda":
            self._prefilled.append(_recorded())

    def await_prefills(self) -> None:
        """Wait until the device has computed all prefills but the latest one."""
        if len(self._prefilled) == 2:
            self._prefilled[0].synchronize()

    def set_batch(self, slots: Sequence[int]) -> None:
        """Set the batch of the next steps: one row for each of these slots."""
        rows = self._padded_rows(len(slots))
        filled = [*slots, *[self._scratch] * (rows - len(slots))]
        self._batch[:rows] = on_device(filled, self._device)

    def step(self, rows: int, count: int) -> DeviceSteps:
        """Launch `count` steps of the batch that was set, which has that many rows."""
        assert count <= RING_STEPS
        for _ in range(count):
            self._run_step(self._padded_rows(rows))
        steps = [(self._launched + i) % RING_STEPS for i in range(count)]
        self._launched += count
        ring = self._requests.ring
        if self._device.type != "cuda":
            return DeviceSteps(ring.clone(), steps, rows, None)
        copy = torch.empty_like(ring, device="cpu", pin_memory=True).copy_(ring, non_blocking=True)
        return DeviceSteps(copy, steps, rows, _recorded())

    def invalidate(self, page: int) -> None:
        """Overwrite a page's keys and values with NaN, as a fault of the GPU might. For tests of such faults."""
        self._keys[:, page] = torch.nan
        self._values[:, page] = torch.nan

    def _prefill(self, count: int) -> None:
        ids, slots, positions = self._prompts[:, :count]
        self._hidden(Residual(self._weights.embedding[ids].float()), slots, positions, CONSECUTIVE)

    def _step(self, rows: int) -> None:
        """Compute one token of each of the batch's first rows. Must not branch on values of the device."""
        operations, weights = self._operations, self._weights
        slots, positions, x = operations.begin(self._requests, self._batch[:rows], weights.embedding)
        self._hidden(x, slots, positions, 1)
        operations.sample(operations.head(x, weights.head, weights.sizes.eps), self._requests, slots)

    def _hidden(self, x: Residual, slots: Tensor, positions: Tensor, consecutive: int) -> None:
        """Run all layers on the embeddings of tokens in these slots (T,) at these positions (T,).

        A prefill ends at the last layer's keys and values: the prompt's last token is computed by a step.
        """
        weights, operations, eps = self._weights, self._operations, self._weights.sizes.eps
        metadata = AttentionMetadata(
            slots, positions, self._keys, self._values, self._block_tables, weights.rotary, consecutive
        )
        for index, layer in enumerate(weights.layers):
            q = operations.project_heads(x, layer.qkv, layer.qkv_bias, eps, metadata, index)
            if consecutive > 1 and index == len(weights.layers) - 1:
                return
            operations.linear_residual(operations.attend(q, metadata, index), layer.out, x, eps)
            operations.linear_residual(operations.gated(x, layer.gate_up, eps), layer.down, x, eps)

    def _padded_rows(self, rows: int) -> int:
        return min(padded_rows(rows), self._scratch)

    def _padded_tokens(self, tokens: int) -> int:
        return min(padded_tokens(tokens), self.max_prefill)

    def _integers(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.long, device=self._device)


def _recorded() -> torch.cuda.Event:
    """Return an event that happens when the device has computed all that is launched now."""
    event = torch.cuda.Event()
    event.record()
    return event


def padded_rows(rows: int) -> int:
    """Return the next power of two up to 32, above it the next multiple of 32."""
    return 1 << (rows - 1).bit_length() if rows <= 32 else -(-rows // 32) * 32


def padded_tokens(tokens: int) -> int:
    """Return the next multiple of 64 up to 1,024, above it the next multiple of 256.

    Each size is a CUDA graph, and the more tokens there are, the less padding costs.
    """
    multiple = 64 if tokens <= 1024 else 256
    return -(-tokens // multiple) * multiple
