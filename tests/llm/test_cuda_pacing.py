"""What listeners get from the engine cuda's rules, simulated with the times that an H200 takes for prefills and steps.

Each rule of `LLMNumbers` is compared with the same engine without it; a run's times are exact, so nothing depends on
how fast this machine is.
"""

import heapq
from collections import deque
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from cosyvoice_triton.constants import TOKEN_RATE
from cosyvoice_triton.llm.checkpoint import LLMLimits
from cosyvoice_triton.llm.engines.cuda.engine import CudaEngine
from cosyvoice_triton.llm.engines.cuda.scheduler import PagePool
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.interface import URGENT_TOKENS, Sampling
from cosyvoice_triton.profiles import H200

from tests.support.fake_decoder import FakeDecoder
from tests.support.waiting import Clock

NUMBERS = H200.llm
UNLIMITED = 1 << 30
# Measured, in microseconds: steps of so many rows, prefills of so many tokens.
STEPS = {1: 520, 4: 594, 8: 610, 16: 617, 32: 736, 64: 831, 96: 1074, 128: 1109, 160: 1237, 256: 1303}
PREFILLS = {64: 722, 192: 1026, 512: 1489, 1024: 1861, 2048: 2899, 4096: 5508}
LAUNCH_SECONDS, READBACK_SECONDS = 2e-4, 5e-4  # of the host
SUBMIT_SECONDS = 1e-4  # between two requests of a crowd


class EventClock(Clock):
    """Time that passes only when it is told to; what is due happens meanwhile."""

    def __init__(self):
        super().__init__(0.0)
        self._events = []

    def at(self, time, action):
        heapq.heappush(self._events, (time, len(self._events), action))

    def advance_to(self, time):
        while self._events and self._events[0][0] <= time:
            due, _, action = heapq.heappop(self._events)
            self.now = max(self.now, due)
            action()
        self.now = max(self.now, time)

    @property
    def next_event(self):
        return self._events[0][0] if self._events else None


class TimedDecoder(FakeDecoder):
    """A device that computes one launch after another, and how long it was busy."""

    def __init__(self, clock, max_prefill):
        super().__init__(lambda: 5, max_prefill=max_prefill)
        self._clock, self._free_at, self.busy = clock, 0.0, 0.0
        self._prefilled = deque(maxlen=2)
        self.stepped_at = []

    def prefill(self, pieces):
        super().prefill(pieces)
        self._compute(np.interp(self.prefills[-1], list(PREFILLS), list(PREFILLS.values())))
        self._prefilled.append(self._free_at)

    def await_prefills(self):
        if len(self._prefilled) == 2:
            self._clock.advance_to(self._prefilled[0])

    def step(self, rows, count):
        self._compute(count * np.interp(rows, list(STEPS), list(STEPS.values())))
        self.stepped_at.append(self._free_at)
        return super().step(rows, count)

    def _compute(self, microseconds):
        self._clock.advance_to(self._clock.now + LAUNCH_SECONDS)
        self._free_at = max(self._free_at, self._clock.now) + microseconds * 1e-6
        self.busy += microseconds * 1e-6

    def _computed(self):
        at = self._free_at
        return lambda: self._clock.advance_to(max(at, self._clock.now) + READBACK_SECONDS)


class Listener:
    """Who gets an answer, from `begins` on."""

    def __init__(self, begins, request):
        self.begins, self.request = begins, request
        self.reports = []  # time, tokens until then

    def seconds_to(self, tokens):
        """The time until so many tokens were reported."""
        return next(time for time, count in self.reports if count >= tokens) - self.begins

    @property
    def ended(self):
        return self.reports[-1][0]


class Simulation:
    """The engine with a clock of its own. `add` listeners, then `run`."""

    def __init__(self, numbers=NUMBERS, pages=100_000, **changes):
        numbers = replace(numbers, **changes)
        self.clock = EventClock()
        self.decoder = TimedDecoder(self.clock, numbers.max_prefill_tokens)
        self.pages = PagePool(pages + 1)
        limits = LLMLimits(1000, 4096)
        self.engine = CudaEngine(
            self.decoder, limits, self.pages, 512, numbers, hold_submissions=False, clock=self.clock,
            sleep=lambda seconds: None,
        )  # fmt: skip
        self.steps = 0

    def add(self, count=1, *, at=0.0, every=SUBMIT_SECONDS, prompt=176, max_tokens=60, **hints):
        request = GenerationRequest(np.arange(prompt), Sampling(max_tokens=max_tokens), (0,), **hints)
        listeners = [Listener(at + i * every, replace(request)) for i in range(count)]
        for listener in listeners:
            self.clock.at(listener.begins, lambda listener=listener: self._submit(listener))
        return listeners

    def _submit(self, listener):
        def report(chunk):
            reported = listener.reports[-1][1] if listener.reports else 0
            listener.reports.append((self.clock.now, reported + len(chunk.tokens)))

        self.engine.submit(listener.request, report)

    def run(self, until=60.0):
        while self.clock.now < until:
            if not self.engine.live:
                if self.clock.next_event is None:
                    return
                self.clock.advance_to(self.clock.next_event)
            self.steps += 1
            if (seconds := self.engine.step()) > 0:
                wake = self.clock.now + seconds
                self.clock.advance_to(min(wake, self.clock.next_event or wake))


def first_chunks(count, numbers=NUMBERS, **changes):
    """Sorted seconds until the listeners of a crowd have the tokens of their first chunk."""
    simulation = Simulation(numbers, **changes)
    crowd = simulation.add(count)
    simulation.run()
    return sorted(listener.seconds_to(URGENT_TOKENS) for listener in crowd)


def test_the_simulation_takes_the_time_that_was_measured_for_a_crowd():
    """12, 18, 30 and 62 ms on the machine of these step times, within a third."""
    for count, measured in ((1, 0.012), (16, 0.018), (64, 0.030), (256, 0.062)):
        assert 0.67 < median(first_chunks(count)) / measured < 1.34


def test_of_a_large_crowd_most_are_served_earlier_because_prompts_wait_and_the_last_hardly_later():
    with_rule, without = first_chunks(256), first_chunks(256, prefill_batch=UNLIMITED)
    assert median(with_rule) < 0.8 * median(without) and with_rule[-1] < 1.2 * without[-1]


def test_the_prompts_of_a_crowd_come_before_steps():
    assert median(first_chunks(140)) < median(first_chunks(140, prefill_tokens_per_step=1)) - 0.001


@pytest.mark.parametrize(("rule", "prompt"), [("prefill_tokens_per_step", 700), ("prefill_launch_tokens", 16)])
def test_however_many_prompts_come_an_answer_that_runs_waits_30_ms_for_a_step_at_most(rule, prompt):
    """Long prompts at once, or short ones one by one: a launch of few tokens takes as long as one of 512 more."""

    def longest_wait(**changes):
        simulation = Simulation(**changes)
        simulation.add(max_tokens=400, urgent_tokens=0)
        simulation.add(400, at=0.01, prompt=prompt, max_tokens=1, urgent_tokens=0)
        simulation.run()
        return max(np.diff(simulation.decoder.stepped_at))

    off = UNLIMITED if rule == "prefill_tokens_per_step" else 0
    assert longest_wait() < 0.03 and longest_wait(**{rule: off}) > 0.04


@pytest.mark.parametrize("listeners", [1, 8])
def test_few_listeners_have_their_tokens_sooner_if_steps_are_read_back_together(listeners):
    together = median(first_chunks(listeners))
    assert together < median(first_chunks(listeners, few_rows=0)) - 0.0005
    assert together < median(first_chunks(listeners, steps_per_readback=1)) - 0.0005


def test_with_many_listeners_single_steps_are_read_back_so_that_newcomers_wait_less():
    def seconds(**changes):
        simulation = Simulation(**changes)
        newcomers = [simulation.add(at=0.02 + 0.007 * i, max_tokens=30)[0] for i in range(60)]
        simulation.add(64, max_tokens=400)
        simulation.run()
        return median(newcomer.seconds_to(URGENT_TOKENS) for newcomer in newcomers)

    assert seconds() < seconds(few_rows=UNLIMITED)


def answers_played(listeners, **changes):
    """The GPU's share for these answers of 8 s, whose listeners play them from their first chunk on."""
    simulation = Simulation(**changes)
    crowd = simulation.add(listeners, max_tokens=200, played=True)
    simulation.run()
    for listener in crowd:
        begins = listener.begins + listener.seconds_to(URGENT_TOKENS)
        for (_, had), (time, _) in zip(listener.reports[1:], listener.reports[2:], strict=False):
            assert time < begins + had / TOKEN_RATE  # no gap
    return simulation.decoder.busy / max(listener.ended for listener in crowd)


def test_answers_that_are_played_leave_the_gpu_to_first_chunks_but_come_faster_than_speech():
    assert answers_played(32) < 0.3 and answers_played(32, decode_interval_seconds=0.0) > 0.8


def test_many_answers_that_are_played_leave_more_of_the_gpu():
    assert answers_played(60) < 0.8 * answers_played(60, crowd_rows=UNLIMITED)
    assert answers_played(40) == answers_played(40, crowd_rows=UNLIMITED)


def test_who_plays_nothing_does_not_wait_for_those_who_do():
    simulation = Simulation(decode_interval_seconds=1.0)
    played = simulation.add(5, max_tokens=20, urgent_tokens=0, played=True)
    (other,) = simulation.add(max_tokens=20, urgent_tokens=0)
    simulation.run()
    assert other.ended < 0.1 and all(listener.ended > 2 for listener in played)


def test_the_mean_rate_is_kept_although_a_step_comes_late():
    """Someone else's prompts delay some steps of an answer that is played."""

    def seconds(newcomers):
        simulation = Simulation()
        (listener,) = simulation.add(max_tokens=200, played=True)
        for i in range(newcomers):
            simulation.add(20, at=0.1 + 0.1 * i, max_tokens=1)
        simulation.run()
        return listener.ended

    assert abs(seconds(5) - seconds(0)) < NUMBERS.decode_interval_seconds


def test_a_request_that_waits_for_pages_is_started_when_they_are_free_and_costs_nothing_until_then():
    simulation = Simulation(pages=8, decode_interval_seconds=1.0)  # pages of two answers
    first, longer = (simulation.add(max_tokens=tokens, urgent_tokens=0, played=True)[0] for tokens in (30, 60))
    (third,) = simulation.add(at=0.01, max_tokens=30, played=True)
    simulation.run()
    assert first.ended < third.begins + third.seconds_to(3) < first.ended + 0.1 < longer.ended
    assert simulation.steps < 80 and simulation.pages.free == 8 and simulation.engine.live == 0
