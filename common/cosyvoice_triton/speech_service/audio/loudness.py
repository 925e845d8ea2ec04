"""Speech at a set loudness, measured as EBU R128 does (ITU-R BS.1770-5), while it is streamed."""

from functools import lru_cache

import numpy as np

from cosyvoice_triton.constants import SAMPLE_RATE

BLOCK, STEP = SAMPLE_RATE * 2 // 5, SAMPLE_RATE // 10  # 400 ms, every 100 ms
ABSOLUTE_GATE, RELATIVE_GATE = -70.0, -10.0  # LUFS; below the mean of what passes the first
PEAK = 10 ** (-1 / 20)  # -1 dBFS
MAX_GAIN = 10.0  # of silence and noise it would make a roar
# Samples from one gain to a higher one, and to a lower one: a peak may follow at once, and a step would be a click.
RAMP, FALL = SAMPLE_RATE // 20, SAMPLE_RATE // 160


class Loudness:
    """The integrated loudness of audio at SAMPLE_RATE that comes in chunks. The K-weighting is applied to spectra of
    the blocks. Before there is a block, what there is counts as one."""

    def __init__(self) -> None:
        self._rest = np.zeros(0, np.float32)
        self._powers: list[float] = []

    def add(self, chunk: np.ndarray) -> None:
        """Measure a chunk, float32 (N,)."""
        self._rest = np.concatenate([self._rest, chunk])
        while self._rest.size >= BLOCK:
            self._powers.append(_power(self._rest[:BLOCK]))
            self._rest = self._rest[STEP:]

    @property
    def lufs(self) -> float | None:
        """Return the loudness so far; None while all is silence."""
        powers = np.array(self._powers or ([_power(self._rest)] if self._rest.size else []))
        for gate in (0.0, RELATIVE_GATE):
            least = 10 ** ((ABSOLUTE_GATE + 0.691) / 10) if not gate else powers.mean() * 10 ** (gate / 10)
            powers = powers[powers > least]
            if not powers.size:
                return None
        return float(10 * np.log10(powers.mean()) - 0.691)


class Leveller:
    """Brings an answer to a loudness.

    A chunk counts before it is scaled, so that nothing is held back for it; the gain then moves with what is known of
    the answer. hold: nothing is returned before the end, and all of it has one gain. Peaks stay below -1 dBFS,
    but for the first 6 ms of a chunk that is louder than those before.
    """

    def __init__(self, lufs: float, *, hold: bool) -> None:
        self._target, self._hold = lufs, hold
        self._loudness = Loudness()
        self._held: list[np.ndarray] = []
        self._peak = 0.0
        self._gain: float | None = None

    def push(self, chunk: np.ndarray) -> np.ndarray:
        """Return what is to be sent of a chunk, float32 (N,)."""
        self._loudness.add(chunk)
        self._peak = max(self._peak, float(np.abs(chunk).max(initial=0.0)))
        if self._hold:
            self._held.append(chunk)
            return chunk[:0]
        return self._scaled(chunk)

    def finish(self) -> np.ndarray:
        """Return what was held back."""
        held, self._held = self._held, []
        return self._scaled(np.concatenate(held)) if held else np.zeros(0, np.float32)

    def _scaled(self, chunk: np.ndarray) -> np.ndarray:
        if (lufs := self._loudness.lufs) is None:
            return chunk
        gain = min(10 ** ((self._target - lufs) / 20), MAX_GAIN, PEAK / max(self._peak, 1e-9))
        gains = np.full(chunk.size, gain, np.float32)
        if self._gain is not None:
            size = RAMP if gain > self._gain else FALL
            ramp = np.linspace(self._gain, gain, size, dtype=np.float32)[: chunk.size]
            gains[: ramp.size] = ramp
            gain = float(gains[-1]) if chunk.size else self._gain
        self._gain = gain
        return chunk * gains


def _power(block: np.ndarray) -> float:
    """Return the mean square of a K-weighted block (N,)."""
    spectrum = np.abs(np.fft.rfft(block)) ** 2
    spectrum[1 : (block.size + 1) // 2] *= 2  # the other half of the frequencies
    return float(spectrum @ _weights(block.size)) / block.size**2


@lru_cache(maxsize=8)  # a first chunk has any size
def _weights(size: int) -> np.ndarray:
    """Return the squared gain of the K-weighting at the frequencies of a spectrum: a shelf of +4 dB above 1.5 kHz, for
    the head, and a high-pass at 38 Hz."""
    z = np.exp(-2j * np.pi * np.arange(size // 2 + 1) / size)
    amplitude, steep = 10 ** (4 / 40), 1 / np.sqrt(2)
    cosine, alpha = _angle(1500.0, steep)
    root = 2 * np.sqrt(amplitude) * alpha
    up, down = amplitude + 1, amplitude - 1
    shelf = amplitude * np.polyval([up + down * cosine - root, -2 * (down + up * cosine), up + down * cosine + root], z)
    shelf /= np.polyval([up - down * cosine - root, 2 * (down - up * cosine), up - down * cosine + root], z)
    cosine, alpha = _angle(38.0, 0.5)
    high = (1 + cosine) / 2 * np.polyval([1, -2, 1], z) / np.polyval([1 - alpha, -2 * cosine, 1 + alpha], z)
    return np.asarray(np.abs(shelf * high) ** 2)


def _angle(hertz: float, quality: float) -> tuple[float, float]:
    angle = 2 * np.pi * hertz / SAMPLE_RATE
    return float(np.cos(angle)), float(np.sin(angle) / (2 * quality))
