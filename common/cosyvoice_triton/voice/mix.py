"""Mixed voices: a name `anna(2)+bert` asks for a voice between registered ones.

Only x-vectors are mixed. Speech tokens, mel and transcript belong to one recording of one voice, so a mix has none: it
is a voice of an x-vector alone.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cosyvoice_triton.constants import MEL_BINS
from cosyvoice_triton.voice.prompt import Prompt, Recording

MAX_MIXED = 4  # voices of a mix
MAX_MIX_CHARS = 1000  # of its name

_PLUS = re.compile(r"\+(?![^()]*\))")  # not those in parentheses, such as that of 1e+3
_PART = re.compile(r"(.*?)(?:\(([^()]*)\))?")


@dataclass(frozen=True)
class Mix:
    """Voices and their weights, above 0."""

    parts: Sequence[tuple[Recording | Prompt, float]]

    # As of a `Prompt` of an x-vector alone.
    text: ClassVar[str] = ""
    instruction: ClassVar[str] = ""
    loudness: ClassVar[None] = None
    tokens: ClassVar[np.ndarray] = np.zeros(0, np.int64)
    mel: ClassVar[np.ndarray] = np.zeros((0, MEL_BINS), np.float32)

    async def embedding(self, encode: Callable[[Recording], Awaitable[np.ndarray]]) -> np.ndarray:
        """Return the weighted mean (192,) of the voices' x-vectors, each scaled to unit length, as flows scale every
        x-vector.

        encode: x-vector (192,) of a recording.
        """

        async def of(voice: Recording | Prompt) -> np.ndarray:
            return voice.embedding if isinstance(voice, Prompt) else await encode(voice)

        vectors = np.stack(await asyncio.gather(*(of(voice) for voice, _ in self.parts))).astype(np.float64)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)  # (voices, 1)
        weights = np.array([weight for _, weight in self.parts])
        weights = weights / weights.max()  # their sum could be infinite
        return np.average(vectors / np.maximum(lengths, np.finfo(float).tiny), axis=0, weights=weights)


def mixed_voices(name: str) -> list[tuple[str, float]]:
    """Return the names and weights in `anna(2)+bert`, where a missing weight is 1; none if `name` is not of this form.

    ValueError naming the value that is invalid.
    """
    parts = _PLUS.split(name) if len(name) <= MAX_MIX_CHARS else []
    if len(parts) < 2:
        return []
    if len(parts) > MAX_MIXED:
        raise ValueError(f"speaker {name!r} mixes {len(parts)} voices, more than {MAX_MIXED}")
    return [_part(part, name) for part in parts]


def is_mix(name: str) -> bool:
    """Return whether `name` has the form of a mix, a valid one or not."""
    return len(_PLUS.split(name)) > 1


def _part(part: str, name: str) -> tuple[str, float]:
    found = _PART.fullmatch(part.strip())
    voice, weight = found.groups() if found else (part, None)
    if not voice.strip():
        raise ValueError(f"speaker {name!r} mixes a voice without a name")
    try:
        value = 1.0 if weight is None else float(weight)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"speaker {name!r}: the weight {weight!r} of {voice.strip()!r} is not a number above 0")
    return voice.strip(), value
