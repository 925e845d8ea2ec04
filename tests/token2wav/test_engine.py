"""The engine with the small networks of the fixtures: upstream's streaming loops, isolation of streams, limits."""

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from common.constants import (
    DIT_TAIL_FRAMES,
    HOP_SAMPLES,
    MAX_STREAM_TOKENS,
    OVERLAP_FRAMES,
    TOKEN_MEL_RATIO,
)
from common.errors import UnavailableError
from common.token2wav.dit.memory import PromptCaches, TailPool
from common.token2wav.dit.streaming import DiTStreaming
from common.token2wav.engine import Token2Wav
from common.token2wav.limits import BatchLimits
from common.token2wav.noise import NoiseTape, flow_noise
from common.token2wav.stream import Chunk, Stream, VocoderState
from common.token2wav.unet.streaming import UNetStreaming
from common.voice.prompt import Prompt
from tests.support.streams import (
    DIT,
    GOLDEN,
    UNET,
    VOICES_BYTES,
    Piece,
    dit_pieces,
    ids,
    prompt,
    tensors,
    unet_pieces,
)
from tools.parity import streaming
from tools.parity.fixture import Fixture
from tools.parity.reference import dit_flow, window_flow
from tools.parity.runner import run_fixture


@pytest.fixture
def prompts():
    return PromptCaches(VOICES_BYTES)


@pytest.fixture
def dit(dit_network, vocoder, prompts):
    limits = BatchLimits(max_streams=8)
    flow = DiTStreaming(dit_network, flow_noise(), prompts, limits=limits, steps=4, max_tokens=200)
    return Token2Wav(flow, vocoder)


@pytest.fixture
def unet(unet_network, vocoder):
    return Token2Wav(UNetStreaming(unet_network, flow_noise(), limits=BatchLimits(), steps=4, max_tokens=200), vocoder)


def step(engine: Token2Wav, stream: Stream, piece: Piece) -> np.ndarray:
    (audio,) = engine.step([piece.of(engine, stream)])
    return audio


def synthesize(engine: Token2Wav, voice: Prompt, pieces: list[Piece]) -> np.ndarray:
    stream = engine.open(voice)
    audio = np.concatenate([step(engine, stream, piece) for piece in pieces])
    engine.close(stream)
    return audio


@pytest.mark.parametrize("name", [DIT, UNET])
def test_the_streaming_loop_equals_that_of_upstream(name):
    results = list(run_fixture(Fixture(GOLDEN / f"{name}.json"), streaming.CHECKS[name]))
    assert len(results) >= 4
    assert [result for result in results if result.verdict != "PASS"] == []


@pytest.mark.parametrize("hops", [[], [5], [15, 20], [1, 1, 2, 3], [3, 40]])
@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_all_audio_is_returned_for_any_division_into_chunks(kind, hops, request):
    engine = request.getfixturevalue(kind)
    tokens = ids(1, 47)
    chunks = (dit_pieces if kind == "dit" else unet_pieces)(tokens, hops)
    audio = synthesize(engine, prompt(1, tokens=12 if len(hops) % 2 else 0), chunks)
    assert audio.dtype == np.float32
    assert len(audio) == len(tokens) * TOKEN_MEL_RATIO * HOP_SAMPLES
    assert np.isfinite(audio).all() and audio.std() > 1e-4


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_interleaved_streams_equal_the_same_streams_alone(kind, request):
    engine = request.getfixturevalue(kind)
    split = dit_pieces if kind == "dit" else unet_pieces
    plans = {seed: (prompt(seed), split(ids(seed, 40), [10, 10 + seed])) for seed in range(4)}
    alone = {seed: synthesize(engine, *plan) for seed, plan in plans.items()}
    streams = {seed: engine.open(voice) for seed, (voice, _) in plans.items()}
    parts: dict[int, list[np.ndarray]] = {seed: [] for seed in plans}
    for turn in range(3):
        for seed, (_, chunks) in plans.items():
            parts[seed].append(step(engine, streams[seed], chunks[turn]))
    for seed in plans:
        np.testing.assert_array_equal(np.concatenate(parts[seed]), alone[seed])
    assert np.abs(alone[0][: len(alone[1])] - alone[1][: len(alone[0])]).max() > 1e-3


@pytest.mark.parametrize(("prompt_tokens", "hops"), [(8, [12, 5, 10]), (0, [10, 5, 15])])
def test_unet_chunks_on_training_boundaries_equal_the_utterance_at_once(unet_network, prompt_tokens, hops):
    """Boundaries count from the prompt's start: here every 5 tokens, the small network's chunk."""
    flow = UNetStreaming(unet_network, flow_noise(), limits=BatchLimits(), steps=4)
    tokens = ids(3, 40)

    def mel(pieces):
        stream = flow.open(prompt(3, prompt_tokens), VocoderState(0))
        return torch.cat([flow.render([piece.of(flow, stream)])[0] for piece in pieces], dim=1)

    whole = mel([Piece(tokens, final=True)])
    torch.testing.assert_close(mel(unet_pieces(tokens, hops)), whole, atol=1e-4, rtol=0)
    assert (mel(unet_pieces(tokens, [hops[0] - 1, *hops[1:]])) - whole).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_a_batch_of_streams_equals_each_stream_alone(kind, request):
    """Voices, histories and chunk sizes differ; streams begin and end in different batches. Two have no prompt."""
    engine = request.getfixturevalue(kind)
    split = dit_pieces if kind == "dit" else unet_pieces
    lengths = [0, 10, 11, 0, 13]
    plans = {
        seed: (prompt(seed, lengths[seed]), split(ids(seed, 70), [10 + seed, 30, 4 * seed + 1])) for seed in range(5)
    }
    alone = {seed: synthesize(engine, *plan) for seed, plan in plans.items()}
    streams, parts = {}, {seed: [] for seed in plans}
    for turn in range(9):
        due = [seed for seed in plans if 0 <= turn - seed < 4]
        streams |= {seed: engine.open(plans[seed][0]) for seed in due if turn == seed}
        batch = [plans[seed][1][turn - seed].of(engine, streams[seed]) for seed in due]
        for seed, audio in zip(due, engine.step(batch), strict=True):
            parts[seed].append(audio)
    for seed in plans:
        np.testing.assert_allclose(np.concatenate(parts[seed]), alone[seed], atol=1e-3)


def fail(monkeypatch: pytest.MonkeyPatch, subject: object, name: str, fails: Callable[..., Exception | None]) -> None:
    """Let a method raise what `fails` returns for its arguments."""
    method = getattr(subject, name)

    def failing(*args):
        if error := fails(*args):
            raise error
        return method(*args)

    monkeypatch.setattr(subject, name, failing)


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_a_batch_that_needs_too_much_memory_is_rendered_in_parts(kind, request, vocoder, monkeypatch):
    engine = request.getfixturevalue(kind)
    piece = Piece(ids(1, 20), final=True)
    expected = [step(engine, engine.open(prompt(seed)), piece) for seed in range(3)]
    chunks = [piece.of(engine, engine.open(prompt(seed))) for seed in range(3)]
    full = torch.OutOfMemoryError("CUDA out of memory")
    fail(monkeypatch, engine._flow._solve, "run", lambda chunks, mu: full if len(chunks) > 1 else None)
    fail(monkeypatch, vocoder._renderer, "first", lambda mel, *rest: full if len(mel) > 1 else None)
    for audio, alone in zip(engine.step(chunks), expected, strict=True):
        np.testing.assert_allclose(audio, alone, atol=1e-3)


@pytest.mark.parametrize("kind", ["dit", "unet"])
@pytest.mark.parametrize("fault", ["in the flow", "in the vocoder", "not a number"])
def test_one_bad_chunk_of_a_batch_gets_an_error_and_the_others_their_audio(kind, fault, request, vocoder, monkeypatch):
    engine = request.getfixturevalue(kind)
    tokens = ids(1, 40)
    plans = (dit_pieces if kind == "dit" else unet_pieces)(tokens, [20])
    streams = [engine.open(prompt(seed)) for seed in range(3)]
    expected = [synthesize(engine, prompt(seed), plans) for seed in (0, 2)]
    first = engine.step([plans[0].of(engine, stream) for stream in streams])
    chunks = [plans[1].of(engine, stream) for stream in streams]
    if fault == "in the flow":
        bad = chunks[1]
        fail(monkeypatch, engine._flow._solve, "run", lambda chunks, mu: RuntimeError("bad") if bad in chunks else None)
    elif fault == "in the vocoder":
        slot = streams[1].vocoder.slot
        fail(
            monkeypatch,
            vocoder._renderer,
            "later",
            lambda mel, slots, *_: RuntimeError("bad") if slot in slots else None,
        )
    else:
        vocoder.pool.speech[streams[1].vocoder.slot] = torch.nan
    results = engine.render(chunks)
    assert isinstance(results[1], FloatingPointError if fault == "not a number" else RuntimeError)
    for index, whole in zip((0, 2), expected, strict=True):
        np.testing.assert_allclose(np.concatenate([first[index], results[index]]), whole, atol=1e-3)
    for stream in streams:
        engine.close(stream)


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_the_sample_of_a_models_own_test_is_audible_work(kind, request):
    engine = request.getfixturevalue(kind)
    voice, tokens = engine.sample()
    audio = synthesize(engine, voice, [Piece(tokens, final=True)])
    assert len(audio) == len(engine.whole(voice, tokens)) == len(tokens) * TOKEN_MEL_RATIO * HOP_SAMPLES


def test_a_dead_gpu_is_an_error_for_the_whole_batch(dit, monkeypatch):
    chunks = [Piece(ids(1, 20), final=True).of(dit, dit.open(prompt(seed))) for seed in range(2)]
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    fail(monkeypatch, dit._flow._solve, "run", lambda chunks, mu: error)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        dit.render(chunks)


def test_a_stream_whose_memory_is_ahead_of_its_audio_cannot_go_on(dit):
    """In a batch of several solves, a stream may have been stored when a later solve fails: tried again, it would be
    stored twice and then speak from the wrong place."""
    stream = dit.open(prompt(1))
    chunk = Piece(ids(1, 20), final=False).of(dit, stream)
    dit._flow._pool.advance(chunk)
    with pytest.raises(RuntimeError, match="ahead of its audio"):
        dit.step([chunk])


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_an_invalid_chunk_does_not_change_its_stream(kind, request):
    engine = request.getfixturevalue(kind)
    tokens = ids(1, 20)
    expected = step(engine, engine.open(prompt(1)), Piece(tokens, final=True))
    stream = engine.open(prompt(1))
    with pytest.raises(ValueError, match="speech token"):
        Piece(tokens + 200, final=True).of(engine, stream)
    np.testing.assert_array_equal(step(engine, stream, Piece(tokens, final=True)), expected)


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_of_two_chunks_made_from_the_same_state_only_one_can_be_rendered(kind, request):
    engine = request.getfixturevalue(kind)
    stream, piece = engine.open(prompt(1)), Piece(ids(1, 20), final=False)
    first, second = piece.of(engine, stream), piece.of(engine, stream)
    engine.step([first])
    with pytest.raises(AssertionError):
        engine.step([second])


@pytest.mark.parametrize("prompt_tokens", [12, 0])
def test_the_dit_equals_its_reference_also_after_frames_leave_the_cache(dit_network, prompt_tokens):
    limits = BatchLimits(max_streams=1)
    flow = DiTStreaming(dit_network, flow_noise(), PromptCaches(VOICES_BYTES), limits=limits, steps=3)
    voice, tokens = prompt(4, prompt_tokens), ids(4, 160)
    stream = flow.open(voice, VocoderState(0))
    noise = flow_noise().read(0, 24).T[None]
    cache = dit_flow.prefill(dit_network, *tensors(voice), noise=noise, steps=3)
    for piece in dit_pieces(tokens, [20, 25, 30, 60, 3]):
        chunk = piece.of(flow, stream)
        noise = flow_noise().read(cache.frames, chunk.frames).T[None]
        expected, cache = dit_flow.inference_chunk(
            dit_network, torch.from_numpy(chunk.tokens)[None], cache, final=chunk.final, noise=noise
        )
        cache = cache.trimmed(DIT_TAIL_FRAMES)
        assert stream.complete == (stream.rendered <= DIT_TAIL_FRAMES // TOKEN_MEL_RATIO)
        torch.testing.assert_close(flow.render([chunk])[0], expected[0], atol=1e-4, rtol=0)


def test_voices_prefilled_together_equal_each_prefilled_alone(dit, dit_network, vocoder):
    """Of different lengths, one without a prompt; and their streams need no prefill."""
    limits = BatchLimits(max_streams=8)
    caches = PromptCaches(VOICES_BYTES)
    together = Token2Wav(DiTStreaming(dit_network, flow_noise(), caches, limits=limits, steps=4), vocoder)
    voices = [prompt(1, 12), prompt(2, 30), prompt(3, 0), prompt(4, 7)]
    together.prefill(voices)
    assert [together.prefill_frames(voice) for voice in [*voices, prompt(5, 9)]] == [0, 0, 0, 0, 18]
    for voice in voices:
        stream, alone = together.open(voice), dit.open(voice)
        torch.testing.assert_close(stream.prompt.attention.keys, alone.prompt.attention.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(stream.prompt.attention.values, alone.prompt.attention.values, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(stream.prompt.history, alone.prompt.history, atol=1e-4, rtol=1e-4)
        together.close(stream)
        dit.close(alone)


def test_a_voice_prefilled_ahead_is_dropped_if_there_is_no_room(dit_network, vocoder):
    caches = PromptCaches(1)
    engine = Token2Wav(DiTStreaming(dit_network, flow_noise(), caches, limits=BatchLimits(max_streams=2)), vocoder)
    engine.prefill([prompt(1), prompt(2)])
    assert (len(caches), caches.nbytes) == (0, 0)


def test_streams_of_one_voice_share_its_prompt_cache(dit, prompts):
    first, second = dit.open(prompt(5)), dit.open(prompt(5))
    assert len(prompts) == 1
    assert first.prompt is second.prompt
    before = first.prompt.attention.keys.clone()
    step(dit, first, dit_pieces(ids(5, 20), [10])[0])
    torch.testing.assert_close(second.prompt.attention.keys, before)


def test_streams_are_limited_and_release_their_slots(dit):
    streams = [dit.open(prompt(5)) for _ in range(8)]
    with pytest.raises(UnavailableError, match="all 8 streams"):
        dit.open(prompt(5))
    for stream in streams:
        dit.close(stream)
    dit.close(dit.open(prompt(5)))


def test_prompt_caches_are_limited_in_bytes_and_the_least_recently_used_idle_one_is_evicted(dit_network, vocoder):
    limits = BatchLimits(max_streams=9)
    size = DiTStreaming(dit_network, flow_noise(), PromptCaches(0), limits=limits, steps=4)._pool.prompt_bytes(24)
    prompts = PromptCaches(2 * size)
    engine = Token2Wav(DiTStreaming(dit_network, flow_noise(), prompts, limits=limits, steps=4), vocoder)
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


def test_a_voice_without_room_waits_for_it_in_turn_and_one_that_never_has_room_is_refused(dit_network, vocoder):
    limits = BatchLimits(max_streams=9)
    size = DiTStreaming(dit_network, flow_noise(), PromptCaches(0), limits=limits, steps=4)._pool.prompt_bytes
    prompts = PromptCaches(2 * size(24))
    engine = Token2Wav(DiTStreaming(dit_network, flow_noise(), prompts, limits=limits, steps=4), vocoder)
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
    dit_network, vocoder, monkeypatch
):
    """At no time is there more than the limit, whoever still refers to a stream that has ended."""
    limits, prefill, before = BatchLimits(max_streams=9), DiTStreaming._prefill, []
    size = DiTStreaming(dit_network, flow_noise(), PromptCaches(0), limits=limits, steps=4)._pool.prompt_bytes(24)
    prompts = PromptCaches(2 * size)
    engine = Token2Wav(DiTStreaming(dit_network, flow_noise(), prompts, limits=limits, steps=4), vocoder)
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


def test_a_stream_that_gets_no_slot_releases_its_prompt_cache(dit_network, vocoder):
    prompts, limits = PromptCaches(VOICES_BYTES), BatchLimits(max_streams=1)
    engine = Token2Wav(DiTStreaming(dit_network, flow_noise(), prompts, limits=limits, steps=4), vocoder)
    free = len(vocoder.pool._free)
    stream = engine.open(prompt(0))
    with pytest.raises(UnavailableError, match="all 1 streams"):
        engine.open(prompt(1))
    engine.close(stream)
    assert all(entry.streams == 0 for entry in prompts._entries.values())
    assert len(vocoder.pool._free) == free


def test_a_prompt_cache_is_released_if_its_streams_slot_cannot_be_filled(dit_network, vocoder, monkeypatch):
    prompts = PromptCaches(VOICES_BYTES)
    flow = DiTStreaming(dit_network, flow_noise(), prompts, limits=BatchLimits(max_streams=1), steps=4)
    engine, free = Token2Wav(flow, vocoder), len(vocoder.pool._free)
    with monkeypatch.context() as patch:
        patch.setattr(TailPool, "acquire", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error")))
        with pytest.raises(RuntimeError, match="CUDA error"):
            engine.open(prompt(0))
    assert [entry.streams for entry in prompts._entries.values()] == [0]
    assert len(vocoder.pool._free) == free


def test_audio_too_short_for_the_overlap_is_kept_for_the_next_chunk(vocoder):
    mel = torch.randn(80, 30) - 4
    stream = Stream(vocoder=vocoder.open())
    first, final = (Chunk(stream, ids(0, 0), final, 0, 0, 0) for final in (False, True))
    assert len(vocoder.step([first], [mel[:, : OVERLAP_FRAMES - 2]])[0]) == 0
    (rest,) = vocoder.step([final], [mel[:, OVERLAP_FRAMES - 2 :]])
    torch.testing.assert_close(rest, *vocoder.whole([mel]))


def test_an_empty_final_chunk_returns_the_withheld_audio(dit):
    stream, tokens = dit.open(prompt(6)), ids(6, 13)
    head = step(dit, stream, Piece(tokens, final=False))
    tail = step(dit, stream, Piece(tokens[:0], final=True))
    assert len(head) + len(tail) == 10 * TOKEN_MEL_RATIO * HOP_SAMPLES


def test_whole_utterances_are_reproducible_and_as_long_as_their_tokens(dit, unet):
    for engine in (dit, unet):
        audio = engine.whole(prompt(7), ids(7, 21))
        assert len(audio) == 21 * TOKEN_MEL_RATIO * HOP_SAMPLES
        np.testing.assert_array_equal(audio, engine.whole(prompt(7), ids(7, 21)))


@pytest.mark.parametrize("count", [8, 0])
def test_a_whole_utterance_equals_the_output_of_the_networks(dit_network, unet_network, prompts, count):
    voice, tokens = prompt(3, tokens=count), torch.from_numpy(ids(3, 40))[None]
    prompt_tokens, feat, embedding = tensors(voice)
    all_tokens = torch.cat([prompt_tokens, tokens], dim=1)
    noise = flow_noise().read(0, TOKEN_MEL_RATIO * (count + 40)).T[None]
    lengths = torch.tensor([count + 40]), feat, torch.tensor([feat.shape[1]])
    expected = {
        DiTStreaming(dit_network, flow_noise(), prompts, limits=BatchLimits(), steps=4): dit_flow.inference(
            dit_network, all_tokens, *lengths, embedding, noise=noise, steps=4
        )[0, :, feat.shape[1] :],
        UNetStreaming(unet_network, flow_noise(), limits=BatchLimits(), steps=4): window_flow.inference(
            unet_network, tokens, prompt_tokens, feat, embedding, noise=noise, streaming=False, final=True, steps=4
        )[0],
    }
    for flow, mel in expected.items():
        torch.testing.assert_close(*flow.whole([(voice, tokens[0].numpy())]), mel, atol=1e-4, rtol=0)


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


@pytest.mark.parametrize("kind", ["dit", "unet"])
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
def test_invalid_tokens_of_a_chunk_are_named(kind, piece, message, request):
    engine = request.getfixturevalue(kind)
    stream = engine.open(prompt(8))
    with pytest.raises(ValueError, match=message):
        piece.of(engine, stream)


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_a_chunk_that_makes_a_stream_too_long_is_refused_and_the_stream_may_end_at_the_limit(kind, request):
    engine, tokens = request.getfixturevalue(kind), ids(8, 201)
    stream, split = engine.open(prompt(8)), dit_pieces if kind == "dit" else unet_pieces
    step(engine, stream, split(tokens, [190])[0])
    with pytest.raises(ValueError, match="the stream has 201 speech tokens; the limit is 200"):
        split(tokens, [190])[1].of(engine, stream)
    assert len(step(engine, stream, split(tokens[:-1], [190])[1])) > 0


def test_the_limit_of_a_stream_is_two_minutes_of_tokens(dit_network, unet_network, prompts):
    limits = BatchLimits(max_streams=1)
    for flow in (
        DiTStreaming(dit_network, flow_noise(), prompts, limits=limits, steps=1),
        UNetStreaming(unet_network, flow_noise(), limits=limits, steps=1),
    ):
        stream = flow.open(prompt(8), VocoderState(0))
        assert flow.chunk(stream, ids(8, MAX_STREAM_TOKENS), final=True).new == 3000
        with pytest.raises(ValueError, match="the stream has 3001 speech tokens; the limit is 3000"):
            flow.chunk(stream, ids(8, MAX_STREAM_TOKENS + 1), final=True)


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


def test_the_flow_noise_equals_that_of_upstream():
    torch.manual_seed(0)
    expected = torch.randn(1, 80, 15000)
    torch.testing.assert_close(flow_noise().read(0, 15000).T[None], expected, atol=0, rtol=0)
