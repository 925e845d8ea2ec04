"""Which requests are computed next, and in which slots and pages. Knows nothing of tensors, threads and clocks."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from cosyvoice_triton.constants import TOKEN_RATE
from cosyvoice_triton.llm.engines.cuda.operations import CONSECUTIVE, FAULT, NOTHING, PAGE
from cosyvoice_triton.llm.engines.cuda.pages import Pages
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.engines.threaded import Generation
from cosyvoice_triton.llm.interface import FinishReason, TokenChunk

STEPS_PER_LOOK = 3  # at what was drawn, where no answer is urgent
FEW_ROWS = 8  # a step of so few takes hardly longer than a look
# When so many listeners wait for the tokens of their first chunk, no further prompts are prefilled until all of them
# have these: of 256 that begin together the first ones are served earlier, and the last ones hardly later
# (docs/results/speed.md).
WAVE = 144
# Each report is work of the host, which has one Python process for all requests: half a millisecond over all processes.
FIRST_REPORT = 3  # tokens
MOST_HELD = TOKEN_RATE  # a second of speech


def tokens_of_report(reported: int, urgent: int) -> int:
    """How many new tokens of a request, of which so many are urgent, are reported together, after so many.

    The first ones, so that the request is known to run; then all that the first chunk waits for. After that the tokens
    held back are at most half of those the listener has already, so the second chunk waits for a few steps at most.
    """
    if reported < urgent:
        return urgent - reported if reported else FIRST_REPORT
    return min(max(reported // 2, FIRST_REPORT), MOST_HELD)


class PromptPiece(NamedTuple):
    """Tokens of a prompt to prefill, from position `begin`."""

    slot: int
    begin: int
    ids: np.ndarray  # (n,)


class Burst(Protocol):
    """Steps that were launched."""

    def columns(self) -> np.ndarray:
        """(steps, rows): a column of the logits, NOTHING or FAULT. Waits until the steps have been computed."""
        ...


class StepModel(Protocol):
    """What computes. See `decoder.Decoder`."""

    max_prefill: int  # tokens, each piece padded to a multiple of CONSECUTIVE
    first: int

    def place(self, pages: Mapping[int, Sequence[int]]) -> None: ...
    def prefill(self, pieces: Sequence[PromptPiece]) -> None: ...
    def start(self, requests: Mapping[int, GenerationRequest]) -> None: ...
    def select(self, slots: Sequence[int]) -> None: ...
    def step(self, rows: int, count: int) -> Burst: ...


@dataclass(eq=False)
class SequenceRow(Generation):
    """A request. slot, pages: while it is computed. prefilled: tokens of its prompt. ready: whether its next token can
    be computed by a step, because these are all but the last one. launched: steps for it. reported: tokens. held: new
    ones, until there are as many as `due`. ends: the end ids."""

    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    prefilled: int = 0
    ready: bool = field(init=False)
    launched: int = 0
    reported: int = 0
    held: list[int] = field(default_factory=list)
    due: int = field(init=False)
    ends: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ready = len(self.request.input_ids) == 1
        self.ends = frozenset(self.request.end_ids)
        self.set_due()

    def set_due(self) -> None:
        """As many tokens as the next report has, or as the answer can still have."""
        request = self.request
        enough = tokens_of_report(self.reported, request.urgent_tokens)
        self.due = min(enough, request.sampling.max_tokens - self.reported)

    @property
    def generated(self) -> int:
        """Tokens of the answer."""
        return self.reported + len(self.held)

    @property
    def urgent(self) -> int:
        """How many further steps its listener waits for."""
        return max(0, self.request.urgent_tokens - self.launched)

    @property
    def ahead(self) -> bool:
        """Whether its listener waits for none of its next tokens, and hears them at the rate of speech."""
        return self.request.played and not self.urgent


Launched = tuple[Burst, list[SequenceRow]]  # steps, and the rows that they compute


class Answer(NamedTuple):
    """New tokens of a request, or the error that ends it."""

    sequence: SequenceRow
    item: TokenChunk | Exception

    @property
    def ends(self) -> bool:
        return isinstance(self.item, Exception) or self.item.finish_reason is not None


class Scheduler:
    """Computes up to `slots` requests at once."""

    def __init__(self, model: StepModel, slots: int, pages: Pages) -> None:
        self._model = model
        self._slots = list(reversed(range(slots)))  # free ones
        self._pages = pages
        self.rows: list[SequenceRow] = []  # what is computed, oldest first
        self._selected: list[SequenceRow] = []
        self._starting: list[SequenceRow] = []  # ready, but not in their slots
        self._wave = False  # no prompts are prefilled, because so many listeners wait for what was
        self._launched: list[Launched] = []  # not yet looked at

    @property
    def urgent(self) -> bool:
        """Whether a listener waits for the next token of a row."""
        return any(row.urgent for row in self.rows)

    @property
    def idle(self) -> bool:
        """Whether nothing is launched, and nothing will be before the rows that are ahead are computed again."""
        return not self._launched and all(row.ready and row.ahead for row in self.rows)

    def pages_of(self, request: GenerationRequest) -> int:
        """Pages of the longest answer."""
        return -(-(len(request.input_ids) + request.sampling.max_tokens) // PAGE)

    def admit(self, waiting: deque[SequenceRow]) -> None:
        """Remove what was cancelled, and start waiting requests in their order while there are slots and pages."""
        for sequence in [row for row in self.rows if row.cancelled]:
            self.remove(sequence)
        placed: dict[int, list[int]] = {}
        while waiting and self._slots:
            sequence = waiting[0]
            if sequence.cancelled:
                waiting.popleft()
                continue
            pages = self._pages.take(self.pages_of(sequence.request))
            if pages is None:
                break
            waiting.popleft()
            sequence.slot, sequence.pages = self._slots.pop(), pages
            self.rows.append(sequence)
            if sequence.ready:
                self._starting.append(sequence)
            placed[sequence.slot] = pages
        if placed:
            self._model.place(placed)

    def remove(self, sequence: SequenceRow) -> None:
        """Free slot and pages: the only place where a request leaves. Steps that are already launched do not disturb
        the next one there: the device computes everything in the order of the launches."""
        assert sequence.slot is not None
        self.rows.remove(sequence)
        self._slots.append(sequence.slot)
        self._pages.give_back(sequence.pages)
        sequence.slot, sequence.pages = None, []

    def prefill(self) -> int:
        """Launch prompts; returns how many tokens, at most `max_prefill`. 0: there is nothing to be launched now."""
        if all(row.ready for row in self.rows):
            return 0
        waiting = sum(row.ready and row.urgent > 0 for row in self.rows)
        self._wave = waiting >= WAVE or (self._wave and waiting > 0)
        if self._wave:
            return 0
        pieces = self._pieces(WAVE - waiting)
        self._model.prefill(pieces)
        self._start()
        return sum(len(piece.ids) for piece in pieces)

    def launch(self, *, ahead: bool = True) -> list[Launched]:
        """Launch steps; returns those launched before, so that the device need not wait while the host looks at them.

        ahead: also of the rows that are ahead of their listeners.
        """
        ready = [row for row in self.rows if row.ready and (ahead or not row.ahead)]
        before = self.take_launched()
        if ready:
            self._launched.append(self._step(ready))
        return before

    def take_launched(self) -> list[Launched]:
        """The steps that are launched, none or some, to be looked at by `answers`."""
        before, self._launched = self._launched, []
        return before

    def answers(self, launched: list[Launched]) -> list[Answer]:
        """What these steps have drawn. Waits for the device."""
        return [answer for burst, rows in launched for answer in self._answers(burst, rows)]

    def _pieces(self, most: int) -> list[PromptPiece]:
        """What is to be prefilled next, of the `most` oldest requests, at most `max_prefill` tokens."""
        room = self._model.max_prefill
        pieces: list[PromptPiece] = []
        for row in self.rows:
            if row.ready or not room or len(pieces) == most:
                continue
            assert row.slot is not None
            ids = row.request.input_ids[row.prefilled : -1][:room]
            pieces.append(PromptPiece(row.slot, row.prefilled, ids))
            row.prefilled += len(ids)
            if row.prefilled == len(row.request.input_ids) - 1:
                row.ready = True
                self._starting.append(row)
            room -= -(-len(ids) // CONSECUTIVE) * CONSECUTIVE
        return pieces

    def _step(self, ready: list[SequenceRow]) -> Launched:
        self._start()
        if ready != self._selected:
            self._selected = ready
            self._model.select([row.slot for row in ready if row.slot is not None])
        prefilling = any(not row.ready for row in self.rows)
        single = (prefilling or (len(ready) > FEW_ROWS and self.urgent)) and not any(row.ahead for row in ready)
        count = 1 if single else min([STEPS_PER_LOOK, *(row.urgent for row in ready if row.urgent)])
        for row in ready:
            row.launched += count
        return self._model.step(len(ready), count), ready

    def _start(self) -> None:
        """Put the requests that are ready into their slots."""
        starting = {row.slot: row.request for row in self._starting if row.slot is not None}
        self._starting.clear()
        if starting:
            self._model.start(starting)

    def _answers(self, burst: Burst, rows: list[SequenceRow]) -> list[Answer]:
        first, answers = self._model.first, []
        found = (burst.columns().T + first).tolist()  # columns (steps, rows) -> ids (rows, steps)
        for row, ids in zip(rows, found, strict=True):
            if row.slot is None:
                continue
            # Of hundreds of rows nearly all have only more tokens to hold.
            if len(row.held) + len(ids) < row.due and min(ids) >= first and row.ends.isdisjoint(ids):
                row.held += ids
            elif answer := self._answer(row, ids):
                answers.append(answer)
        return answers

    def _answer(self, row: SequenceRow, ids: list[int]) -> Answer | None:
        reason: FinishReason | None = None
        for token in ids:
            column = token - self._model.first
            if column == FAULT:
                return Answer(row, FloatingPointError("the LLM's logits are not finite"))
            if column == NOTHING or reason:
                break
            row.held.append(token)
            if token in row.ends:
                reason = "stop"
            elif row.generated == row.request.sampling.max_tokens:
                reason = "length"
        if not reason and len(row.held) < row.due:
            return None
        tokens, row.held = row.held, []
        row.reported += len(tokens)
        row.set_due()
        return Answer(row, TokenChunk(tokens, reason))
