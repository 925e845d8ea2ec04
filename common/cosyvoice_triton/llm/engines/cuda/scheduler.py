"""Decides which requests are computed next, in which slots and pages. Knows no tensors, threads or clocks."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from cosyvoice_triton.constants import ONSET_TOKENS, TOKEN_RATE
from cosyvoice_triton.llm.engines.cuda.operations import CONSECUTIVE, FAULT, NOTHING, PAGE, SCRATCH_PAGE, PromptPiece
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.engines.threaded_engine import Generation
from cosyvoice_triton.llm.interface import FinishReason, TokenChunk
from cosyvoice_triton.profiles import LLMNumbers

if TYPE_CHECKING:
    from cosyvoice_triton.llm.engines.cuda.decoder import Decoder, DeviceSteps

MOST_SILENCE = 2 * TOKEN_RATE  # tokens: an answer that is silent for longer does not stay urgent


class SequenceStatus(Enum):
    """Where a request is on its way."""

    WAITING = "waiting"  # for a slot and pages
    PREFILLING = "prefilling"  # its prompt, but for the last token, which a step computes
    RUNNING = "running"  # its next token can be computed by a step
    FINISHED = "finished"  # it has given back slot and pages; steps for it may still be launched


@dataclass(eq=False)
class TokenSequence(Generation):
    """A request as the scheduler sees it.

    slot, pages: while it is prefilling or running. prefilled: tokens of its prompt. launched: steps for it, of which
    the host has not seen all results. reported: tokens. buffered: new tokens that are not reported yet, fewer than
    `report_size`. ends: the end ids. leads: whether all tokens so far are silent, so that a listener still waits for as
    many more; urgent: how many they wait for.
    """

    numbers: LLMNumbers = field(default_factory=LLMNumbers)
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    prefilled: int = 0
    launched: int = 0
    reported: int = 0
    buffered: list[int] = field(default_factory=list)
    report_size: int = field(init=False)
    ends: frozenset[int] = field(init=False)
    leads: bool = field(init=False)
    urgent: int = field(init=False)

    def __post_init__(self) -> None:
        self.ends = frozenset(self.request.end_ids)
        self.urgent = self.request.urgent_tokens
        self.leads = bool(self.urgent and self.request.silent_ids)
        self._set_report_size()

    def flush(self) -> list[int]:
        """Return the buffered tokens, which are now reported."""
        tokens, self.buffered = self.buffered, []
        self.reported += len(tokens)
        self._set_report_size()
        return tokens

    def _set_report_size(self) -> None:
        """Set how many tokens the next report has, unless the answer ends before.

        The first report shows that the request runs, the next one has all that the first chunk waits for. After that at
        most half of what the listener has is buffered, so the second chunk waits for a few steps at most.
        """
        first_chunk, numbers = self.urgent, self.numbers
        if self.reported >= first_chunk:
            size = min(max(self.reported // 2, numbers.first_report_tokens), numbers.max_buffered_tokens)
        else:
            size = first_chunk - self.reported if self.reported else numbers.first_report_tokens
        self.report_size = min(size, self.request.sampling.max_tokens - self.reported)

    def count_silence(self, ids: Sequence[int]) -> None:
        """Let the first chunk wait for the silent tokens among the first ones, too: they are not spoken."""
        silent = next((at for at, token in enumerate(ids) if token not in self.request.silent_ids), len(ids))
        before = self.generated
        self.leads = silent == len(ids) and before + silent < MOST_SILENCE
        self.urgent = self.request.urgent_tokens + max(0, before + silent - ONSET_TOKENS)
        self._set_report_size()

    @property
    def generated(self) -> int:
        """Return the number of tokens of the answer that the host has seen."""
        return self.reported + len(self.buffered)

    @property
    def urgent_steps(self) -> int:
        """Return the number of further steps that the listener's first chunk waits for."""
        return max(0, self.urgent - self.launched)

    @property
    def paced(self) -> bool:
        """Return whether its listener plays audio already, so that its tokens are needed at the rate of speech only."""
        return self.request.played and not self.urgent_steps


class LaunchedBatch(NamedTuple):
    """Launched steps, and the sequences of their rows."""

    steps: "DeviceSteps"
    batch: list[TokenSequence]


class Answer(NamedTuple):
    """New tokens of a request, or the error that ends it."""

    sequence: TokenSequence
    item: TokenChunk | Exception

    @property
    def ends(self) -> bool:
        """Return whether it is the request's last answer."""
        return isinstance(self.item, Exception) or self.item.finish_reason is not None


class PagePool:
    """Hands out the pages in which keys and values are kept, by their numbers; the only owner of the free ones."""

    def __init__(self, count: int) -> None:
        """`count` is the number of all pages, the scratch page included."""
        self._count = count
        self._free = list(range(count - 1, SCRATCH_PAGE, -1))
        self._used: set[int] = set()

    @property
    def total(self) -> int:
        """Return the number of pages that can be allocated."""
        return self._count - 1

    @property
    def free(self) -> int:
        """Return the number of pages that are not allocated."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages, or None if fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Make pages free again. AssertionError for one that is not allocated: two sequences would write to it."""
        assert self._used.issuperset(pages) and len(set(pages)) == len(pages), f"pages {pages} are not all allocated"
        self._used.difference_update(pages)
        self._free.extend(pages)


class Scheduler:
    """Computes up to `slots` requests at once."""

    def __init__(self, model: "Decoder", slots: int, pages: PagePool, numbers: LLMNumbers) -> None:
        self._model = model
        self._free_slots = list(reversed(range(slots)))
        self._pages = pages
        self._numbers = numbers
        self.live: list[TokenSequence] = []  # prefilling or running, oldest first
        self._batch: list[TokenSequence] = []  # that the model has
        self._to_fill: list[TokenSequence] = []  # running, but not in their slots yet
        self._batch_full = False  # no prompts are prefilled: too many listeners wait for their first chunk
        self._launched: list[LaunchedBatch] = []  # not read back

    @property
    def urgent(self) -> bool:
        """Return whether a listener waits for the next tokens of a sequence."""
        return any(sequence.urgent_steps for sequence in self.live)

    @property
    def idle(self) -> bool:
        """Return whether nothing is launched, nor will be before the paced sequences are stepped again."""
        return not self._launched and all(each.status is SequenceStatus.RUNNING and each.paced for each in self.live)

    def pages_of(self, request: GenerationRequest) -> int:
        """Return the number of pages of the longest answer, which are allocated before the request starts."""
        return -(-(len(request.input_ids) + request.sampling.max_tokens) // PAGE)

    def admit(self, waiting: deque[TokenSequence]) -> None:
        """Remove cancelled requests, and start waiting ones in their order while there are slots and pages."""
        for sequence in [each for each in self.live if each.cancelled]:
            self.remove(sequence)
        block_tables: dict[int, list[int]] = {}
        while waiting and self._free_slots:
            sequence = waiting[0]
            if sequence.cancelled:
                waiting.popleft()
                continue
            pages = self._pages.allocate(self.pages_of(sequence.request))
            if pages is None:
                break
            waiting.popleft()
            sequence.slot, sequence.pages = self._free_slots.pop(), pages
            sequence.status = SequenceStatus.PREFILLING
            self.live.append(sequence)
            if len(sequence.request.input_ids) == 1:
                self._run(sequence)
            block_tables[sequence.slot] = pages
        if block_tables:
            self._model.set_block_tables(block_tables)

    def remove(self, sequence: TokenSequence) -> None:
        """Free slot and pages: the only place where a request leaves.

        Steps that are launched for it do not disturb the next request there: the device computes in the order of the
        launches.
        """
        self.live.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._free_slots.append(sequence.slot)
        self._pages.release(sequence.pages)

    def prefill(self) -> int:
        """Launch prompts. Returns how many tokens, at most `max_prefill`; 0 if none are to be launched now."""
        if all(each.status is SequenceStatus.RUNNING for each in self.live):
            return 0
        urgent = sum(each.status is SequenceStatus.RUNNING and each.urgent_steps > 0 for each in self.live)
        self._batch_full = urgent >= self._numbers.prefill_batch or (self._batch_full and urgent > 0)
        if self._batch_full:
            return 0
        pieces = self._pieces(self._numbers.prefill_batch - urgent)
        self._model.prefill(pieces)
        self._fill_slots()
        return sum(len(piece.ids) for piece in pieces)

    def launch(self, *, paced: bool) -> list[LaunchedBatch]:
        """Launch steps of the running sequences, of paced ones only if `paced`.

        Returns what was launched before, so that the device is never idle while the host reads it back.
        """
        running = [each for each in self.live if each.status is SequenceStatus.RUNNING and (paced or not each.paced)]
        before = self.take_launched()
        if running:
            self._launched.append(self._step(running))
        return before

    def take_launched(self) -> list[LaunchedBatch]:
        """Return what is launched and not read back; `answers` is to read it."""
        before, self._launched = self._launched, []
        return before

    def answers(self, launched: list[LaunchedBatch]) -> list[Answer]:
        """Read back what these steps have sampled. Waits for the device."""
        return [answer for launch in launched for answer in self._answers(launch)]

    def _run(self, sequence: TokenSequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        self._to_fill.append(sequence)

    def _pieces(self, requests: int) -> list[PromptPiece]:
        """Return what is prefilled next: of so many of the oldest requests, at most `max_prefill` tokens."""
        room = self._model.max_prefill
        pieces: list[PromptPiece] = []
        for sequence in self.live:
            if sequence.status is SequenceStatus.RUNNING or not room or len(pieces) == requests:
                continue
            ids = sequence.request.input_ids[sequence.prefilled : -1][:room]
            pieces.append(PromptPiece(sequence.slot, sequence.prefilled, ids))
            sequence.prefilled += len(ids)
            if sequence.prefilled == len(sequence.request.input_ids) - 1:
                self._run(sequence)
            room -= -(-len(ids) // CONSECUTIVE) * CONSECUTIVE
        return pieces

    def _step(self, batch: list[TokenSequence]) -> LaunchedBatch:
        self._fill_slots()
        if batch != self._batch:
            self._batch = batch
            self._model.set_batch([sequence.slot for sequence in batch])
        count = self._step_count(batch)
        for sequence in batch:
            sequence.launched += count
        return LaunchedBatch(self._model.step(len(batch), count), batch)

    def _step_count(self, batch: list[TokenSequence]) -> int:
        """Return how many steps are launched together: never more than the next first chunk waits for."""
        prefilling = any(each.status is SequenceStatus.PREFILLING for each in self.live)
        many_urgent = len(batch) > self._numbers.few_rows and self.urgent
        # Paced sequences come once in an interval, and then need all their steps.
        if (prefilling or many_urgent) and not any(each.paced for each in batch):
            return 1
        return min([self._numbers.steps_per_readback, *(each.urgent_steps for each in batch if each.urgent_steps)])

    def _fill_slots(self) -> None:
        """Put the sequences that became running into their slots."""
        # One that was cancelled meanwhile has lost its slot.
        to_fill = {each.slot: each.request for each in self._to_fill if each.status is SequenceStatus.RUNNING}
        self._to_fill.clear()
        if to_fill:
            self._model.fill_slots(to_fill)

    def _answers(self, launch: LaunchedBatch) -> list[Answer]:
        first, answers = self._model.first, []
        found = (launch.steps.columns().T + first).tolist()  # columns (steps, rows) -> ids (rows, steps)
        for sequence, ids in zip(launch.batch, found, strict=True):
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if sequence.leads:
                sequence.count_silence(ids)
            # Of hundreds of rows nearly all have only more tokens to buffer.
            if (
                len(sequence.buffered) + len(ids) < sequence.report_size
                and min(ids) >= first
                and sequence.ends.isdisjoint(ids)
            ):
                sequence.buffered += ids
            elif answer := self._answer(sequence, ids):
                answers.append(answer)
        return answers

    def _answer(self, sequence: TokenSequence, ids: list[int]) -> Answer | None:
        reason: FinishReason | None = None
        for token in ids:
            column = token - self._model.first
            if column == FAULT:
                return Answer(sequence, FloatingPointError("the LLM's logits are not finite"))
            if column == NOTHING or reason:
                break
            sequence.buffered.append(token)
            if token in sequence.ends:
                reason = "stop"
            elif sequence.generated == sequence.request.sampling.max_tokens:
                reason = "length"
        if not reason and len(sequence.buffered) < sequence.report_size:
            return None
        return Answer(sequence, TokenChunk(sequence.flush(), reason))
