"""Streaming HiFT: mel chunks in, audio without joints out.

Each chunk is vocoded together with the last mel frames of the one before, from the phases that the harmonic source had
there. Their audio is cross-faded with the tail that the chunk before withheld.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from common.batches import isolated
from common.constants import OVERLAP_FRAMES
from common.hift.checkpoint import load_hift
from common.hift.generator import HiFTGenerator
from common.token2wav.hift.overlap import OverlapPool, OverlapRenderer
from common.token2wav.limits import BatchLimits
from common.token2wav.noise import NoiseTape, source_noise
from common.token2wav.stream import Chunk, VocoderState
from common.token2wav.streaming import VocoderOptions


def load(path: Path, options: VocoderOptions) -> "StreamingVocoder":
    """HiFT of a `hift.pt`. Raises ValueError naming what does not fit."""
    hift = load_hift(path, options.device).body_to(options.dtype)
    noise = source_noise(hift.config.harmonics + 1, options.device)
    return StreamingVocoder(hift, noise, limits=options.limits, graphs=options.graphs)


class StreamingVocoder:
    """Renders mel chunks of many streams. graphs: by CUDA graphs on a GPU."""

    def __init__(self, hift: HiFTGenerator, noise: NoiseTape, *, limits: BatchLimits, graphs: bool = True):
        device = hift.conv_pre.weight.device
        self._hop = hift.config.hop
        self._classes = limits.chunk_frames
        self.pool = OverlapPool(limits.max_streams, hift.config, device)
        self._plain = self._renderer = OverlapRenderer(hift, self.pool, noise)
        if graphs and device.type == "cuda":
            from common.token2wav.hift.graphs import GraphedRenderer  # for GPUs only

            self._renderer = GraphedRenderer(hift, self.pool, noise, limits)

    @property
    def nbytes(self) -> int:
        """Memory reserved for streams."""
        return self.pool.nbytes

    def open(self) -> VocoderState:
        """Raises UnavailableError when all streams are taken."""
        return VocoderState(self.pool.acquire())

    def close(self, state: VocoderState) -> None:
        self.pool.release(state.slot)

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk], mels: Sequence[Tensor]) -> list[Tensor | Exception]:
        """The audio (N,) of chunks of different streams on the CPU, given their new mel frames (80, T) each; an
        exception for a chunk that cannot be rendered.

        N is less than that of the frames while the overlap is withheld. Chunks of a length class share a pass.
        """
        audio: list[Tensor | Exception] = [torch.zeros(0)] * len(chunks)
        groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
        ready = []
        for index, (chunk, mel) in enumerate(zip(chunks, mels, strict=True)):
            state = chunk.stream.vocoder
            ready.append(mel if state.pending is None else torch.cat([state.pending, mel], dim=1))
            frames = ready[index].shape[1]
            if frames == 0 and chunk.final and state.begun:
                audio[index] = self.pool.speech[state.slot].to("cpu", copy=True)  # the slot's next stream writes there
            elif frames and (chunk.final or state.begun or frames > OVERLAP_FRAMES):
                groups[self._length_class(frames), state.begun].append(index)
                state.pending = None
            else:
                state.pending = ready[index].clone()  # the flow's next mel may be at the same place
        for (_, begun), members in groups.items():
            rows = [(chunks[index], ready[index]) for index in members]
            for index, speech in zip(members, isolated(partial(self._render, begun), rows), strict=True):
                audio[index] = speech
        return audio

    def _render(self, begun: bool, rows: Sequence[tuple[Chunk, Tensor]]) -> list[Tensor]:
        """One pass over chunks that all continue their streams (`begun`) or all begin them; mels (80, T) -> (N,)."""
        lengths = [mel.shape[1] for _, mel in rows]
        mel = torch.stack([F.pad(mel, (0, max(lengths) - mel.shape[1])) for _, mel in rows])
        states = [chunk.stream.vocoder for chunk, _ in rows]
        positions = [[state.slot, state.frame] for state in states]
        slots, starts = torch.tensor(positions, device=mel.device).unbind(1)
        render = self._renderer.later if begun else self._renderer.first
        speech = render(mel, slots, starts, torch.tensor(lengths, device=mel.device)).cpu()
        repeated = OVERLAP_FRAMES if begun else 0
        audio = []
        for row, ((chunk, _), frames, state) in enumerate(zip(rows, lengths, states, strict=True)):
            sent = repeated + frames - (0 if chunk.final else OVERLAP_FRAMES)
            audio.append(speech[row, : sent * self._hop])
            state.frame += sent
            state.begun = True
        return audio

    def _length_class(self, frames: int) -> int:
        """The smallest class that holds that many frames; beyond all of them, the number itself."""
        return next((most for most in self._classes if most >= frames), frames)

    @torch.inference_mode()
    def whole(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """The audio (N,) of whole utterances on the CPU, given their mels (80, T)."""
        lengths = [mel.shape[1] for mel in mels]
        mel = torch.stack([F.pad(mel, (0, max(lengths) - mel.shape[1])) for mel in mels])
        frames = torch.tensor(lengths, device=mel.device)
        scratch = torch.full_like(frames, len(self.pool.mel) - 1)
        speech = self._plain.first(mel, scratch, torch.zeros_like(frames), frames).cpu()
        return [row[: length * self._hop] for row, length in zip(speech, lengths, strict=True)]
