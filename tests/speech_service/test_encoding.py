"""Formats, rates and speeds: audio encoded chunk by chunk is decoded by a library and has the expected length. Answers
at a set loudness. Speech for telephones: paced frames, and the programs of docs/recipes/telephony.md with stand-ins of
the switches. Recordings that come in are decoded in processes that may die alone."""

import base64
import io
import json
import os
import signal
import socket as sockets
import struct
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import av
import numpy as np
import psutil
import pytest
import soundfile as sf
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.server.tritonserver import free_port
from cosyvoice_triton.speech_service.audio import recordings
from cosyvoice_triton.speech_service.audio.encoding import FORMATS, MARK, AudioEncoder
from cosyvoice_triton.speech_service.audio.loudness import PEAK, Leveller, Loudness
from cosyvoice_triton.speech_service.audio.recordings import decode
from cosyvoice_triton.speech_service.bodies import SpeechRequest
from cosyvoice_triton.speech_service.service import Service
from cosyvoice_triton.speech_service.settings import Settings
from websockets.sync.client import connect

from tests.recipes.test_recipes import block
from tests.support.sounds import recording, sine
from tests.support.speech_fixtures import StubbedService, events_of, say, send
from tests.support.waiting import until

SECONDS = 2.0
TONE_HZ = 440.0
TONE = sine(TONE_HZ, 0.5, SECONDS)


def encoded(name: str, rate: int | None = None, speed: float = 1.0) -> list[bytes]:
    encoder = AudioEncoder(name, rate, speed)
    chunks = np.array_split(TONE, 7)
    return [*(encoder.push(chunk) for chunk in chunks), encoder.finish()]


def decoded(name: str, data: bytes, rate: int) -> tuple[np.ndarray, int]:
    """float (N,) and its rate, decoded by FFmpeg."""
    if name == "pcm":
        return np.frombuffer(data, "<i2") / (1 << 15), rate
    options = {"sample_rate": str(rate), "ch_layout": "mono"}
    raw = {"format": name, "options": options} if name in ("mulaw", "alaw") else {}
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
    np.testing.assert_allclose(samples, TONE, atol=1e-4)
    with wave.open(io.BytesIO(data)) as file:
        assert len(file.readframes(10**6)) == 2 * TONE.size


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
    marked, plain = (AudioEncoder(name, tags=tags, hold=True) for tags in (MARK, None))
    files = [each.push(TONE) + each.finish() for each in (marked, plain)]
    for file, tags in zip(files, (MARK, {}), strict=True):
        with av.open(io.BytesIO(file)) as container:
            found = container.metadata or container.streams[0].metadata
            assert found.get("comment") == tags.get("comment")
        if name == "flac":  # a whole answer has its length
            assert sf.info(io.BytesIO(file)).frames == TONE.size and decode(file, MIB).seconds == SECONDS
    np.testing.assert_array_equal(*(decoded(name, file, 0)[0] for file in files))
    assert b"Lavf" not in files[0] or name in ("flac", "opus")  # whose comments have always named their writer


@pytest.mark.parametrize("tags", [None, MARK], ids=["plain", "marked"])
@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].container not in ("", "mulaw", "alaw")])
def test_an_answer_can_be_the_recording_of_a_voice(name: str, tags: dict[str, str] | None) -> None:
    encoder = AudioEncoder(name, tags=tags)
    answer = encoder.push(TONE) + encoder.finish()
    assert decode(answer, MIB).seconds == pytest.approx(len(TONE) / SAMPLE_RATE, abs=0.1)


@pytest.mark.parametrize("name", ["pcm", "mulaw"])
def test_samples_alone_have_no_place_for_a_mark(name: str) -> None:
    assert AudioEncoder(name, tags=MARK).push(TONE) == AudioEncoder(name).push(TONE)


def measured(*chunks: np.ndarray) -> float | None:
    loudness = Loudness()
    for chunk in chunks:
        loudness.add(chunk)
    return loudness.lufs


# Of pyloudnorm 0.2.0, whose filters are BS.1770's at any rate.
@pytest.mark.parametrize(("hertz", "amplitude", "lufs"), [(997, 1, -3.06), (100, 0.1, -24.87), (5000, 0.2, -13.70)])
def test_tones_have_the_loudness_of_the_standard(hertz: float, amplitude: float, lufs: float) -> None:
    tone = sine(hertz, amplitude, 3.0)
    assert measured(*np.array_split(tone, 7)) == pytest.approx(lufs, abs=0.02)
    assert measured(tone[:4800]) == pytest.approx(lufs, abs=0.3)  # less than a block
    assert measured(tone, tone / 1000, np.zeros(SAMPLE_RATE, np.float32)) == pytest.approx(lufs, abs=0.4)
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
    click = sine(997, 0.01, 3.0)
    click[SAMPLE_RATE] = 0.5
    assert np.abs(Leveller(-10, hold=False).push(click)).max() == pytest.approx(PEAK, abs=0.01)
    quiet = Leveller(-10, hold=False)
    quiet.push(sine(997, 0.01, 3.0))
    assert np.abs(quiet.push(click[SAMPLE_RATE - 200 :])).max() <= PEAK + 0.01, "soon after a chunk's beginning"
    np.testing.assert_array_equal(Leveller(-10, hold=False).push(np.zeros(100, np.float32)), np.zeros(100))


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize(("kind", "speed"), [("wav", 1.0), ("wav", 1.5), ("mp3", 1.0), ("opus", 1.0)])
def test_parts_of_two_voices_with_a_loudness_are_one_file(kind: str, speed: float, hold: bool) -> None:
    encoder, data = AudioEncoder(kind, None, speed, hold=hold), b""
    for lufs in (-20, -30):
        encoder.begin(lufs)
        data += b"".join(map(encoder.push, np.array_split(sine(997, 0.3, 3.0), 5)))
    wave, rate = sf.read(io.BytesIO(data + encoder.finish()))
    assert len(wave) / rate == pytest.approx(2 * sine(997, 0.3, 3.0).size / SAMPLE_RATE / speed, abs=0.15)
    first, second = (np.sqrt(np.square(part).mean()) for part in np.array_split(wave, 2))
    assert 20 * np.log10(first / second) == pytest.approx(10, abs=1)


TELEPHONE: dict[str, Any] = {"response_format": "mulaw", "frame_ms": 20, "pace": "realtime"}


def frames(served: StubbedService) -> int:
    return round(served.stub.chunks * served.stub.samples / SAMPLE_RATE / 0.02)


def test_frames_are_sent_when_they_are_played_over_http_and_the_websocket(served: StubbedService) -> None:
    least, begun = (frames(served) - 1) * 0.02, time.monotonic()
    answer = served.post({"input": "Hello.", **TELEPHONE})
    assert time.monotonic() - begun >= least
    assert (answer.headers["content-type"], answer.headers["x-sample-rate"]) == ("audio/PCMU", "8000")
    assert len(answer.content) == pytest.approx(160 * frames(served), abs=160) and len(answer.content) % 160 == 0
    *deltas, _ = events_of(served.post({"input": "Hello.", **TELEPHONE, "stream_format": "sse"}))
    assert {len(base64.b64decode(delta["audio"])) for delta in deltas} == {160}
    with served.connect() as socket:
        send(socket, "session.config", **TELEPHONE)
        begun = time.monotonic()
        say(socket, "Hello.")
    assert time.monotonic() - begun >= least
    error = served.post({"input": "Hello.", "pace": "realtime"}).json()["error"]
    assert error["param"] == "pace" and "needs frame_ms" in error["message"]
    service = Service(Settings(), cast(Any, None), cast(Any, None), cast(Any, None))
    asked = [SpeechRequest(input="Hello.", **TELEPHONE, stream=stream) for stream in (True, False)]
    assert [service.encoder(each).frame_seconds for each in asked] == [0.02, 0.0]


@contextmanager
def program(number: int, written: str, served: StubbedService, folder: Path) -> Iterator[int]:
    """The port at which a program of the page listens, with the addresses of the test."""
    port = free_port()
    used = ("http://localhost:10086", served.url), (written, str(port)), ('"nezumi"', '"zoe"')
    (folder / "telephone.py").write_text(block("telephony.md", "python", *used, number=number), encoding="utf-8")
    with subprocess.Popen([sys.executable, folder / "telephone.py"]) as process, sockets.socket() as probe:
        try:
            until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0, 30)
            yield port
        finally:
            process.kill()


def test_asterisk_gets_frames_and_a_hang_up(served: StubbedService, tmp_path: Path) -> None:
    got: list[tuple[int, int]] = []
    with program(0, "9092", served, tmp_path) as port:
        with sockets.create_connection(("127.0.0.1", port), timeout=30) as call, call.makefile("rb") as heard:
            call.sendall(b"\x01\x00\x10" + bytes(16))  # the call's UUID
            while not got or got[-1][0]:
                kind, size = struct.unpack(">BH", heard.read(3))
                got.append((kind, len(heard.read(size))))
    assert got[-1] == (0, 0) and set(got[:-1]) == {(0x10, 320)}
    assert len(got) - 1 == pytest.approx(frames(served), abs=1)


def test_freeswitch_gets_a_file_to_play(served: StubbedService, tmp_path: Path) -> None:
    with program(1, "9093", served, tmp_path) as port, connect(f"ws://127.0.0.1:{port}/") as call:
        call.send(bytes(320))
        said = json.loads(call.recv(30))
    assert said["type"] == "streamAudio" and said["data"]["audioDataType"] == "raw"
    samples = len(base64.b64decode(said["data"]["audioData"])) // 2
    assert said["data"]["sampleRate"] == 8000 and samples == pytest.approx(160 * frames(served), abs=160)


MIB = 1 << 20


def idle() -> int:
    """The id of the process that is next."""
    return int(recordings._idle.queue[-1]._process.pid)


def peak(process: int) -> int:
    """The most bytes of memory that it has had."""
    (line,) = (each for each in Path(f"/proc/{process}/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def test_a_process_that_dies_or_hangs_fails_its_recording_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode(recording(), MIB).seconds == 1
    before = idle()
    os.kill(before, signal.SIGKILL)
    with pytest.raises(ValueError, match="cannot be decoded with 256 MiB of memory in 10 s"):
        decode(recording(), MIB)
    assert decode(recording(), MIB).seconds == 1 and idle() != before
    hung = idle()
    os.kill(hung, signal.SIGSTOP)
    monkeypatch.setattr(recordings, "SECONDS", 0.1)
    with pytest.raises(ValueError, match="cannot be decoded"):
        decode(recording(), MIB)
    monkeypatch.undo()
    assert decode(recording(), MIB).seconds == 1
    until(lambda: not Path(f"/proc/{hung}").exists())


def test_a_process_that_cannot_be_started_is_no_fault_of_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    os.kill(idle(), signal.SIGKILL)
    with pytest.raises(ValueError):
        decode(recording(), MIB)  # no process is left
    monkeypatch.setattr(recordings.subprocess, "Popen", Mock(side_effect=OSError("no memory")))
    with pytest.raises(OSError, match="no memory"):
        decode(recording(), MIB)
    monkeypatch.undo()
    assert decode(recording(), MIB).seconds == 1


def test_a_process_has_little_memory_and_no_torch() -> None:
    found = decode(recording(1.0, 96_000), MIB)
    assert (found.rate, found.seconds) == (48_000, 1.0)
    assert psutil.Process(idle()).rlimit(psutil.RLIMIT_DATA)[0] < 512 * MIB
    assert "torch" not in Path(f"/proc/{idle()}/maps").read_text()


def test_two_minutes_of_stereo_at_192_khz_are_resampled_while_they_are_decoded() -> None:
    """Their samples are 92 MB, which would be there several times."""
    recordings.warm_up()
    second, file = sf.read(io.BytesIO(recording(1.0, 192_000, channels=2)))[0], io.BytesIO()
    with sf.SoundFile(file, "w", 192_000, 2, format="FLAC") as written:
        for _ in range(120):
            written.write(second)
    before = peak(process := idle())
    found = decode(file.getvalue(), 20 * MIB, 120)
    assert (found.rate, found.seconds) == (48_000, 120) and idle() == process
    assert peak(process) - before < 140 * MIB
