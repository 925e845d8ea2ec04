"""When the engine cuda launches prompts and steps, and what those who submit and those who read see meanwhile."""

import asyncio
import threading

import numpy as np
import pytest
from cosyvoice_triton.llm.checkpoint import LLMLimits
from cosyvoice_triton.llm.engines.cuda.engine import CudaEngine
from cosyvoice_triton.llm.engines.cuda.page_pool import PagePool
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.interface import Sampling
from cosyvoice_triton.profiles import LLMNumbers

from tests.support.fake_decoder import FakeDecoder

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

    engine = Engine(hold_submissions=waits, before={launch: submit_meanwhile})
    engine.start()
    try:
        assert engine.send().wait(SECONDS)
        others[0].join(SECONDS)
        assert waited == [waits] and ended[0].wait(SECONDS)
    finally:
        engine.close()


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
    engine = Engine(numbers=LLMNumbers(decode_interval_seconds=60))
    paced = GenerationRequest(np.arange(20), Sampling(max_tokens=100), (0,), urgent_tokens=3, played=True)
    told = threading.Event()
    engine.submit(paced, lambda item: told.set())
    engine.start()
    try:
        assert told.wait(SECONDS)
        assert engine.send().wait(SECONDS)
    finally:
        engine.close()
