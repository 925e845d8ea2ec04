"""Slots, pages and answers of the engine cuda, with a fake of the device that draws random tokens."""

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from cosyvoice_triton.llm.engines.cuda import scheduler
from cosyvoice_triton.llm.engines.cuda.operations import CONSECUTIVE, PAGE
from cosyvoice_triton.llm.engines.cuda.pages import SCRATCH, Pages
from cosyvoice_triton.llm.engines.cuda.scheduler import (
    FAULT,
    FEW_ROWS,
    FIRST_REPORT,
    MOST_HELD,
    NOTHING,
    STEPS_PER_LOOK,
    Scheduler,
    SequenceRow,
)
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.interface import URGENT_TOKENS, Sampling

FIRST, END, SLOTS = 1000, 1099, 16


@dataclass
class Occupant:
    """What the device knows of a slot's request."""

    pages: list[int]
    request: GenerationRequest | None = None
    prefilled: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    faulty: bool = False

    @property
    def ended(self) -> bool:
        assert self.request is not None
        over = len(self.drawn) == self.request.sampling.max_tokens
        return self.faulty or over or (bool(self.drawn) and self.drawn[-1] == END)


class FakeBurst:
    def __init__(self, found):
        self._found = found

    def columns(self):
        return self._found


class FakeModel:
    """Draws what `draw` returns, columns or FAULT; like the device, nothing for requests that have ended."""

    max_prefill, first = 104, FIRST

    def __init__(self, draw):
        self.draw = draw
        self.occupants: dict[int, Occupant] = {}
        self.of_request: dict[int, Occupant] = {}
        self.selected: list[int] = []
        self.prefills: list[int] = []
        self.starts: list[int] = []  # how many requests together
        self.counts: list[int] = []

    def place(self, pages):
        for slot, of_slot in pages.items():
            assert SCRATCH not in of_slot
            self.occupants[slot] = Occupant(of_slot)

    def start(self, requests):
        self.starts.append(len(requests))
        for slot, request in requests.items():
            occupant = self.of_request[id(request)] = self.occupants[slot]
            assert occupant.request is None
            occupant.request = request

    def prefill(self, pieces):
        self.prefills.append(sum(-(-len(piece.ids) // CONSECUTIVE) * CONSECUTIVE for piece in pieces))
        assert 0 < self.prefills[-1] <= self.max_prefill
        for slot, begin, ids in pieces:
            assert begin == len(self.occupants[slot].prefilled)
            self.occupants[slot].prefilled += ids.tolist()

    def select(self, slots):
        self.selected = slots

    def step(self, rows, count):
        assert rows == len(self.selected) == len(set(self.selected))
        self.counts.append(count)
        return FakeBurst(
            np.array([[self._drawn(self.occupants[slot]) for slot in self.selected] for _ in range(count)])
        )

    def _drawn(self, occupant):
        assert occupant.prefilled == list(occupant.request.input_ids[:-1])
        if occupant.ended:
            return NOTHING
        column = self.draw()
        occupant.faulty = column == FAULT
        if not occupant.faulty:
            occupant.drawn.append(FIRST + column)
        return column


class Served:
    """A scheduler with a queue, as in the engine; `answers` by sequence."""

    def __init__(self, draw, pages=100):
        self.model = FakeModel(draw)
        self.pages = Pages(pages + 1)
        self.scheduler = Scheduler(self.model, SLOTS, self.pages)
        self.waiting = deque()
        self.prefill_per_step, self.launched = 400, 0
        self.answers: dict[SequenceRow, list] = {}

    def add(self, prompt=10, max_tokens=20, **hints):
        request = GenerationRequest(np.arange(prompt), Sampling(max_tokens=max_tokens), (END,), **hints)
        sequence = SequenceRow(request, lambda item: None)
        self.waiting.append(sequence)
        self.answers[sequence] = []
        return sequence

    def step(self, *, ahead=True):
        self.scheduler.admit(self.waiting)
        while sum(self.model.prefills[self.launched :]) < self.prefill_per_step and self.scheduler.prefill():
            pass
        self.launched = len(self.model.prefills)
        answers = self.scheduler.answers(self.scheduler.launch(ahead=ahead))
        for answer in answers:
            self.answers[answer.sequence].append(answer.item)
            if answer.ends:
                self.scheduler.remove(answer.sequence)
        return answers

    def run(self):
        steps = 0
        while self.waiting or self.scheduler.rows:
            self.step()
            steps += 1
            assert steps < 10_000, "a request does not end"

    def tokens(self, sequence):
        return [token for chunk in self.answers[sequence] for token in chunk.tokens]

    def check_pages(self):
        held = [page for row in self.scheduler.rows for page in row.pages]
        assert len(held) == len(set(held)) and len(held) + self.pages.free == self.pages.total


def test_a_hundred_thousand_random_changes_lose_no_page_and_no_token():
    """Requests come, are cancelled, end by an end token, their length or a fault; more come than fit."""
    rng = random.Random(0)

    def draw():
        number = rng.random()
        return FAULT if number < 0.01 else END - FIRST if number < 0.2 else int(90 * number)

    served = Served(draw, pages=40)
    changes, ended, cancelled, most_waiting = 0, 0, 0, 0
    while changes < 100_000:
        for _ in range(rng.randrange(12)):
            if len(served.waiting) < 20:
                served.add(rng.randrange(1, 150), rng.randrange(1, 30))
                changes += 1
        live = [row for row in (*served.scheduler.rows, *served.waiting) if not row.cancelled]
        for sequence in rng.sample(live, min(len(live), rng.randrange(3))):
            sequence.cancelled = True
            changes, cancelled = changes + 1, cancelled + 1
        ends = [answer for answer in served.step() if answer.ends]
        changes, ended = changes + len(ends), ended + len(ends)
        most_waiting = max(most_waiting, len(served.waiting))
        served.check_pages()
        assert len(served.scheduler.rows) <= SLOTS
    served.run()
    assert served.pages.free == served.pages.total == 40 and most_waiting == 20
    assert min(ended, cancelled) > 10_000
    for sequence, items in served.answers.items():
        device = served.model.of_request.get(id(sequence.request))
        chunks = [item for item in items if not isinstance(item, Exception)]
        told = [token for chunk in chunks for token in chunk.tokens]
        if not sequence.cancelled:
            assert told == device.drawn[: len(told)] and len(device.drawn) - len(told) < MOST_HELD
            assert device.faulty or told == device.drawn
            reason = "stop" if told and told[-1] == END else "length"
            assert device.faulty == isinstance(items[-1], FloatingPointError)
            assert device.faulty or [chunk.finish_reason for chunk in chunks][-1] == reason
        else:
            assert device is None or told == device.drawn[: len(told)]


def test_prompts_are_prefilled_in_pieces_together_with_others():
    served = Served(lambda: 5)
    sequences = [served.add(prompt) for prompt in (31, 121, 1)]
    served.run()
    assert served.model.prefills == [104, 48] and served.model.starts == [2, 1]
    assert all(served.tokens(sequence) == [FIRST + 5] * 20 for sequence in sequences)


def test_when_many_wait_for_their_first_tokens_no_further_prompts_are_prefilled_until_all_have_them(monkeypatch):
    monkeypatch.setattr(scheduler, "WAVE", 2)
    served = Served(lambda: 5)
    rows = [served.add(100) for _ in range(5)]
    served.step()
    rows[0].launched += 1  # it has its tokens a step earlier than the other
    while rows[1].urgent:
        assert len(served.model.prefills) == 2
        served.step()
    rows[0].launched -= 1
    served.step()
    assert [row.ready for row in rows] == [True, True, True, True, False]
    served.run()
    assert len(served.model.prefills) == 5
    assert all(served.tokens(row) == [FIRST + 5] * 20 for row in rows)


def test_a_launch_has_no_more_prompts_than_listeners_may_wait(monkeypatch):
    """Beside those that wait already."""
    monkeypatch.setattr(scheduler, "WAVE", 3)
    served = Served(lambda: 5)
    rows = [served.add(10)]
    served.step()
    rows += [served.add(10) for _ in range(4)]
    served.step()
    assert [row.ready for row in rows] == [True, True, True, False, False]
    served.run()
    assert all(served.tokens(row) == [FIRST + 5] * 20 for row in rows)


def test_several_tokens_are_made_at_a_look_unless_one_of_many_rows_is_urgent_or_a_prompt_waits():
    served = Served(lambda: 5)
    rows = [served.add(max_tokens=60) for _ in range(FEW_ROWS)]
    for _ in range(3):
        served.step()
    assert served.model.counts == [STEPS_PER_LOOK] * 3  # few rows
    rows.append(served.add(max_tokens=60, urgent_tokens=12))
    while rows[-1].urgent:
        served.step()
    assert set(served.model.counts[3:]) == {1} and not any(row.urgent for row in rows)
    served.model.counts.clear()
    for _ in range(5):
        served.step()
    assert served.model.counts == [STEPS_PER_LOOK] * 5
    served.add(prompt=400, max_tokens=10)
    served.step()
    assert served.model.counts[-1] == 1
    served.run()
    assert all(served.tokens(row) == [FIRST + 5] * 60 for row in rows)


@pytest.mark.parametrize("urgent", [13, URGENT_TOKENS])
def test_no_further_step_is_launched_than_those_that_the_listener_waits_for(urgent):
    served = Served(lambda: 5)
    row = served.add(max_tokens=60, urgent_tokens=urgent, played=True)
    served.step()
    while not served.scheduler.idle:
        served.step(ahead=False)
    assert sum(served.model.counts) == row.generated == urgent and max(served.model.counts) == STEPS_PER_LOOK
    assert sum(len(chunk.tokens) for chunk in served.answers[row]) == urgent
    assert [len(chunk.tokens) for chunk in served.answers[row]] == [FIRST_REPORT, urgent - FIRST_REPORT]


def test_rows_that_are_ahead_of_their_listeners_wait_for_their_turn():
    served = Served(lambda: 5)
    rows = [served.add(max_tokens=200, played=played) for played in (True, True, False)]
    while not rows[0].ahead:
        served.step()
    assert rows[0].launched == rows[2].launched == URGENT_TOKENS and not served.scheduler.idle
    newcomer = served.add(max_tokens=200, played=True)
    served.step(ahead=False)
    while not newcomer.ahead:
        served.step(ahead=False)
    assert rows[0].launched == rows[1].launched == URGENT_TOKENS == newcomer.launched
    assert rows[2].launched >= 2 * URGENT_TOKENS
    while rows[2].slot is not None:
        served.step(ahead=False)
    served.step(ahead=False)  # what was launched before its end was known
    assert served.scheduler.idle
    served.step()
    served.add(prompt=200, max_tokens=10)
    served.step()
    assert served.model.counts[-1] == STEPS_PER_LOOK and not served.scheduler.idle  # of those that waited
    served.run()
    assert all(served.tokens(row) == [FIRST + 5] * 200 for row in (*rows, newcomer))


def test_tokens_are_reported_when_the_listener_can_use_them():
    """The first ones, those of the first chunk at once, then as many as keep the number of reports small."""
    served = Served(lambda: 5)
    sequence = served.add(max_tokens=212)
    sent, late = [], []
    while served.waiting or served.scheduler.rows:
        for answer in served.step():
            sent.append(len(answer.item.tokens))
        late.append((sum(sent), sequence.generated - sum(sent)))
    assert sent[0] == FIRST_REPORT and sent[0] + sent[1] == URGENT_TOKENS
    assert len(sent) <= 12 and sum(sent) == 212
    assert all(held < max(reported / 2, URGENT_TOKENS) and held < MOST_HELD for reported, held in late)
    follower = served.add(max_tokens=100, urgent_tokens=0)  # a listener who has audio
    served.run()
    sizes = [len(chunk.tokens) for chunk in served.answers[follower]]
    assert sizes[:3] == [FIRST_REPORT] * 3 and sizes == sorted(sizes[:-1]) + sizes[-1:]


def test_requests_wait_for_pages_in_the_order_of_their_arrival():
    served = Served(lambda: 5, pages=4)
    large = [served.add(prompt=2 * PAGE, max_tokens=10) for _ in range(2)]  # three pages each
    small = served.add(max_tokens=10)
    served.step()
    assert served.scheduler.rows == [large[0]] and list(served.waiting) == [large[1], small]
    large[0].cancelled = True
    served.step()
    assert served.scheduler.rows == [large[1], small]
    served.run()
    assert served.pages.free == 4 and served.tokens(small) == [FIRST + 5] * 10


def test_a_page_is_not_given_back_twice():
    pages = Pages(4)
    taken = pages.take(2)
    assert pages.take(2) is None
    pages.give_back(taken)
    with pytest.raises(AssertionError, match="are not all taken"):
        pages.give_back(taken)
    assert sorted(pages.take(3)) == [1, 2, 3]
