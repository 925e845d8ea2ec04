"""Streaming HiFT: mel chunks in, audio without joints out.

Each chunk is vocoded together with the last `OVERLAP_FRAMES` mel frames of the one before. Their harmonic source is
replaced by the one already heard, their audio cross-faded with the tail that the chunk before withheld.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.constants import HOP_SAMPLES, MEL_BINS, OVERLAP_FRAMES, OVERLAP_SAMPLES
from common.hift.generator import HiFTGenerator
from common.overlap import FadeWindow, cross_fade
from common.token2wav.noise import NoiseTape


@dataclass
class VocoderState:
    """What one stream carries from chunk to chunk. Before any audio was made, `source` and `speech` are empty."""

    mel: Tensor  # (80, <= 8) frames that the next chunk repeats
    source: Tensor  # (3840,) harmonic source of those frames
    speech: Tensor  # (3840,) their audio, withheld until the next chunk fades into it
    frame: int = 0  # absolute index of the first frame of `mel`


class StreamingVocoder:
    """Renders the mel chunks of any number of streams, one at a time. Holds no state of a stream."""

    def __init__(self, hift: HiFTGenerator, noise: NoiseTape, window: FadeWindow):
        self._hift = hift
        self._noise = noise
        self._window = window

    def open(self) -> VocoderState:
        like = next(self._hift.parameters())
        empty = like.new_zeros(0)
        return VocoderState(mel=like.new_zeros(MEL_BINS, 0), source=empty, speech=empty)

    @torch.inference_mode()
    def step(self, state: VocoderState, mel: Tensor, *, last: bool) -> Tensor:
        """mel (80, T) of the next frames -> audio (N,) at 24 kHz; N < 480 * T while the overlap is withheld."""
        mel = torch.cat([state.mel, mel.to(state.mel)], dim=1)
        frames = mel.shape[1]
        if frames <= OVERLAP_FRAMES and not last:  # all of it would be withheld: wait for more
            state.mel = mel
            return state.speech.new_zeros(0)
        if frames == state.mel.shape[1] and state.speech.numel():  # nothing new: let go of what was withheld
            return state.speech
        if frames == 0:
            return state.speech
        noise = self._noise.read(state.frame * HOP_SAMPLES, frames * HOP_SAMPLES)
        speech, source = self._hift(mel[None], noise[None], state.source[None, None])
        speech, source = speech[0], source[0, 0]
        if state.speech.numel():
            speech = cross_fade(state.speech, speech, self._window)
        if last:
            return speech
        state.mel = mel[:, -OVERLAP_FRAMES:].clone()  # a clone: a view would keep the whole chunk alive
        state.source = source[-OVERLAP_SAMPLES:].clone()
        state.speech = speech[-OVERLAP_SAMPLES:].clone()
        state.frame += frames - OVERLAP_FRAMES
        return speech[:-OVERLAP_SAMPLES]

    @torch.inference_mode()
    def whole(self, mel: Tensor) -> Tensor:
        """mel (80, T) of a whole utterance -> audio (480 * T,)."""
        return self.step(self.open(), mel, last=True)
