"""Speech of a given length, as dubbing needs it: rendered once, then again at the speed that fits."""

from collections.abc import Sequence

import numpy as np

from cosyvoice_triton.audible import LEAD_SECONDS, TAIL_SECONDS, audible_part, window_levels
from cosyvoice_triton.constants import SAMPLE_RATE

SLOWEST, FASTEST = 0.7, 1.4  # at 2.0 a quarter of the demo voice's words are misheard, at 1.4 a tenth as at 0.7
TOLERANCE = 0.03  # of the length, above which the caller is told


def fitting_speed(waves: Sequence[np.ndarray], silence: int, seconds: float, *, trims: bool) -> float:
    """Return the speed, within SLOWEST..FASTEST, at which segments come nearest to a length.

    waves: of the segments at speed 1, float32 (N,) each. silence: samples between them. trims: whether the silence at
    their ends is cut, of which LEAD_SECONDS and TAIL_SECONDS stay at any speed.
    """
    parts = []
    for wave in waves:
        heard = audible_part(window_levels(wave)) if trims else None
        begin, end = heard or (0, wave.size)
        parts.append((begin / SAMPLE_RATE, (end - begin) / SAMPLE_RATE, (wave.size - end) / SAMPLE_RATE))

    def length(speed: float) -> float:
        spoken = (min(a / speed, LEAD_SECONDS) + b / speed + min(c / speed, TAIL_SECONDS) for a, b, c in parts)
        return silence / SAMPLE_RATE + sum(spoken)

    low, high = SLOWEST, FASTEST
    for _ in range(12):  # to 0.02 % of the length
        middle = (low + high) / 2
        low, high = (middle, high) if length(middle) > seconds else (low, middle)
    return round((low + high) / 2, 3)


def misfit(seconds: float, wanted: float) -> str:
    """Return the warning about speech whose length is not the wanted one; "" if it is near enough."""
    if abs(seconds - wanted) <= TOLERANCE * wanted:
        return ""
    return f"the speech has {seconds:.2f} s, not {wanted:g}: it is at a speed of {SLOWEST:g} to {FASTEST:g}"
