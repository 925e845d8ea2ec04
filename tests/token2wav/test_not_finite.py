"""Values that are not finite: such a chunk is rendered again in float32, such a voice is made again, such a checkpoint
does not load."""

import copy

import numpy as np
import pytest
import torch
from cosyvoice_triton.monitoring.metrics import EVICTED, FAILED, RETRIED
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.cosyvoice3_flow import CosyVoice3Streaming
from cosyvoice_triton.token2wav.flow.kv_cache import PromptCaches
from cosyvoice_triton.token2wav.stream import NotFiniteError, Stream
from cosyvoice_triton.voice.prompt import Prompt

from tests.support.streams import VOICES_BYTES, Plan, ids, overflowing, pieces, prompt, spoken, step, together

TOLERANCE = 1e-3  # between batches, as in test_engine
HOPS = [8, 12, 10]
SEEDS = [1, 2, 3]
TOKENS = 47


def voice(engine: Token2Wav, seed: int) -> Prompt:
    """Long enough that CosyVoice3's flow keeps some of it."""
    return prompt(seed, tokens=40 if isinstance(engine._flow, CosyVoice3Streaming) else 12)


def plans(engine: Token2Wav, seeds: list[int]) -> list[Plan]:
    return [Plan(voice(engine, seed), pieces(engine, ids(seed, TOKENS), HOPS)) for seed in seeds]


def once(monkeypatch: pytest.MonkeyPatch, subject: object, name: str, row: int) -> None:
    """Let the next result of a method be no number in one row."""
    method = getattr(subject, name)

    def spoiled(*args, **options):
        monkeypatch.setattr(subject, name, method)
        result = method(*args, **options)
        (result[0] if isinstance(result, tuple) else result)[row] = torch.nan
        return result

    monkeypatch.setattr(subject, name, spoiled)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("kind", "fault", "turn"),
    [
        ("dit", "mel", 0),
        ("dit", "ring", 2),
        ("dit", "voice", 0),
        ("dit", "voice", 3),
        ("dit", "audio", 1),
        ("cosyvoice3", "mel", 0),
        ("cosyvoice3", "ring", 2),
        ("cosyvoice3", "voice", 0),
        ("cosyvoice3", "voice", 3),
        ("cosyvoice3", "audio", 1),
        ("unet", "mel", 2),
        ("unet", "audio", 0),
    ],
)
def test_a_chunk_that_is_not_finite_is_rendered_again_and_no_listener_notices(kind, fault, turn, request, monkeypatch):
    engine = request.getfixturevalue(kind)
    flow = engine._flow
    expected = together(engine, plans(engine, SEEDS))

    def spoil(now: int, streams: dict[int, Stream]) -> None:
        if now != turn:
            return
        if fault == "mel":
            once(monkeypatch, flow._solve, "run", row=1)
        elif fault == "audio":
            once(monkeypatch, engine._vocoder._network, "decode", row=1)
        elif fault == "ring":
            flow._pool.keys[streams[1].cache.slot] = torch.nan
            flow._pool.history[streams[1].cache.slot] = torch.nan
        else:
            streams[1].prompt.attention.values[..., 5, :] = torch.nan

    for actual, whole in zip(together(engine, plans(engine, SEEDS), before=spoil), expected, strict=True):
        np.testing.assert_allclose(actual, whole, atol=TOLERANCE)
    assert (engine.counts[RETRIED], engine.counts[FAILED]) == (1, 0)
    assert engine.counts[EVICTED] == (0 if kind == "unet" else 1)


@torch.inference_mode()
def test_a_voice_that_is_not_finite_is_evicted_and_its_live_streams_go_on(dit):
    """Both streams of the voice are rendered again; the second one and all later streams take the new prompt cache."""
    plan = pieces(dit, ids(1, TOKENS), HOPS)
    first, second = dit.open(prompt(1)), dit.open(prompt(1))
    bad = first.prompt
    expected = bad.attention.keys.clone()
    bad.attention.keys.fill_(torch.nan)
    for stream in (first, second):
        assert np.isfinite(dit.step([plan[0].of(dit, stream)])[0]).all()
    assert first.prompt is second.prompt is dit.open(prompt(1)).prompt is not bad
    torch.testing.assert_close(first.prompt.attention.keys, expected)
    assert (dit.counts[RETRIED], dit.counts[EVICTED]) == (2, 1)
    dit.step([plan[1].of(dit, stream) for stream in (first, second)])
    assert dit.counts[RETRIED] == 2


@pytest.mark.parametrize(("kind", "bad"), [("dit", "history"), ("cosyvoice3", "history"), ("cosyvoice3", "values")])
def test_a_prompt_cache_that_is_not_finite_is_made_again(kind, bad, request, monkeypatch, caplog):
    """Where the convolutions come before all blocks, the last step's values are in no history."""
    engine = request.getfixturevalue(kind)
    expected = together(engine, plans(engine, SEEDS))
    engine._flow._prompts = PromptCaches(VOICES_BYTES)
    prefill = engine._flow._solve.prefill

    def spoiled(*args):
        left = prefill(*args)
        (left[0].history[..., 0] if bad == "history" else left[0].attention.values[-1, -1, :, 0, 3]).fill_(torch.nan)
        return left

    monkeypatch.setattr(engine._flow._solve, "prefill", spoiled)
    engine.prefill([voice(engine, seed) for seed in SEEDS])
    assert "a prompt cache is not finite" in caplog.text
    for actual, whole in zip(together(engine, plans(engine, SEEDS)), expected, strict=True):
        np.testing.assert_allclose(actual, whole, atol=TOLERANCE)
    assert engine.counts[RETRIED] == 0


def test_a_flow_that_overflows_in_float16_speaks_as_in_float32(dit, dit_network, vocoder, flow_of):
    network = overflowing(dit_network)
    flow = flow_of("dit", network=copy.deepcopy(network).half(), load_exact=lambda: network)
    half = Token2Wav(flow, vocoder)
    half.prefill([prompt(9)])
    for actual, expected in zip(*(together(each, plans(each, [1, 2])) for each in (half, dit)), strict=True):
        np.testing.assert_allclose(actual, expected, atol=TOLERANCE)
    assert half.counts[RETRIED] == 2 * (len(HOPS) + 1)
    assert prompt(9).digest not in flow._prompts, "the float32 copy needs the memory of idle voices"


@torch.inference_mode()
def test_a_long_stream_is_rendered_again_from_its_recent_tokens(vocoder, flow_of):
    """More tokens than the context holds: what is older can only be heard as a slightly different mel."""
    flow = flow_of("dit", context_tokens=60)
    engine, mels = Token2Wav(flow, vocoder), []
    *plan, last = pieces(engine, ids(1, 100), [20, 20, 20, 20])
    for poisoned in (False, True):
        stream = engine.open(prompt(1))
        for piece in plan:
            engine.step([piece.of(engine, stream)])
        if poisoned:
            flow._pool.history[stream.cache.slot] = torch.nan
        chunk = last.of(engine, stream)
        (mel,) = flow.render([chunk])
        mels.append(flow.again(chunk) if poisoned else mel.clone())
        assert stream.cache.total == 200
    assert 0 < (mels[1] - mels[0]).norm() / mels[0].norm() < 0.05


@torch.inference_mode()
def test_a_mel_too_short_for_audio_is_not_kept_if_it_is_not_finite(dit):
    plan = pieces(dit, ids(1, 20), [2])
    expected = spoken(dit, prompt(1), plan)
    stream = dit.open(prompt(1))
    dit._flow._pool.history[stream.cache.slot] = torch.nan
    actual = [step(dit, stream, piece) for piece in plan]
    np.testing.assert_allclose(np.concatenate(actual), expected, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_a_whole_utterance_that_is_not_finite_is_rendered_again(kind, request, monkeypatch):
    engine = request.getfixturevalue(kind)
    expected = engine.whole(prompt(1), ids(1, 20))
    once(monkeypatch, engine._flow._network, "solve", row=0)
    np.testing.assert_array_equal(engine.whole(prompt(1), ids(1, 20)), expected)
    assert engine.counts[RETRIED] == 1
    monkeypatch.setattr(engine._flow._network, "solve", lambda *_, **__: torch.full((1, 80, 64), torch.nan))
    with pytest.raises(NotFiniteError, match="the audio is not finite"):
        engine.whole(prompt(1), ids(1, 20))
    assert engine.counts[FAILED] == 1
