"""What token2wav keeps of a live stream, and a chunk of one.

A chunk is checked once, when it is made (`StreamingFlow.chunk`); the same object then goes through the scheduler, the
flow's solver and the vocoder.
"""

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from cosyvoice_triton.constants import SAMPLE_RATE, TOKEN_MEL_RATIO
from cosyvoice_triton.device import on_device

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


class MelStretch:
    """Stretches the mel of one stream to 1 / speed of its length, by linear interpolation between its frames.

    A frame of the result comes with the chunk that has both of its neighbours, so that chunks make what the whole does.
    A chunk can be stretched again until `keep` is called.
    """

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._before: Tensor | None = None  # (80, 1): the last frame of the chunk before
        self._last: Tensor | None = None  # of this one

    def stretched(self, mel: Tensor, begin: int, final: bool) -> Tensor:
        """Return the frames (80, M) that a chunk completes, given its mel (80, T) and how many frames came before."""
        end = begin + mel.shape[1]
        first, stop = self._made(begin), self._made(end)
        if final:  # as many as of a whole utterance
            stop = max(1, int(end / self.speed))
        if self._before is not None:
            mel, begin = torch.cat([self._before, mel], dim=1), begin - 1
        self._last = mel[:, -1:].clone()  # the next mel may be at the same place
        at = ((np.arange(first, stop) + 0.5) * self.speed - 0.5).clip(begin, end - 1) - begin
        low = at.astype(np.int64)
        high = np.minimum(low + 1, mel.shape[1] - 1)
        left, right = on_device(np.stack([low, high]), mel.device)
        return mel[:, left].lerp(mel[:, right], on_device((at - low).astype(np.float32), mel.device).to(mel.dtype))

    def keep(self) -> None:
        """Go on after the chunk that was stretched last."""
        self._before = self._last

    def _made(self, frames: int) -> int:
        """Return how many frames have both neighbours among the first `frames`."""
        return math.floor((frames - 0.5) / self.speed + 0.5) if frames else 0


@dataclass(kw_only=True)
class Stream:
    """All that one live stream owns; each flow adds its own part. Dropping it frees it."""

    vocoder: VocoderState
    rendered: int = 0  # tokens that have become mel
    begun: bool = False  # audio of it has been returned
    stretch: MelStretch | None = None  # if it has another speed than 1


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
