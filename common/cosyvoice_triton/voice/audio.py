"""Sound files and resampling.

Waveforms are mono float32 in -1..1.
"""

import io
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
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
from cosyvoice_triton.voice.prompt import Recording

_INT16_PEAK = 32767

_UNTRUSTED_RATES = (4_000, 192_000)
MAX_CHANNELS = 8  # as 7.1; a few kilobytes of silence can have 255
# libsndfile's rarer decoders are hardly tested.
_UNTRUSTED_FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
_BLOCK_FRAMES = 1 << 15  # decoded at once, so that memory does not grow with the number of channels

_SINC_ZEROS = 6  # zero crossings of the resampling filter on each side
_SINC_ROLLOFF = 0.99  # its cut-off, as a fraction of the lower Nyquist frequency


def load_audio(source: str | Path | BinaryIO, rate: int) -> np.ndarray:
    """Return a sound file of one's own (path or open file), of any rate and channel count, as float32 (N,) at `rate`,
    channels averaged.

    Only libsndfile reads it (WAV, FLAC, OGG, MP3): FFmpeg's demuxers would open files that a playlist names.
    soundfile.LibsndfileError (a RuntimeError) if the file cannot be opened or is not audio.
    """
    return _decoded(source, lambda own: rate).wav


def load_recording(source: str | Path | BinaryIO) -> Recording:
    """Return a sound file as a recording at its own rate, unless that is none that recordings have; not validated.
    Files and errors are those of `load_audio`."""

    def rate(own: int) -> int:
        return SAMPLE_RATE if own % REFERENCE_RATE_STEP else min(max(own, MIN_REFERENCE_RATE), MAX_REFERENCE_RATE)

    return _decoded(source, rate)


def load_untrusted(data: bytes, max_seconds: float = MAX_REFERENCE_SECONDS) -> Recording:
    """Return the content of a sound file as a recording, read by libsndfile; not validated otherwise.

    ValueError, before a sample is decoded, if its header names a format, a number of channels or a rate that would make
    that expensive; and if it is longer than `max_seconds`, without decoding the rest. LibsndfileError if it is
    no such file.
    """
    return _decoded(io.BytesIO(data), carried_rate, max_seconds)


def at_rate(recording: Recording, rate: int) -> np.ndarray:
    """Return the samples of a recording at `rate`: float32 (N,)."""
    if recording.rate == rate:
        return recording.wav
    begins = range(0, len(recording.wav), _BLOCK_FRAMES)
    blocks = (recording.wav[begin : begin + _BLOCK_FRAMES] for begin in begins)
    return _joined(_resampled(blocks, recording.rate, rate))


def require_cheap(channels: int, rate: int) -> None:
    """Raise ValueError naming what an untrusted file's header says, if decoding or resampling it could be expensive."""
    if not 0 < channels <= MAX_CHANNELS:
        raise ValueError(f"the recording has {channels} channels: expected 1 to {MAX_CHANNELS}")
    lowest, highest = _UNTRUSTED_RATES
    if not lowest <= rate <= highest or rate % REFERENCE_RATE_STEP or carried_rate(rate) > MAX_REFERENCE_RATE:
        raise ValueError(
            f"the recording's sample rate is {rate}: use a multiple of {REFERENCE_RATE_STEP} from {lowest} to "
            f"{highest}, such as {SAMPLE_RATE}"
        )


def carried_rate(own: int) -> int:
    """Return the rate at which a recording of the rate `own` is carried: the nearest whole part or multiple of it,
    whose resampling filter is short; `own` if there is none."""
    parts = -(-own // MAX_REFERENCE_RATE)
    return own if own % (parts * REFERENCE_RATE_STEP) else own // parts * -(-MIN_REFERENCE_RATE // own)


def _resampled(blocks: Iterable[np.ndarray], own: int, rate: int) -> Iterator[np.ndarray]:
    """Yield N samples at the rate `own`, in blocks, as ceil(N * rate / own), with the values of `features.resample`. No
    more than a block is held: two minutes at 192 kHz would be 92 MB."""
    divisor = math.gcd(own, rate)
    source, target = own // divisor, rate // divisor
    kernel = sinc_kernel(source, target).T  # (taps, target)
    margin = (len(kernel) - source) // 2
    held, left = np.zeros(margin, np.float32), 0  # what windows still need; `source` times the samples to come
    for block in itertools.chain(blocks, [None]):
        left += 0 if block is None else target * len(block)
        held = np.concatenate([held, np.zeros(margin + source, np.float32) if block is None else block])
        if (count := (len(held) - len(kernel)) // source + 1) > 0:
            windows = np.lib.stride_tricks.sliding_window_view(held, len(kernel))[::source]  # (count, taps)
            most = max(1, _BLOCK_FRAMES // source)  # BLAS copies the windows
            for begin in range(0, count, most):
                phases = (windows[begin : begin + most] @ kernel).reshape(-1)  # (most * target,)
                yield phases if block is not None else phases[: max(0, -(-left // source))]
                left -= source * len(phases)
            held = held[source * count :]


@lru_cache(maxsize=16)
def sinc_kernel(source: int, target: int) -> np.ndarray:
    """Return a windowed sinc for resampling by target / source, one row per output phase: float32 (target, source + 2 *
    margin)."""
    cutoff = min(source, target) * _SINC_ROLLOFF
    margin = math.ceil(_SINC_ZEROS * source / cutoff)
    taps = np.arange(-margin, margin + source) / source
    phases = np.arange(0, -target, -1)[:, None] / target
    t = np.clip((phases + taps) * cutoff, -_SINC_ZEROS, _SINC_ZEROS)
    window = np.square(np.cos(t * math.pi / _SINC_ZEROS / 2))
    return (np.sinc(t) * window * (cutoff / source)).astype(np.float32)


def _decoded(
    source: str | Path | BinaryIO, rate_of: Callable[[int], int], max_seconds: float | None = None
) -> Recording:
    """Return a sound file at the rate that `rate_of` its own one is, resampled as it is decoded. max_seconds: for files
    of strangers."""
    import soundfile as sf  # here: the models' processes read no sound files unless recordings are registered

    if isinstance(source, (str, Path)):
        Path(source).stat()  # FileNotFoundError: libsndfile calls a missing file a "System error"
    with sf.SoundFile(source if isinstance(source, (str, Path)) else _Lenient(source)) as file:
        own = file.samplerate
        if max_seconds is not None:
            if file.format not in _UNTRUSTED_FORMATS:
                raise ValueError(f"the recording is a file of the format {file.format}: send WAV, FLAC, OGG or MP3")
            require_cheap(file.channels, own)
        blocks = _mono_blocks(file, max_seconds)
        with np.errstate(all="ignore"):  # a file of floats may hold any; `validate_reference` names them
            rate = rate_of(own)
            return Recording(_joined(blocks if rate == own else _resampled(blocks, own, rate)), rate=rate)


def _joined(blocks: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *blocks])


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


def _mono_blocks(file: Any, max_seconds: float | None) -> Iterator[np.ndarray]:
    """Yield an open sound file as float32 (N,); ValueError if it is longer than `max_seconds`. `SoundFile.blocks` does
    not find the end of files that cannot seek, such as those of GSM 06.10."""
    left = sys.maxsize if max_seconds is None else int(max_seconds * file.samplerate)
    while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
        if (left := left - len(block)) < 0:
            raise ValueError(f"the recording is longer than {max_seconds:g} s")
        yield block.mean(axis=1)


def save_audio(path: str | Path | BinaryIO, waveform: np.ndarray, rate: int) -> None:
    """Write float32 (N,) as a 16-bit mono WAV; samples outside -1..1 are clipped."""
    import soundfile as sf

    pcm = np.rint(np.clip(waveform, -1.0, 1.0) * _INT16_PEAK).astype(np.int16)
    sf.write(path, pcm, rate, format="WAV", subtype="PCM_16")
