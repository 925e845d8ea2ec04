"""When the engine cuda launches prompts and steps, and what those who submit and those who read see meanwhile."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cosyvoice_triton.llm.engines import threaded
from cosyvoice_triton.llm.engines.cuda.engine import load_engine
from cosyvoice_triton.llm.engines.interface import GenerationRequest, Resources
from cosyvoice_triton.llm.interface import Sampling
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer

from tests.support.llm_fixtures import llm_dir  # noqa: F401

SECONDS = 30


@pytest.fixture
def engine(llm_dir):  # noqa: F811
    tokenizer = LLMTokenizer.from_dir(llm_dir)
    engine = load_engine(llm_dir, tokenizer, 32, Resources(1.0, 0.0, "KIND_CPU"))
    yield engine
    engine.close()


def submit(engine, max_tokens=2, on_tokens=None):
    """A request whose answer sets the event that is returned."""
    ended = threading.Event()

    def report(item):
        if on_tokens:
            on_tokens(item)
        if item.finish_reason:
            ended.set()

    request = GenerationRequest(np.arange(20), Sampling(max_tokens=max_tokens, min_tokens=max_tokens), (0,))
    engine.submit(request, report)
    return ended


@pytest.mark.parametrize(("most", "before_the_step"), [(16384, 2), (100, 1)])
def test_requests_that_come_while_prompts_are_launched_are_prefilled_before_the_step(
    engine, monkeypatch, most, before_the_step
):
    """Up to so many tokens."""
    monkeypatch.setattr("cosyvoice_triton.llm.engines.cuda.engine.PREFILL_PER_STEP", most)
    events, ended = [], []
    prefill, step = engine._decoder.prefill, engine._decoder.step

    def observed_prefill(pieces):
        events.append("prefill")
        if len(events) == 1:
            ended.append(submit(engine))
        prefill(pieces)

    def observed_step(rows, count):
        events.append("step")
        return step(rows, count)

    engine._decoder.prefill, engine._decoder.step = observed_prefill, observed_step
    ended.append(submit(engine))
    assert all(event.wait(SECONDS) for event in ended)
    assert events.index("step") == before_the_step and events.count("prefill") == 2


def test_what_was_launched_before_prompts_is_reported_before_the_prompts_are_waited_for(engine):
    events, ended = [], []
    step = engine._decoder.step

    def observed_step(rows, count):
        if not ended:
            ended.append(submit(engine))  # its prompt is launched while the first request's only step is computed
        return step(rows, count)

    engine._decoder.step = observed_step
    wake = engine._wake_readers
    engine._wake_readers = lambda: (events.append("woken"), wake())
    engine._decoder.await_prefills = lambda: events.append("awaited")
    first = submit(engine, max_tokens=1, on_tokens=lambda item: events.append("reported"))
    assert first.wait(SECONDS) and ended[0].wait(SECONDS)
    reported = events.index("reported")
    assert events[reported : reported + 3] == ["reported", "woken", "awaited"]
    assert events[:reported].count("awaited") == 1  # for its own prompt


@pytest.mark.parametrize(("device", "waits"), [("cuda", True), ("cpu", False)])
@pytest.mark.parametrize("launch", ["prefill", "step"])
def test_whoever_submits_waits_for_a_launch_but_not_for_work_of_the_cpu(engine, launch, device, waits):
    assert submit(engine).wait(SECONDS)  # the engine's thread runs
    engine._device = torch.device(device)
    work, others, waited = getattr(engine._decoder, launch), [], []

    def observed(*args):
        if not others:
            others.append(threading.Thread(target=lambda: ended.append(submit(engine))))
            others[0].start()
            others[0].join(0.3)
            waited.append(others[0].is_alive())
        return work(*args)

    setattr(engine._decoder, launch, observed)
    ended = [submit(engine)]
    assert ended[0].wait(SECONDS)
    others[0].join(SECONDS)
    assert waited == [waits] and ended[1].wait(SECONDS)


def test_whoever_submits_a_crowd_gives_way_to_the_engine(engine, monkeypatch):
    naps = []
    monkeypatch.setattr(threaded, "time", SimpleNamespace(sleep=naps.append))
    with engine._wake:  # the engine cannot take them
        ended = [submit(engine) for _ in range(threaded.GIVE_WAY_REQUESTS - 1)]
        assert not naps
        ended += [submit(engine) for _ in range(threaded.GIVE_WAY_REQUESTS + 2)]
    assert naps == [threaded.GIVE_WAY_SECONDS] * 2
    assert all(event.wait(SECONDS) for event in ended)
