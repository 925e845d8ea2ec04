"""When the first audible sample of an answer is heard: leading silence is waiting, too.

Audible is what `nari-labs/benchmarks` takes for it, so that its figures and ours can be compared: two windows of 20 ms
in a row, 10 ms apart, whose level without their mean is at least -45 dBFS.
"""

import numpy as np

from cosyvoice_triton.constants import SAMPLE_RATE

STEP = SAMPLE_RATE // 100  # samples; a window is two of them
BLOCK = 50 * STEP  # looked at together: most answers are audible soon
LEVEL = 10 ** (-45 / 20)  # root mean square, of a full scale of 1


def leading_silence(waveform: np.ndarray) -> float | None:
    """Return the seconds of `waveform`, float32 (N,), before it becomes audible; None if it never does."""
    for begin in range(0, waveform.size - 2 * STEP, BLOCK):
        block = waveform[begin : begin + BLOCK + 2 * STEP].astype(np.float64)  # so that windows cross its end
        steps = block[: block.size // STEP * STEP].reshape(-1, STEP)  # (N,) -> (steps, STEP)
        sums = np.stack([steps.sum(axis=1), (steps * steps).sum(axis=1)])
        mean, square = (sums[:, :-1] + sums[:, 1:]) / (2 * STEP)  # of windows
        loud = square - mean**2 >= LEVEL**2
        both = np.flatnonzero(loud[:-1] & loud[1:])
        if both.size:
            return float((begin + both[0] * STEP) / SAMPLE_RATE)
    return None
