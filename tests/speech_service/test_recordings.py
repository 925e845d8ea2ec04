"""Recordings are decoded in processes that may die alone."""

import io
import os
import signal
import sys
from pathlib import Path

import pytest
import soundfile as sf
from cosyvoice_triton.speech_service.audio import recordings
from cosyvoice_triton.speech_service.audio.recordings import decode

from tests.support.speech_fixtures import recording
from tests.support.waiting import until

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


def test_a_process_has_little_memory_and_no_torch() -> None:
    decode(recording(), MIB)
    limits = Path(f"/proc/{idle()}/limits").read_text()
    (data,) = (line.split()[3] for line in limits.splitlines() if line.startswith("Max data size"))
    assert int(data) < 512 * MIB
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


def test_a_recording_above_48_khz_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = decode(recording(1.0, 96_000), MIB)
    assert (found.rate, found.seconds) == (48_000, 1.0)


def test_speech_to_convert_may_be_longer_than_a_recording_of_a_voice() -> None:
    for kind in ("WAV", "FLAC"):
        long = recording(31, 8_000, kind=kind)
        with pytest.raises(ValueError, match="longer than 30 s"):
            decode(long, MIB)
        assert decode(long, MIB, 120).seconds == 31
        with pytest.raises(ValueError, match="longer than 120 s"):
            decode(recording(121, 8_000, kind=kind), 2 * MIB, 120)
