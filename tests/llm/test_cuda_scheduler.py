"""Slots, pages and answers of the engine cuda, with a fake of the device that samples random tokens; when it launches
prompts and steps, and what those who submit and those who read see meanwhile."""

import asyncio
import random
import threading
from collections import deque
from contextlib import closing

import numpy as np
import pytest
from cosyvoice_triton.llm.checkpoint import LLMLimits
from cosyvoice_triton.llm.engines.cuda.engine import CudaEngine
from cosyvoice_triton.llm.engines.cuda.operations import FAULT, PAGE
from cosyvoice_triton.llm.engines.cuda.scheduler import PagePool, Scheduler, SequenceStatus, TokenSequence
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.interface import URGENT_TOKENS, Sampling
from cosyvoice_triton.profiles import LLMNumbers

from tests.support.fake_decoder import END, FIRST, FakeDecoder

SLOTS = 16


class Served:
    """A scheduler with a queue, as in the engine; `answers` by sequence."""

    def __init__(self, sample=lambda: 5, pages=100, numbers=None):
        self.model = FakeDecoder(sample)
        self.pages = PagePool(pages + 1)
        self.numbers = numbers or LLMNumbers()
        self.scheduler = Scheduler(self.model, SLOTS, self.pages, self.numbers)
        self.waiting = deque()
        self.prefill_per_step, self.launched = 400, 0
        self.answers: dict[TokenSequence, list] = {}

    def add(self, prompt=10, max_tokens=20, **hints):
        request = GenerationRequest(np.arange(prompt), Sampling(max_tokens=max_tokens), (END,), **hints)
        sequence = TokenSequence(request, lambda item: None, numbers=self.numbers)
        self.waiting.append(sequence)
        self.answers[sequence] = []
        return sequence

    def step(self, *, paced=True):
        self.scheduler.admit(self.waiting)
        while sum(self.model.prefills[self.launched :]) < self.prefill_per_step and self.scheduler.prefill():
            pass
        self.launched = len(self.model.prefills)
        answers = self.scheduler.answers(self.scheduler.launch(paced=paced))
        for answer in answers:
            self.answers[answer.sequence].append(answer.item)
            if answer.ends:
                self.scheduler.remove(answer.sequence)
        return answers

    def run(self):
        steps = 0
        while self.waiting or self.scheduler.live:
            self.step()
            steps += 1
            assert steps < 10_000, "a request does not end"

    def tokens(self, sequence):
        return [token for chunk in self.answers[sequence] for token in chunk.tokens]

    def check_pages(self):
        held = [page for row in self.scheduler.live for page in row.pages]
        assert len(held) == len(set(held)) and len(held) + self.pages.free == self.pages.total


def test_thirty_thousand_random_changes_lose_no_page_and_no_token():
    """Requests come, are cancelled, end by an end token, their length or a fault; more come than fit."""
    rng = random.Random(0)

    def sample():
        number = rng.random()
        return FAULT if number < 0.01 else END - FIRST if number < 0.2 else int(90 * number)

    served = Served(sample, pages=40)
    changes, ended, cancelled, most_waiting = 0, 0, 0, 0
    while changes < 30_000:
        for _ in range(rng.randrange(12)):
            if len(served.waiting) < 20:
                served.add(rng.randrange(1, 150), rng.randrange(1, 30))
                changes += 1
        live = [row for row in (*served.scheduler.live, *served.waiting) if not row.cancelled]
        for sequence in rng.sample(live, min(len(live), rng.randrange(3))):
            sequence.cancelled = True
            changes, cancelled = changes + 1, cancelled + 1
        ends = [answer for answer in served.step() if answer.ends]
        changes, ended = changes + len(ends), ended + len(ends)
        most_waiting = max(most_waiting, len(served.waiting))
        served.check_pages()
        assert len(served.scheduler.live) <= SLOTS
    served.run()
    assert served.pages.free == served.pages.total == 40 and most_waiting == 20
    assert min(ended, cancelled) > 3_000
    for sequence, items in served.answers.items():
        device = served.model.of_request.get(id(sequence.request))
        chunks = [item for item in items if not isinstance(item, Exception)]
        told = [token for chunk in chunks for token in chunk.tokens]
        if not sequence.cancelled:
            assert told == device.sampled[: len(told)] and len(device.sampled) - len(told) < 25
            assert device.faulty or told == device.sampled
            reason = "stop" if told and told[-1] == END else "length"
            assert device.faulty == isinstance(items[-1], FloatingPointError)
            assert device.faulty or [chunk.finish_reason for chunk in chunks][-1] == reason
        else:
            assert device is None or told == device.sampled[: len(told)]


def test_prompts_are_prefilled_in_pieces_together_with_others():
    served = Served()
    sequences = [served.add(prompt) for prompt in (31, 121, 1)]
    served.run()
    assert served.model.prefills == [104, 48] and served.model.fills == [2, 1]
    assert all(served.tokens(sequence) == [FIRST + 5] * 20 for sequence in sequences)


def test_a_launch_has_no_more_prompts_than_listeners_may_wait():
    """Beside those that wait already."""
    served = Served(numbers=LLMNumbers(prefill_batch=3))
    rows = [served.add(10)]
    served.step()
    rows += [served.add(10) for _ in range(4)]
    served.step()
    assert [row.status is SequenceStatus.RUNNING for row in rows] == [True, True, True, False, False]
    served.run()
    assert all(served.tokens(row) == [FIRST + 5] * 20 for row in rows)


@pytest.mark.parametrize("urgent", [13, URGENT_TOKENS])
def test_no_further_step_is_launched_than_those_that_the_listener_waits_for(urgent):
    served = Served()
    row = served.add(max_tokens=60, urgent_tokens=urgent, played=True)
    served.step()
    while not served.scheduler.idle:
        served.step(paced=False)
    assert sum(served.model.counts) == row.generated == urgent and max(served.model.counts) == 3
    assert sum(len(chunk.tokens) for chunk in served.answers[row]) == urgent
    assert [len(chunk.tokens) for chunk in served.answers[row]] == [3, urgent - 3]


@pytest.mark.parametrize(("silent", "awaited"), [(0, 19), (1, 19), (7, 25), (20, 38), (200, 69)])
def test_a_listener_waits_for_as_many_tokens_more_as_the_answer_begins_with_silent_ones(silent, awaited):
    """But for one, which is spoken, too. One of silent tokens alone is not urgent for ever."""
    sampled = iter([7] * silent + [5] * 100)
    served = Served(lambda: next(sampled))
    row = served.add(max_tokens=200, urgent_tokens=19, played=True, silent_ids=frozenset({FIRST + 7}))
    while not served.scheduler.idle or served.waiting:
        served.step(paced=False)
    assert row.generated == awaited and sum(len(chunk.tokens) for chunk in served.answers[row]) == awaited


def test_tokens_are_reported_when_the_listener_can_use_them():
    """The first ones, those of the first chunk at once, then as many as keep the number of reports small."""
    served = Served()
    sequence = served.add(max_tokens=212)
    sent, late = [], []
    while served.waiting or served.scheduler.live:
        for answer in served.step():
            sent.append(len(answer.item.tokens))
        late.append((sum(sent), sequence.generated - sum(sent)))
    assert sent[0] == 3 and sent[0] + sent[1] == URGENT_TOKENS
    assert len(sent) <= 12 and sum(sent) == 212
    assert all(buffered < max(reported / 2, URGENT_TOKENS) and buffered < 25 for reported, buffered in late)
    follower = served.add(max_tokens=100, urgent_tokens=0)  # a listener who has audio
    served.run()
    sizes = [len(chunk.tokens) for chunk in served.answers[follower]]
    assert sizes[:3] == [3] * 3 and sizes == sorted(sizes[:-1]) + sizes[-1:]


def test_each_of_a_crowd_has_two_reports_until_its_first_chunk():
    """Although its steps are read back one by one."""
    served = Served()
    crowd = [served.add(max_tokens=30) for _ in range(12)]
    served.run()
    assert all([len(chunk.tokens) for chunk in served.answers[each]][:2] == [3, 15] for each in crowd)


def test_requests_wait_for_pages_in_the_order_of_their_arrival():
    served = Served(pages=4)
    large = [served.add(prompt=2 * PAGE, max_tokens=10) for _ in range(2)]  # three pages each
    small = served.add(max_tokens=10)
    served.step()
    assert served.scheduler.live == [large[0]] and list(served.waiting) == [large[1], small]
    large[0].cancelled = True
    served.step()
    assert served.scheduler.live == [large[1], small]
    served.run()
    assert served.pages.free == 4 and served.tokens(small) == [FIRST + 5] * 10


def test_a_page_is_not_released_twice():
    pages = PagePool(4)
    taken = pages.allocate(2)
    assert pages.allocate(2) is None
    pages.release(taken)
    with pytest.raises(AssertionError, match="are not all allocated"):
        pages.release(taken)
    assert sorted(pages.allocate(3)) == [1, 2, 3]


SECONDS = 30


class Engine(CudaEngine):
    """The engine over a fake of the device, with the order of what it does in `events`. before: called before the
    first launch of that name."""

    def __init__(self, *, hold_submissions=False, numbers=None, before=None, **options):
        self.events, self._before = [], before or {}
        decoder = FakeDecoder(lambda: 5, on_launch=self._on_launch)
        limits, numbers = LLMLimits(1000, 4096), numbers or LLMNumbers()
        pages = PagePool(1000)
        super().__init__(decoder, limits, pages, 32, numbers, hold_submissions=hold_submissions, **options)

    def _on_launch(self, name):
        self.events.append(name)
        if action := self._before.pop(name, None):
            action()

    def send(self, max_tokens=2):
        """Submit a request; return an event that its end sets."""
        ended = threading.Event()

        def report(item):
            self.events.append("report")
            if item.finish_reason:
                ended.set()

        sampling = Sampling(max_tokens=max_tokens, min_tokens=max_tokens)
        self.submit(GenerationRequest(np.arange(20), sampling, (0,)), report)
        return ended


@pytest.mark.parametrize(("most", "before_the_step"), [(16384, 2), (100, 1)])
def test_requests_that_come_while_prompts_are_launched_are_prefilled_before_the_step(most, before_the_step):
    """Up to so many tokens."""
    engine = Engine(
        numbers=LLMNumbers(prefill_tokens_per_step=most), before={"prefill": lambda: ended.append(engine.send())}
    )
    ended = [engine.send()]
    while not all(event.is_set() for event in ended):
        engine.step()
    assert engine.events.index("step") - engine.events.index("prefill") >= before_the_step
    assert engine.events.count("prefill") == 2
    assert engine.events[: engine.events.index("step")].count("prefill") == before_the_step


async def test_readers_have_what_was_launched_before_prompts_before_the_prompts_are_waited_for():
    engine = Engine(before={"step": lambda: engine.send()})  # its prompt is launched while the only step is computed
    request = GenerationRequest(np.arange(20), Sampling(max_tokens=1), (0,))
    loop = asyncio.get_running_loop()
    wake = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *call: engine.events.append("woken") or wake(*call)
    answer = engine.generate(request)
    reader = asyncio.ensure_future(anext(answer))
    await asyncio.sleep(0)  # it has submitted the request
    engine.step()
    assert engine.events == ["prefill", "await", "step"]
    engine.step()
    assert engine.events[3:6] == ["prefill", "woken", "await"]
    assert (await reader).finish_reason == "length"
    await answer.aclose()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("launch", ["prefill", "step"])
def test_whoever_submits_waits_for_a_launch_on_a_gpu_but_not_for_work_of_the_cpu(launch, waits):
    others, waited, ended = [], [], []

    def submit_meanwhile():
        others.append(threading.Thread(target=lambda: ended.append(engine.send())))
        others[0].start()
        others[0].join(0.3 if waits else SECONDS)
        waited.append(others[0].is_alive())

    with closing(Engine(hold_submissions=waits, before={launch: submit_meanwhile})) as engine:
        engine.start()
        assert engine.send().wait(SECONDS)
        others[0].join(SECONDS)
        assert waited == [waits] and ended[0].wait(SECONDS)


def test_whoever_submits_a_crowd_gives_way_to_the_engine():
    """After 8 requests, 16, and so on."""
    naps = []
    engine = Engine(sleep=naps.append)
    counts = []
    for _ in range(17):
        engine.send()
        counts.append(len(naps))
    assert counts == [0] * 7 + [1] * 8 + [2] * 2 and naps == [5e-5] * 2


def test_an_engine_that_rests_is_woken_by_a_request():
    """Its only request is paced, and its next step due in a minute."""
    paced = GenerationRequest(np.arange(20), Sampling(max_tokens=100), (0,), urgent_tokens=3, played=True)
    told = threading.Event()
    with closing(Engine(numbers=LLMNumbers(decode_interval_seconds=60))) as engine:
        engine.submit(paced, lambda item: told.set())
        engine.start()
        assert told.wait(SECONDS)
        assert engine.send().wait(SECONDS)
