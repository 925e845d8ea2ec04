"""Answers at a set loudness."""

import io

import numpy as np
import pytest
import soundfile as sf
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.speech_service.audio.encoding import AudioEncoder
from cosyvoice_triton.speech_service.audio.loudness import PEAK, Leveller, Loudness


def sine(hertz: float, amplitude: float, seconds: float = 3.0) -> np.ndarray:
    return (amplitude * np.sin(2 * np.pi * hertz * np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE)).astype("f4")


def measured(*chunks: np.ndarray) -> float | None:
    loudness = Loudness()
    for chunk in chunks:
        loudness.add(chunk)
    return loudness.lufs


# Of pyloudnorm 0.2.0, whose filters are BS.1770's at any rate.
@pytest.mark.parametrize(("hertz", "amplitude", "lufs"), [(997, 1, -3.06), (100, 0.1, -24.87), (5000, 0.2, -13.70)])
def test_tones_have_the_loudness_of_the_standard(hertz: float, amplitude: float, lufs: float) -> None:
    tone = sine(hertz, amplitude)
    assert measured(*np.array_split(tone, 7)) == pytest.approx(lufs, abs=0.02)
    assert measured(tone[:4800]) == pytest.approx(lufs, abs=0.3)  # less than a block
    assert measured(tone, sine(hertz, amplitude / 1000), np.zeros(SAMPLE_RATE, np.float32)) == pytest.approx(
        lufs, abs=0.4
    )
    assert measured(np.zeros(SAMPLE_RATE, np.float32)) is None


@pytest.mark.parametrize("hold", [False, True])
def test_chunks_come_to_the_loudness_without_steps_or_delay(hold: bool) -> None:
    chunks = [sine(997, amplitude, 0.5) for amplitude in (0.05, 0.05, 0.4, 0.4)]
    leveller = Leveller(-20, hold=hold)
    levelled = [leveller.push(chunk) for chunk in chunks]
    assert [part.size for part in levelled] == [0 if hold else chunk.size for chunk in chunks]
    wave = np.concatenate([*levelled, leveller.finish()])
    assert wave.size == sum(chunk.size for chunk in chunks)
    if hold:
        assert measured(wave) == pytest.approx(-20, abs=0.1)
    else:
        assert measured(wave[:SAMPLE_RATE]) == pytest.approx(-20, abs=0.1)
        whole = np.concatenate(chunks)
        gains = wave[whole != 0] / whole[whole != 0]
        assert np.abs(np.diff(gains)).max() < 0.01 * gains.max()  # a ramp
        assert gains[-1] < gains[0] / 2


def test_peaks_stay_below_full_scale_and_silence_is_not_raised() -> None:
    click = sine(997, 0.01)
    click[SAMPLE_RATE] = 0.5
    assert np.abs(Leveller(-10, hold=False).push(click)).max() == pytest.approx(PEAK, abs=0.01)
    quiet = Leveller(-10, hold=False)
    quiet.push(sine(997, 0.01))
    assert np.abs(quiet.push(click[SAMPLE_RATE - 200 :])).max() <= PEAK + 0.01, "soon after a chunk's beginning"
    np.testing.assert_array_equal(Leveller(-10, hold=False).push(np.zeros(100, np.float32)), np.zeros(100))


def test_an_encoder_levels_and_without_a_loudness_leaves_the_samples_as_they_are() -> None:
    chunks = np.array_split(sine(997, 0.3), 5)
    plain, levelled, held = (AudioEncoder("pcm", hold=hold) for hold in (False, False, True))
    for encoder in (levelled, held):
        encoder.begin(-20)
    samples = [
        np.frombuffer(b"".join([*map(each.push, chunks), each.finish()]), "<i2") / 32767
        for each in (plain, levelled, held)
    ]
    np.testing.assert_array_equal(np.rint(samples[0] * 32767), np.rint(np.concatenate(chunks) * 32767))
    for wave in samples[1:]:
        assert measured(wave.astype("f4")) == pytest.approx(-20, abs=0.1)


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize(("kind", "speed"), [("wav", 1.0), ("wav", 1.5), ("mp3", 1.0), ("opus", 1.0)])
def test_parts_of_two_voices_with_a_loudness_are_one_file(kind: str, speed: float, hold: bool) -> None:
    encoder, data = AudioEncoder(kind, None, speed, hold=hold), b""
    for lufs in (-20, -30):
        encoder.begin(lufs)
        data += b"".join(map(encoder.push, np.array_split(sine(997, 0.3), 5)))
    wave, rate = sf.read(io.BytesIO(data + encoder.finish()))
    assert len(wave) / rate == pytest.approx(2 * sine(997, 0.3).size / SAMPLE_RATE / speed, abs=0.15)
    first, second = (np.sqrt(np.square(part).mean()) for part in np.array_split(wave, 2))
    assert 20 * np.log10(first / second) == pytest.approx(10, abs=1)
