"""Streaming HiFT: mel chunks in, audio without joints out.

Each chunk is vocoded together with the last mel frames of the one before. Their harmonic source is replaced by the one
already heard, their audio cross-faded with the tail that the chunk before withheld.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.hift.generator import HiFTGenerator
from common.overlap import FadeWindow, cross_fade
from common.token2wav.noise import NoiseTape


@dataclass
class VocoderState:
    """What one stream carries from chunk to chunk. Before any audio was made, `source` and `speech` are empty."""

    mel: Tensor  # (80, <= overlap) frames that the next chunk repeats
    source: Tensor  # (N,) harmonic source of those frames
    speech: Tensor  # (N,) their audio, withheld until the next chunk fades into it
    frame: int = 0  # absolute index of the first frame of `mel`


@dataclass(frozen=True)
class MelChunk:
    """The next mel frames (80, T) of a stream; `last`: none come after them."""

    state: VocoderState
    mel: Tensor
    last: bool


class StreamingVocoder:
    """Renders mel chunks of any number of streams. Chunks overlap by as much audio as the window fades over."""

    def __init__(self, hift: HiFTGenerator, noise: NoiseTape, window: FadeWindow):
        self._device = hift.conv_pre.weight.device
        self._mel_bins = hift.config.mel_bins
        self._hift: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
        self._hift = _graphed(hift) if self._device.type == "cuda" else hift
        self._noise = noise
        self._window = window
        self._hop = hift.config.hop
        self._overlap = len(window.rising)

    def open(self) -> VocoderState:
        empty = torch.zeros(0, device=self._device)
        return VocoderState(mel=torch.zeros(self._mel_bins, 0, device=self._device), source=empty, speech=empty)

    @torch.inference_mode()
    def step(self, chunks: Sequence[MelChunk]) -> list[Tensor]:
        """The audio (N,) of each chunk, of different streams; N is less than the frames' while the overlap is withheld.

        Chunks of equal length share a pass. HiFT sees frames to both sides, so that padding would be heard.
        """
        mels = [torch.cat([chunk.state.mel, chunk.mel.to(chunk.state.mel)], dim=1) for chunk in chunks]
        audio = [chunk.state.speech if chunk.last else chunk.state.speech.new_zeros(0) for chunk in chunks]
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, (chunk, mel) in enumerate(zip(chunks, mels, strict=True)):
            if self._ready(chunk, mel):
                groups[mel.shape[1], len(chunk.state.source)].append(index)
            else:  # too little to say anything: wait for more, or at the end let go of what was withheld
                chunk.state.mel = mel
        for (frames, _), members in groups.items():
            mel = torch.stack([mels[index] for index in members])  # (B, 80, T)
            noise = [self._noise.read(chunks[i].state.frame * self._hop, frames * self._hop) for i in members]
            cached = torch.stack([chunks[index].state.source for index in members])[:, None]
            speech, source = self._hift(mel, torch.stack(noise), cached)
            for row, index in enumerate(members):
                audio[index] = self._advance(chunks[index], mel[row], speech[row], source[row, 0])
        return audio

    @torch.inference_mode()
    def whole(self, mel: Tensor) -> Tensor:
        """mel (80, T) of a whole utterance -> audio (N,)."""
        return self.step([MelChunk(self.open(), mel, last=True)])[0]

    def _ready(self, chunk: MelChunk, mel: Tensor) -> bool:
        """Whether there is a new frame, and at least what is withheld of a chunk that others follow."""
        return chunk.mel.shape[1] > 0 and (chunk.last or mel.shape[1] * self._hop >= self._overlap)

    def _advance(self, chunk: MelChunk, mel: Tensor, speech: Tensor, source: Tensor) -> Tensor:
        """The part of `speech` (N,) to be heard now; the stream keeps what its next chunk repeats."""
        state, overlap = chunk.state, self._overlap
        if state.speech.numel():
            speech = cross_fade(state.speech, speech, self._window)
        if chunk.last:
            return speech
        kept = overlap // self._hop
        state.frame += mel.shape[1] - kept
        state.mel = mel[:, -kept:].clone()  # clones: a view would keep the whole batch alive
        state.source = source[-overlap:].clone()
        state.speech = speech[-overlap:].clone()
        return speech[:-overlap]


def _graphed(hift: HiFTGenerator) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    from common.token2wav.hift_graphs import GraphedHiFT  # for GPUs only

    return GraphedHiFT(hift)
