"""Sound files and resampling.

Waveforms are mono float32 in -1..1. torch is imported only where a recording is resampled, see `features`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cosyvoice_triton.constants import (
    MAX_REFERENCE_RATE,
    MAX_REFERENCE_SECONDS,
    MIN_REFERENCE_RATE,
    REFERENCE_RATE_STEP,
    SAMPLE_RATE,
)
from cosyvoice_triton.voice.prompt import Recording, validate_reference

_INT16_PEAK = 32767

_UNTRUSTED_RATES = (4_000, 192_000)
# A few kilobytes of silence can have 255 channels, and libsndfile's rarer decoders are hardly tested.
_UNTRUSTED_CHANNELS = 8
_UNTRUSTED_FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
_BLOCK_FRAMES = 1 << 15  # decoded at once, so that memory does not grow with the number of channels


def load_audio(source: str | Path | BinaryIO, rate: int, *, max_seconds: float | None = None) -> np.ndarray:
    """Return a sound file (path or open file) of any rate and channel count as float32 (N,) at `rate`, channels
    averaged.

    Only libsndfile reads it (WAV, FLAC, OGG, MP3): FFmpeg's demuxers would open files that a playlist names.
    max_seconds: for files from untrusted clients. ValueError if the file is longer, which is found out without decoding
    the rest, or if its header names a format, a number of channels or a rate that would make reading it expensive.
    soundfile.LibsndfileError (a RuntimeError) if the file cannot be opened or is not audio.
    """
    samples, own = _decoded(source, max_seconds)
    return _resampled(samples, own, rate)


def load_recording(source: str | Path | BinaryIO, *, max_seconds: float | None = None) -> Recording:
    """Return a sound file as a recording at its own rate, unless that is none that recordings have; not validated.
    Parameters and errors are those of `load_audio`."""
    samples, own = _decoded(source, max_seconds)
    rate = SAMPLE_RATE if own % REFERENCE_RATE_STEP else min(max(own, MIN_REFERENCE_RATE), MAX_REFERENCE_RATE)
    return Recording(_resampled(samples, own, rate), rate=rate)


def at_rate(recording: Recording, rate: int) -> np.ndarray:
    """Return the samples of a recording at `rate`: float32 (N,)."""
    return _resampled(recording.wav, recording.rate, rate)


def _resampled(samples: np.ndarray, own: int, rate: int) -> np.ndarray:
    """Return samples (N,) at the rate `own` as (ceil(N * rate / own),)."""
    if own == rate:
        return samples
    import torch  # here: clients and the speech service start without it

    from cosyvoice_triton.voice.features import resample

    return resample(torch.from_numpy(samples), own, rate).numpy()


def _decoded(source: str | Path | BinaryIO, max_seconds: float | None) -> tuple[np.ndarray, int]:
    """Return the samples of a sound file, float32 (N,), and their rate."""
    import soundfile as sf  # here: the models' processes read no sound files unless recordings are registered

    if isinstance(source, (str, Path)):
        Path(source).stat()  # FileNotFoundError: libsndfile calls a missing file a "System error"
    with sf.SoundFile(source if isinstance(source, (str, Path)) else _Lenient(source)) as file:
        limit = sys.maxsize
        if max_seconds is not None:
            _require_cheap(file.format, file.channels, file.samplerate)
            limit = int(max_seconds * file.samplerate) + 1
        with np.errstate(all="ignore"):  # a file of floats may hold any; `validate_reference` names them
            samples = np.concatenate([np.zeros(0, np.float32), *_mono_blocks(file, limit)])
        if max_seconds is not None and len(samples) == limit:
            raise ValueError(f"the recording is longer than {max_seconds:g} s")
        return samples, file.samplerate


class _Lenient:
    """An open file for libsndfile, whose calls must not raise: cffi prints a traceback for each that does. A seek to
    where no file can be, which a malformed header asks for, leaves the position; libsndfile notices that."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tell, self.read = file.tell, file.read
        self.readinto = file.readinto  # type: ignore[attr-defined]  # files and BytesIO have it; libsndfile needs it

    def seek(self, offset: int, whence: int = 0) -> int:
        try:
            return self._file.seek(offset, whence)
        except (ValueError, OverflowError, OSError):
            return self._file.tell()


def _mono_blocks(file: Any, limit: int) -> Iterator[np.ndarray]:
    """Yield up to `limit` frames of an open sound file as float32 (N,). `SoundFile.blocks` does not find the end of
    files that cannot seek, such as those of GSM 06.10."""
    while limit > 0 and len(block := file.read(min(_BLOCK_FRAMES, limit), dtype="float32", always_2d=True)):
        limit -= len(block)
        yield block.mean(axis=1)


def _require_cheap(kind: str, channels: int, rate: int) -> None:
    """Raise ValueError naming what an untrusted file's header asks for, if decoding or resampling it could be
    expensive."""
    if kind not in _UNTRUSTED_FORMATS:
        raise ValueError(f"the recording is a file of the format {kind}: send WAV, FLAC, OGG or MP3")
    if channels > _UNTRUSTED_CHANNELS:
        raise ValueError(f"the recording has {channels} channels, more than the limit of {_UNTRUSTED_CHANNELS}")
    lowest, highest = _UNTRUSTED_RATES
    if rate % REFERENCE_RATE_STEP or not lowest <= rate <= highest:
        raise ValueError(
            f"the recording's sample rate is {rate}: use a multiple of {REFERENCE_RATE_STEP} from {lowest} to "
            f"{highest}, such as {SAMPLE_RATE}"
        )


def load_reference(source: Path | BinaryIO, max_seconds: float = MAX_REFERENCE_SECONDS) -> Recording:
    """Return a sound file as a reference recording. ValueError as in `validate_reference`, and as in `load_audio` for
    files from untrusted clients."""
    recording = load_recording(source, max_seconds=max_seconds)
    validate_reference(recording.wav, rate=recording.rate, max_seconds=max_seconds)
    return recording


def save_audio(path: str | Path | BinaryIO, waveform: np.ndarray, rate: int) -> None:
    """Write float32 (N,) as a 16-bit mono WAV; samples outside -1..1 are clipped."""
    import soundfile as sf

    pcm = np.rint(np.clip(waveform, -1.0, 1.0) * _INT16_PEAK).astype(np.int16)
    sf.write(path, pcm, rate, format="WAV", subtype="PCM_16")
