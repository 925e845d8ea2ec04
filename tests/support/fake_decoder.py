"""A fake of the LLM's device: it samples what a function returns, checks what it is asked for, and can keep time."""

from dataclasses import dataclass, field

import numpy as np
from cosyvoice_triton.llm.engines.cuda.operations import CONSECUTIVE, FAULT, NOTHING, SCRATCH_PAGE
from cosyvoice_triton.llm.engines.interface import GenerationRequest

FIRST, END = 1000, 1099  # ids: of column 0, and the end token


@dataclass
class Occupant:
    """What the device knows of a slot's request."""

    pages: list[int]
    request: GenerationRequest | None = None
    prefilled: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    faulty: bool = False

    @property
    def ended(self) -> bool:
        assert self.request is not None
        over = len(self.sampled) == self.request.sampling.max_tokens
        return self.faulty or over or (bool(self.sampled) and self.sampled[-1] == END)


class FakeSteps:
    def __init__(self, found, wait):
        self._found, self._wait = found, wait

    def columns(self):
        self._wait()
        return self._found


class FakeDecoder:
    """A `Decoder` that samples what `sample` returns, columns or FAULT; like the device, nothing for requests that
    have ended. on_launch: called with "prefill", "step", and "await" when prefills are waited for."""

    first = FIRST

    def __init__(self, sample, *, max_prefill=104, on_launch=lambda name: None):
        self.sample, self.max_prefill, self._on_launch = sample, max_prefill, on_launch
        self.occupants: dict[int, Occupant] = {}
        self.of_request: dict[int, Occupant] = {}
        self.batch: list[int] = []
        self.prefills: list[int] = []  # tokens
        self.fills: list[int] = []  # how many requests together
        self.counts: list[int] = []  # steps together

    def set_block_tables(self, pages):
        for slot, of_slot in pages.items():
            assert SCRATCH_PAGE not in of_slot
            self.occupants[slot] = Occupant(of_slot)

    def fill_slots(self, requests):
        self.fills.append(len(requests))
        for slot, request in requests.items():
            occupant = self.of_request[id(request)] = self.occupants[slot]
            assert occupant.request is None
            occupant.request = request

    def prefill(self, pieces):
        self._on_launch("prefill")
        self.prefills.append(sum(-(-len(piece.ids) // CONSECUTIVE) * CONSECUTIVE for piece in pieces))
        assert 0 < self.prefills[-1] <= self.max_prefill
        for slot, begin, ids in pieces:
            assert begin == len(self.occupants[slot].prefilled)
            self.occupants[slot].prefilled += ids.tolist()

    def await_prefills(self):
        self._on_launch("await")

    def set_batch(self, slots):
        self.batch = slots

    def step(self, rows, count):
        self._on_launch("step")
        assert rows == len(self.batch) == len(set(self.batch))
        self.counts.append(count)
        found = np.array([[self._sampled(self.occupants[slot]) for slot in self.batch] for _ in range(count)])
        return FakeSteps(found, self._computed())

    def invalidate(self, page):
        raise NotImplementedError

    def _computed(self):
        """A function that waits until what is launched now has been computed."""
        return lambda: None

    def _sampled(self, occupant):
        assert occupant.prefilled == list(occupant.request.input_ids[:-1])
        if occupant.ended:
            return NOTHING
        column = self.sample()
        occupant.faulty = column == FAULT
        if not occupant.faulty:
            occupant.sampled.append(FIRST + column)
        return column
