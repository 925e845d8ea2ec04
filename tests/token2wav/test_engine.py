"""The engine with the small networks of the fixtures: upstream's streaming loops, isolation of streams, limits,
memory that streams and voices share and free."""

import asyncio
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import HOP_SAMPLES
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.dit_flow import DiTStreaming
from cosyvoice_triton.token2wav.flow.kv_cache import PromptCaches, StreamCachePool
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape
from cosyvoice_triton.token2wav.stream import FADE_SAMPLES, LOUD, without_click

from tests.support.streams import VOICES_BYTES, Piece, ids, pieces, prompt, spoken, step


@pytest.fixture(params=["dit", "unet"])
def engine(request):
    return request.getfixturevalue(request.param)


def fail(monkeypatch: pytest.MonkeyPatch, subject: object, name: str, fails: Callable[..., Exception | None]) -> None:
    """Let a method raise what `fails` returns for its arguments."""
    method = getattr(subject, name)

    def failing(*args):
        if error := fails(*args):
            raise error
        return method(*args)

    monkeypatch.setattr(subject, name, failing)


def test_a_batch_that_needs_too_much_memory_is_rendered_in_parts(engine, vocoder, monkeypatch):
    piece = Piece(ids(1, 20), final=True)
    expected = [step(engine, engine.open(prompt(seed)), piece) for seed in range(3)]
    chunks = [piece.of(engine, engine.open(prompt(seed))) for seed in range(3)]
    full = torch.OutOfMemoryError("CUDA out of memory")
    fail(monkeypatch, engine._flow._solve, "run", lambda streams, *_: full if len(streams) > 1 else None)
    fail(monkeypatch, vocoder._plain, "render", lambda _, mel, *rest: full if len(mel) > 1 else None)
    for audio, alone in zip(engine.step(chunks), expected, strict=True):
        np.testing.assert_allclose(audio, alone, atol=1e-3)


@pytest.mark.parametrize("fault", ["in the flow", "in the vocoder", "not a number"])
def test_one_bad_chunk_of_a_batch_gets_an_error_and_the_others_their_audio(engine, fault, vocoder, monkeypatch):
    tokens = ids(1, 40)
    plans = pieces(engine, tokens, [20])
    streams = [engine.open(prompt(seed)) for seed in range(3)]
    expected = [spoken(engine, prompt(seed), plans) for seed in (0, 2)]
    first = engine.step([plans[0].of(engine, stream) for stream in streams])
    chunks = [plans[1].of(engine, stream) for stream in streams]
    if fault == "in the flow":
        bad = chunks[1], streams[1]  # what a solve gets

        def refused(given, *_):
            return RuntimeError("bad") if any(each is one for each in given for one in bad) else None

        fail(monkeypatch, engine._flow._solve, "run", refused)
    elif fault == "in the vocoder":
        slot = streams[1].vocoder.slot
        at_slot = lambda begun, mel, slots, *_: RuntimeError("bad") if slot in slots else None  # noqa: E731
        fail(monkeypatch, vocoder._plain, "render", at_slot)
    else:
        vocoder.pool.speech[streams[1].vocoder.slot] = torch.nan
    results = engine.render(chunks)
    assert isinstance(results[1], FloatingPointError if fault == "not a number" else RuntimeError)
    for index, whole in zip((0, 2), expected, strict=True):
        np.testing.assert_allclose(np.concatenate([first[index], results[index]]), whole, atol=1e-3)
    for stream in streams:
        engine.close(stream)


def test_a_dead_gpu_is_an_error_for_the_whole_batch(dit, monkeypatch):
    chunks = [Piece(ids(1, 20), final=True).of(dit, dit.open(prompt(seed))) for seed in range(2)]
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    fail(monkeypatch, dit._flow._solve, "run", lambda *_: error)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        dit.render(chunks)


def test_a_stream_whose_memory_is_ahead_of_its_audio_cannot_go_on(dit):
    """In a batch of several solves, a stream may have been stored when a later solve fails: tried again, it would be
    stored twice and then speak from the wrong place."""
    stream = dit.open(prompt(1))
    chunk = Piece(ids(1, 20), final=False).of(dit, stream)
    dit._flow._pool.advance(stream.cache, dit._flow._pool.row(stream, chunk.new))
    with pytest.raises(RuntimeError, match="ahead of its audio"):
        dit.step([chunk])


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Piece(np.array([0, 1, 2, 120, 4]), final=False), "speech token 120 is outside 0..119"),
        (Piece(np.array([0, -1, 2, 3, 4]), final=False), "speech token -1 is outside"),
        (Piece(np.arange(20), final=False, offset=7), "token_offset is 7, but 0 tokens"),
        (Piece(np.arange(3), final=False), "3 speech tokens add 0 to the 0"),
        (Piece(np.zeros(201, int), final=True), "201 speech tokens; the limit is 200"),
    ],
)
def test_invalid_tokens_of_a_chunk_are_named(engine, piece, message):
    stream = engine.open(prompt(8))
    with pytest.raises(ValueError, match=message):
        piece.of(engine, stream)


def test_a_chunk_that_makes_a_stream_too_long_is_refused_and_the_stream_may_end_at_the_limit(engine):
    tokens = ids(8, 201)
    stream = engine.open(prompt(8))
    step(engine, stream, pieces(engine, tokens, [190])[0])
    with pytest.raises(ValueError, match="the stream has 201 speech tokens; the limit is 200"):
        pieces(engine, tokens, [190])[1].of(engine, stream)
    assert len(step(engine, stream, pieces(engine, tokens[:-1], [190])[1])) > 0


def test_first_chunks_are_those_of_the_first_hop(dit):
    stream, most = dit.open(prompt(0)), dit.limits.first_chunk_tokens
    of_limit, beyond = (dit.chunk(stream, ids(0, count), final=True) for count in (most, most + 1))
    assert dit.is_first_chunk(of_limit) and not dit.is_first_chunk(beyond)
    dit.step([of_limit])
    assert not dit.is_first_chunk(dit.chunk(stream, ids(0, 1), final=True))


def test_warm_up_does_not_change_later_audio(dit, unet):
    for engine in (dit, unet):
        cold = engine.whole(prompt(7), ids(7, 21))
        engine.warm_up()
        np.testing.assert_array_equal(engine.whole(prompt(7), ids(7, 21)), cold)


def test_a_prompt_without_look_ahead_is_refused(dit):
    with pytest.raises(ValueError, match="the prompt has 2 speech tokens"):
        dit.open(prompt(9, tokens=2))


def test_the_noise_is_periodic():
    tape = NoiseTape(torch.arange(5.0)[:, None])
    assert tape.read(3, 9)[:, 0].tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert tape.read(11, 2)[:, 0].tolist() == [1, 2]


def test_only_an_utterance_that_begins_loudly_is_faded_in():
    loud = np.full(2 * FADE_SAMPLES, 0.5, np.float32)
    faded = without_click(loud)
    assert faded[0] == 0 and (np.diff(faded[:FADE_SAMPLES]) > 0).all() and (faded[FADE_SAMPLES:] == 0.5).all()
    assert (loud == 0.5).all(), "the engine's own audio stays as it is"
    for quiet in (np.append(np.full(FADE_SAMPLES, LOUD, np.float32), loud), loud[:0]):
        assert without_click(quiet) is quiet
    assert without_click(loud[:7])[0] == 0


@pytest.mark.parametrize("engine", ["dit", "unet", "cosyvoice3"], indirect=True)
def test_the_first_audio_of_a_stream_and_of_a_whole_utterance_is_faded_in_and_no_later_one(engine):
    voice, tokens = prompt(4, 25), ids(4, 60)
    stream = engine.open(voice)
    first, later, _ = (step(engine, stream, piece) for piece in pieces(engine, tokens, [25, 25]))
    engine.close(stream)
    assert first[0] == 0 == engine.whole(voice, tokens)[0]
    assert np.abs(first[FADE_SAMPLES : 2 * FADE_SAMPLES]).max() > LOUD and later[0] != 0


def test_the_solve_of_a_whole_utterance_asks_before_each_step(dit):
    asked = []

    def before_step():
        asked.append(1)
        if len(asked) == 3:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        dit.whole(prompt(7), ids(7, 21), 1.0, before_step)
    assert len(asked) == 3 and np.isfinite(dit.whole(prompt(7), ids(7, 21))).all()


def test_whole_utterances_of_a_batch_equal_the_same_utterances_alone(dit, unet):
    """Voices and utterances have different lengths, so all but the longest are padded."""
    utterances = [
        (prompt(seed, tokens), ids(seed, length)) for seed, tokens, length in [(7, 12, 21), (8, 0, 40), (9, 20, 3)]
    ]
    for engine in (dit, unet):
        for together, utterance in zip(engine.whole_batch(utterances), utterances, strict=True):
            np.testing.assert_allclose(together, engine.whole(*utterance), atol=1e-3, rtol=0)


def test_an_invalid_utterance_of_a_batch_is_named(dit):
    good = (prompt(7), ids(7, 21))
    for tokens, message in [
        (ids(7, 0), "is empty"),
        (np.array([120]), "speech token 120"),
        (ids(7, 201), "limit is 200"),
    ]:
        with pytest.raises(ValueError, match=message):
            dit.whole_batch([good, (prompt(8), tokens)])


@pytest.mark.parametrize(("speed", "frames"), [(0.5, 84), (1.0, 42), (2.0, 21), (3.0, 14)])
def test_speed_stretches_a_whole_utterance(unet, speed, frames):
    assert len(unet.whole(prompt(7), ids(7, 21), speed)) == frames * HOP_SAMPLES


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
