"""Formats, rates and speeds: audio encoded chunk by chunk is decoded by a library and has the expected length."""

import io
import wave

import av
import numpy as np
import pytest
import soundfile as sf
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.speech_service.audio.encoding import FORMATS, MARK, AudioEncoder

SECONDS = 2.0
TONE_HZ = 440.0


def tone(rate: int = SAMPLE_RATE) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * TONE_HZ * np.arange(int(SECONDS * rate)) / rate)).astype(np.float32)


def encoded(name: str, rate: int | None = None, speed: float = 1.0) -> list[bytes]:
    encoder = AudioEncoder(name, rate, speed)
    chunks = np.array_split(tone(), 7)
    return [*(encoder.push(chunk) for chunk in chunks), encoder.finish()]


def decoded(name: str, data: bytes, rate: int) -> tuple[np.ndarray, int]:
    """float (N,) and its rate, decoded by FFmpeg."""
    if name == "pcm":
        return np.frombuffer(data, "<i2") / (1 << 15), rate
    raw = (
        {"format": name, "options": {"sample_rate": str(rate), "ch_layout": "mono"}}
        if name in ("mulaw", "alaw")
        else {}
    )
    with av.open(io.BytesIO(data), **raw) as container:
        resampler = av.AudioResampler(format="flt", layout="mono")
        frames = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames]), frames[0].sample_rate


def pitch(wav: np.ndarray, rate: int) -> float:
    spectrum = np.abs(np.fft.rfft(wav * np.hanning(wav.size)))
    return float(np.argmax(spectrum) * rate / wav.size)


@pytest.mark.parametrize(
    ("name", "rate", "speed"),
    [
        *((name, SAMPLE_RATE, 1.0) for name in FORMATS if SAMPLE_RATE in FORMATS[name].rates),
        *((name, 8_000, 1.5) for name in FORMATS),
        ("pcm", 48_000, 0.25),
        ("mp3", SAMPLE_RATE, 4.0),
    ],
)
def test_every_format_decodes_to_the_original_length_and_pitch(name: str, rate: int, speed: float) -> None:
    parts = encoded(name, rate, speed)
    wav, got = decoded(name, b"".join(parts), rate)
    assert got == (48_000 if name == "opus" else rate)  # an Opus decoder always returns this rate
    # Tolerance: an encoder's frame and delay, and the window of the time-stretch.
    assert wav.size / got == pytest.approx(SECONDS / speed, abs=3000 / rate + 0.01 * SECONDS / speed)
    middle = wav[wav.size // 4 : -wav.size // 4]
    assert pitch(middle, got) == pytest.approx(TONE_HZ, rel=0.02)
    assert np.sqrt(np.mean(middle**2)) == pytest.approx(0.5 / np.sqrt(2), abs=0.05)


@pytest.mark.parametrize("name", FORMATS)
def test_most_audio_of_a_chunk_is_returned_with_that_chunk(name: str) -> None:
    first, *others, last = map(len, encoded(name))
    assert first > 0 and min(others) > 0
    assert last < sum(others) / 3


def test_a_streamed_wav_is_read_by_other_libraries() -> None:
    data = b"".join(encoded("wav"))
    samples, rate = sf.read(io.BytesIO(data), dtype="float32")
    assert rate == SAMPLE_RATE
    np.testing.assert_allclose(samples, tone(), atol=1e-4)
    with wave.open(io.BytesIO(data)) as file:
        assert len(file.readframes(10**6)) == 2 * tone().size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ogg",), "response_format 'ogg' is not one of mp3, opus"),
        (("mp3", 1000), "sample_rate 1000 is not one of 8000"),
        (("opus", 44_100), "which opus supports"),
        (("pcm", SAMPLE_RATE, 0.2), "speed 0.2 is not in 0.25..4"),
        (("pcm", SAMPLE_RATE, float("nan")), "speed nan"),
        (("mulaw", 16_000), "sample_rate 16000 is not one of 8000, which mulaw"),
        (("mulaw", None, 1.0, 1.0, 25), "frame_ms 25"),
        (("mp3", None, 1.0, 1.0, 20), "frame_ms 20: .* in the formats pcm, mulaw, alaw"),
        (("pcm", 11_025, 1.0, 1.0, 10), "frame_ms 10: .*whole samples"),
    ],
)
def test_unsupported_values_are_an_error_naming_the_value(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AudioEncoder(*arguments)


@pytest.mark.parametrize(("name", "rate"), [("pcm", None), ("pcm", 8_000), ("mulaw", None), ("alaw", None)])
def test_frames_are_of_equal_length_and_the_last_is_filled_with_silence(name: str, rate: int | None) -> None:
    parts = [*encoded(name, rate), b"\x01\x02"]  # two seconds are whole frames
    encoder, silence = AudioEncoder(name, rate, frame_ms=20), FORMATS[name].silence
    frames = [frame for part in parts for frame in encoder.framed(part)] + [*encoder.framed(b"", last=True)]
    assert {len(frame) for frame in frames} == {len(silence) * encoder.rate // 50}
    whole, sent = b"".join(parts), b"".join(frames)
    assert sent.startswith(whole) and set(sent[len(whole) :]) <= set(silence)


def test_samples_beyond_full_scale_are_clipped() -> None:
    pcm = np.frombuffer(AudioEncoder("pcm").push(np.array([2.0, -2.0, 0.0], np.float32)), "<i2")
    assert pcm.tolist() == [32767, -32767, 0]


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].container not in ("", "mulaw", "alaw")])
def test_a_mark_is_in_every_container_and_changes_nothing_else(name: str) -> None:
    marked, plain = (AudioEncoder(name, tags=tags) for tags in (MARK, None))
    files = [each.complete(each.push(tone()) + each.finish()) for each in (marked, plain)]
    for file, tags in zip(files, (MARK, {}), strict=True):
        with av.open(io.BytesIO(file)) as container:
            found = container.metadata or container.streams[0].metadata
            assert found.get("comment") == tags.get("comment")
    np.testing.assert_array_equal(*(decoded(name, file, 0)[0] for file in files))
    assert b"Lavf" not in files[0] or name in ("flac", "opus")  # whose comments have always named their writer


@pytest.mark.parametrize("name", ["pcm", "mulaw"])
def test_samples_alone_have_no_place_for_a_mark(name: str) -> None:
    assert AudioEncoder(name, tags=MARK).push(tone()) == AudioEncoder(name).push(tone())
