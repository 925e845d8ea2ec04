"""The engine: streams and voices share bounded memory, and free it."""

import weakref

import pytest
import torch
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.dit_flow import DiTStreaming
from cosyvoice_triton.token2wav.flow.kv_cache import PromptCaches, StreamCachePool

from tests.support.streams import VOICES_BYTES, ids, pieces, prompt, step


@pytest.fixture
def of_the_dit(flow_of, vocoder):
    return lambda prompts, streams=9: Token2Wav(flow_of("dit", prompts=prompts, streams=streams), vocoder)


@pytest.fixture
def size(of_the_dit):
    """The bytes of a voice of 12 tokens."""
    return of_the_dit(PromptCaches(0))._flow._pool.prompt_bytes(24)


def test_voices_prefilled_together_equal_each_prefilled_alone(dit, of_the_dit):
    """Of different lengths, one without a prompt; and their streams need no prefill."""
    together = of_the_dit(PromptCaches(VOICES_BYTES))
    voices = [prompt(1, 12), prompt(2, 30), prompt(3, 0), prompt(4, 7)]
    together.prefill(voices)
    assert [together.prefill_frames(voice) for voice in [*voices, prompt(5, 9)]] == [0, 0, 0, 0, 18]
    for voice in voices:
        stream, alone = together.open(voice), dit.open(voice)
        ours, theirs = ((of.attention.keys, of.attention.values, of.history) for of in (stream.prompt, alone.prompt))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        together.close(stream)
        dit.close(alone)


def test_a_voice_prefilled_ahead_is_dropped_if_there_is_no_room(of_the_dit):
    caches = PromptCaches(1)
    of_the_dit(caches).prefill([prompt(1), prompt(2)])
    assert (len(caches), caches.nbytes) == (0, 0)


def test_streams_of_one_voice_share_its_prompt_cache(dit, prompts):
    first, second = dit.open(prompt(5)), dit.open(prompt(5))
    assert len(prompts) == 1
    assert first.prompt is second.prompt
    before = first.prompt.attention.keys.clone()
    step(dit, first, pieces(dit, ids(5, 20), [10])[0])
    torch.testing.assert_close(second.prompt.attention.keys, before)


def test_streams_are_limited_and_release_their_slots(dit):
    streams = [dit.open(prompt(5)) for _ in range(8)]
    with pytest.raises(UnavailableError, match="all 8 streams"):
        dit.open(prompt(5))
    for stream in streams:
        dit.close(stream)
    dit.close(dit.open(prompt(5)))


def test_prompt_caches_are_limited_in_bytes_and_the_least_recently_used_idle_one_is_evicted(of_the_dit, size):
    prompts = PromptCaches(2 * size)
    engine = of_the_dit(prompts)
    live = engine.open(prompt(0))
    assert live.prompt.nbytes == size
    for seed in (1, 2, 3):
        engine.close(engine.open(prompt(seed)))
        assert prompts.nbytes == 2 * size
    assert engine.open(prompt(0)).prompt is live.prompt
    third = engine.open(prompt(3))
    with pytest.raises(UnavailableError, match="no room for another voice: .* the 2 voices"):
        engine.open(prompt(4))
    engine.close(third)
    engine.close(engine.open(prompt(4)))
    assert len(prompts) == 2


def test_a_voice_without_room_waits_for_it_in_turn_and_one_that_never_has_room_is_refused(of_the_dit, size):
    engine = of_the_dit(PromptCaches(2 * size))
    first, short = prompt(0), prompt(3, 5)
    assert engine.fitting([first, prompt(1), first, prompt(2)]) == [True, True, True, False]
    live, idle = engine.open(first), engine.open(prompt(1))
    assert engine.fitting([prompt(2), first, short, prompt(1)]) == [False, True, False, True]
    engine.close(idle)
    assert engine.fitting([prompt(2), prompt(1)]) == [True, False]  # the idle voice would be evicted
    assert engine.fitting([short, prompt(2)]) == [True, False]
    assert engine.fitting([prompt(4, 20), short, first]) == [False, False, True]  # it takes nobody's turn
    engine.close(live)
    assert engine.fitting([prompt(2), prompt(1)]) == [True, True]
    assert engine.fitting([prompt(4, 60)]) == [True]
    with pytest.raises(UnavailableError, match="no room for another voice"):
        engine.open(prompt(4, 60))


def test_room_for_new_voices_is_made_before_they_are_prefilled_and_evicted_ones_are_freed(
    of_the_dit, size, monkeypatch
):
    """At no time is there more than the limit, whoever still refers to a stream that has ended."""
    prefill, before, prompts = DiTStreaming._prefill, [], PromptCaches(2 * size)
    engine = of_the_dit(prompts)
    ended = engine.open(prompt(0))
    cache = weakref.ref(ended.prompt)
    engine.close(ended)
    monkeypatch.setattr(DiTStreaming, "_prefill", lambda *of: before.append((prompts.nbytes, cache())) or prefill(*of))
    engine.prefill([prompt(1), prompt(2)])
    assert before == [(0, None)] and len(prompts) == 2


def test_idle_voices_are_evicted_if_the_free_memory_is_in_pieces(dit, prompts, monkeypatch):
    live = dit.open(prompt(0))
    dit.close(dit.open(prompt(1)))
    prefill, left = DiTStreaming._prefill, [torch.OutOfMemoryError("CUDA out of memory"), None]

    def fail_once(*of):
        if error := left.pop(0):
            raise error
        return prefill(*of)

    monkeypatch.setattr(DiTStreaming, "_prefill", fail_once)
    dit.close(dit.open(prompt(2)))
    assert left == [] and len(prompts) == 2 and dit.fitting([prompt(0)]) == [True]
    dit.close(live)


@pytest.mark.parametrize("full", [True, False], ids=["no slot", "a slot that cannot be filled"])
def test_a_stream_that_cannot_be_opened_releases_its_prompt_cache(full, of_the_dit, vocoder, monkeypatch):
    prompts, free = PromptCaches(VOICES_BYTES), len(vocoder.pool._free)
    engine = of_the_dit(prompts, streams=1)
    live = [engine.open(prompt(0))] if full else []
    with monkeypatch.context() as patch:
        if not full:
            patch.setattr(StreamCachePool, "acquire", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error")))
        with pytest.raises((UnavailableError, RuntimeError), match="all 1 streams" if full else "CUDA error"):
            engine.open(prompt(1))
    for stream in live:
        engine.close(stream)
    assert all(entry.streams == 0 for entry in prompts._entries.values())
    assert len(vocoder.pool._free) == free
