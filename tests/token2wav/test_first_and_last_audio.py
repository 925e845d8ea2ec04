"""The first and the last milliseconds of an utterance, of all stacks."""

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.stream import FADE_SAMPLES, LOUD, without_click

from tests.support.streams import ids, pieces, prompt, spoken, step
from tests.token2wav.test_chunks_equal_whole import mel

LAST = SAMPLE_RATE // 25  # 40 ms
HOPS = [25, 25]


@pytest.fixture(params=["dit", "unet", "cosyvoice3"])
def engine(request: pytest.FixtureRequest) -> Token2Wav:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("rest", [3, 4, 12])
@torch.inference_mode()
def test_the_last_40_ms_of_a_stream_are_those_of_the_whole(engine: Token2Wav, rest: int) -> None:
    """Upstream's CosyVoice2 ends most streams, and no whole utterance, with a noise of 40 ms (its issue 1919).

    Here a stream cannot end otherwise than the whole: its final chunk has the encoder's look-ahead of the real end,
    continues the flow's caches, and is vocoded with the frames before it; what comes before the last 40 ms may be
    cross-faded, they are not.
    """
    voice, tokens = prompt(4, 25), ids(4, sum(HOPS) + rest)
    audio = spoken(engine, voice, pieces(engine, tokens, HOPS))
    (whole,) = engine._vocoder.whole([mel(engine._flow, voice, tokens, HOPS)])
    assert len(audio) == len(whole)
    np.testing.assert_allclose(audio[-LAST:], whole.numpy()[-LAST:], atol=1e-4)


def test_only_an_utterance_that_begins_loudly_is_faded_in() -> None:
    loud = np.full(2 * FADE_SAMPLES, 0.5, np.float32)
    faded = without_click(loud)
    assert faded[0] == 0 and (np.diff(faded[:FADE_SAMPLES]) > 0).all() and (faded[FADE_SAMPLES:] == 0.5).all()
    assert (loud == 0.5).all(), "the engine's own audio stays as it is"
    for quiet in (np.append(np.full(FADE_SAMPLES, LOUD, np.float32), loud), loud[:0]):
        assert without_click(quiet) is quiet
    assert without_click(loud[:7])[0] == 0


def test_the_first_audio_of_a_stream_and_of_a_whole_utterance_is_faded_in_and_no_later_one(engine: Token2Wav) -> None:
    voice, tokens = prompt(4, 25), ids(4, 60)
    stream = engine.open(voice)
    first, later, _ = (step(engine, stream, piece) for piece in pieces(engine, tokens, HOPS))
    engine.close(stream)
    assert first[0] == 0 == engine.whole(voice, tokens)[0]
    assert np.abs(first[FADE_SAMPLES : 2 * FADE_SAMPLES]).max() > LOUD and later[0] != 0
