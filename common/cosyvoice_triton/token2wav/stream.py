"""What token2wav keeps of a live stream, and a chunk of one.

A chunk is checked once, when it is made (`StreamingFlow.chunk`); the same object then goes through the scheduler, the
flow's solver and the vocoder.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

from cosyvoice_triton.constants import SAMPLE_RATE, TOKEN_MEL_RATIO

# CosyVoice3's utterances sometimes begin in the middle of a wave, which is heard as a click.
FADE_SAMPLES = SAMPLE_RATE // 50  # 20 ms, as cosyvoice.cpp
BEGINNING = SAMPLE_RATE // 500  # 2 ms: no speech rises so fast
LOUD = 0.01  # -40 dBFS; where speech begins with silence, nothing is changed


class NotFiniteError(FloatingPointError):
    """A mel or audio with values that are infinite or no numbers."""


@dataclass
class VocoderState:
    """The vocoder's part of a stream: its slot in the overlap pool and its position."""

    slot: int
    frame: int = 0  # absolute index of the first frame that the next chunk renders, repeated ones included
    begun: bool = False  # the slot holds an overlap
    pending: Tensor | None = None  # (80, T): frames too few for a chunk of their own


@dataclass(kw_only=True)
class Stream:
    """All that one live stream owns; each flow adds its own part. Dropping it frees it."""

    vocoder: VocoderState
    rendered: int = 0  # tokens that have become mel
    begun: bool = False  # audio of it has been returned


StreamT = TypeVar("StreamT", bound=Stream)


@dataclass(frozen=True, eq=False)
class Chunk(Generic[StreamT]):
    """Speech tokens that continue a stream.

    tokens: (n,) int64 ids 0..6560; of a cumulative flow all of the stream so far, otherwise the new ones. A chunk that
        is not final ends with LOOKAHEAD_TOKENS of context, which the next chunk sends again as tokens of its own.
    final: no chunk comes after it. offset: tokens rendered before it. new: tokens that it renders.
    computed: tokens that the networks compute for it, which is what it costs.
    """

    stream: StreamT
    tokens: np.ndarray
    final: bool
    offset: int
    new: int
    computed: int

    @property
    def frames(self) -> int:
        """Return how many mel frames the chunk adds."""
        return TOKEN_MEL_RATIO * self.new


def without_click(audio: np.ndarray) -> np.ndarray:
    """Return the first audio (N,) of an utterance, faded in over 20 ms if it begins loudly."""
    if not (np.abs(audio[:BEGINNING]) > LOUD).any():
        return audio
    faded = audio.copy()
    faded[:FADE_SAMPLES] *= np.linspace(0, 1, FADE_SAMPLES, dtype=np.float32)[: len(audio)]
    return faded
