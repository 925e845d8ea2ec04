"""What the listener of an answer hears: which part of it, and how much is left to play.

Silence at the start of an answer is waiting, silence at its end is nothing. How much audio a listener has left is what
scheduling, chunk lengths and admission are decided by.

Audible are three windows of 20 ms in a row, 10 ms apart, that are at most QUIET_DB below the loudest window. So the
breath and the h, f or s before a vowel are heard, and a single click is not.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from cosyvoice_triton.constants import SAMPLE_RATE

STEP = SAMPLE_RATE // 100  # samples; a window is two of them
QUIET_DB = -45.0
_HEARD = 4 * STEP  # samples of three windows
# Speech is at least as loud in one of its windows, dBFS. So silence is silence although nothing louder came yet.
SPEECH_DB = -20.0

LEAD_SECONDS = 0.03  # left before the onset
TAIL_SECONDS = 0.15  # the most that is left after the end
FADE_SECONDS = 0.01  # where silence was cut
_LEAD, _TAIL, _FADE = (round(seconds * SAMPLE_RATE) for seconds in (LEAD_SECONDS, TAIL_SECONDS, FADE_SECONDS))
PLAYER_SECONDS = 0.25  # a player begins this long after the first audio: by how much a chunk may be late without a gap


def window_levels(waveform: np.ndarray) -> np.ndarray:
    """Return the power of each window of `waveform`, float32 (N,), without its mean: (N // STEP - 1,)."""
    steps = waveform[: waveform.size // STEP * STEP].reshape(-1, STEP).astype(np.float64)  # (N,) -> (steps, STEP)
    sums, squares = steps.sum(axis=1), np.square(steps).sum(axis=1)
    mean, square = (sums[:-1] + sums[1:]) / (2 * STEP), (squares[:-1] + squares[1:]) / (2 * STEP)
    return np.asarray(square - np.square(mean))


def audible_part(levels: np.ndarray, loudest: float = 0.0) -> tuple[int, int] | None:
    """Return begin and end, in samples, of what is heard of the windows; None if nothing is.

    loudest: power of the loudest window that was heard before these.
    """
    loudest = max(loudest, float(levels.max(initial=0.0)), 10 ** (SPEECH_DB / 10))
    loud = levels >= loudest * 10 ** (QUIET_DB / 10)
    begins = np.flatnonzero(loud[:-2] & loud[1:-1] & loud[2:])
    return (int(begins[0]) * STEP, int(begins[-1]) * STEP + _HEARD) if begins.size else None


def leading_silence(waveform: np.ndarray) -> float | None:
    """Return the seconds of `waveform`, float32 (N,), before it becomes audible; None if it never does."""
    part = audible_part(window_levels(waveform))
    return None if part is None else part[0] / SAMPLE_RATE


@dataclass(eq=False)
class SilenceTrimmer:
    """Cuts the silence at both ends of a segment that comes in chunks.

    At the start LEAD_SECONDS are left, at the end TAIL_SECONDS; what is between stays, and so does audio that is too
    short for a window. cut: samples of the start that were dropped so far.
    """

    cut: int = 0
    # The end of the silence before the onset.
    _held: np.ndarray = field(default_factory=partial(np.zeros, 0, np.float32))
    _begun: bool = False
    _loudest: float = 0.0
    _quiet: int = 0  # samples that were sent since the last audible one

    def trimmed(self, waveform: np.ndarray, final: bool) -> np.ndarray:
        """Return what is to be sent of the next chunk, float32 (N,): nothing while all is silent. A final one is not
        empty."""
        if waveform.size < _HEARD:
            self._begun = True
        if not self._begun:
            waveform = self._from_onset(np.concatenate([self._held, waveform]))
            if not self._begun and not final:
                self._held, waveform = waveform, waveform[:0]
        levels = window_levels(waveform)
        self._loudest = max(self._loudest, float(levels.max(initial=0.0)))
        part = audible_part(levels, self._loudest)
        if final:
            end = max(2 * STEP, _TAIL - self._quiet if part is None else part[1] + _TAIL)  # at least 20 ms
            if waveform.size > end:
                waveform = waveform[:end].copy()
                waveform[-_FADE:] *= np.linspace(1, 0, _FADE, dtype=np.float32)
            return waveform
        self._quiet = self._quiet + waveform.size if part is None else waveform.size - part[1]
        return waveform

    def _from_onset(self, waveform: np.ndarray) -> np.ndarray:
        """Return the waveform from shortly before its onset; its end, in which an onset may begin, if it has none."""
        part = audible_part(window_levels(waveform))
        begin = max(0, (waveform.size - _HEARD if part is None else part[0]) - _LEAD)
        self.cut += begin
        self._begun = part is not None
        if self._begun and self.cut:
            waveform = waveform.copy()
            waveform[begin : begin + _FADE] *= np.linspace(0, 1, _FADE, dtype=np.float32)
        return waveform[begin:]


class Playback:
    """A listener who plays audio from its arrival on. A gap of theirs puts off all that is played after it.

    left: seconds of audio that the listener already has when counting begins, `now` seconds on the caller's clock; None
    if there is none yet. buffer: seconds that their player waits after the first audio.
    """

    def __init__(self, left: float | None = None, now: float = 0.0, buffer: float = PLAYER_SECONDS) -> None:
        self._ends = None if left is None else now + left
        self._buffer = buffer

    def add(self, seconds: float, now: float) -> float:
        """Count audio that was sent to the listener. Returns the seconds of silence in their player before it."""
        if not seconds:
            return 0.0
        ends = now if self._ends is None else self._ends
        gap = max(0.0, now - self._buffer - ends)
        self._ends = ends + gap + seconds
        return gap

    def left(self, now: float) -> float | None:
        """Return seconds of audio that are not played yet, negative since they ran out; None before the first audio."""
        return None if self._ends is None else self._ends - now
