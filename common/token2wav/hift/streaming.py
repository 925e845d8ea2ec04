"""Streaming HiFT: mel chunks in, audio without joints out.

Each chunk is vocoded together with the last mel frames of the one before. Their harmonic source is replaced by the one
already heard, their audio cross-faded with the tail that the chunk before withheld.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import UnavailableError
from common.hift.generator import HiFTGenerator
from common.token2wav.graphs import CHUNK_FRAMES
from common.token2wav.hift.overlap import FadeWindow, cross_fade
from common.token2wav.noise import NoiseTape


def frames_class(frames: int) -> int:
    """The least of CHUNK_FRAMES that holds so many, or their own number."""
    return next((most for most in CHUNK_FRAMES if most >= frames), frames)


@dataclass
class VocoderState:
    """Where a stream's overlap lies, and how far the stream has come."""

    slot: int
    frame: int = 0  # absolute index of the first frame that the next chunk renders, repeated ones included
    begun: bool = False  # there is an overlap
    unheard: Tensor | None = None  # (80, T) frames too few for a chunk of their own


@dataclass(frozen=True)
class MelChunk:
    """The next mel frames (80, T) of a stream; `last`: none come after them."""

    state: VocoderState
    mel: Tensor
    last: bool


class OverlapPool:
    """What streams carry from chunk to chunk: 33 kB each at the official sizes, allocated once.

    The last slot is nobody's: rows that pad a batch write there.
    """

    def __init__(self, slots: int, mel_bins: int, frames: int, samples: int, device: torch.device):
        self.mel = torch.zeros(slots + 1, mel_bins, frames, device=device)  # frames that the next chunk repeats
        self.source = torch.zeros(slots + 1, samples, device=device)  # their harmonic source
        self.speech = torch.zeros(slots + 1, samples, device=device)  # their audio, withheld
        self._free = list(range(slots))

    @property
    def nbytes(self) -> int:
        return self.mel.nbytes + self.source.nbytes + self.speech.nbytes

    def acquire(self) -> int:
        if not self._free:
            raise UnavailableError(f"all {len(self.mel) - 1} streams of the vocoder are taken")
        return self._free.pop()

    def release(self, slot: int) -> None:
        self._free.append(slot)


class OverlapRenderer:
    """One HiFT pass for a batch of chunks; overlaps are read from the pool and replaced there.

    mel (B, 80, T) of new frames, padded behind each row's `frames` (B,); `slots` (B,) of the pool; `starts` (B,):
    absolute index of the first frame that is rendered, repeated ones included.
    """

    def __init__(self, hift: HiFTGenerator, pool: OverlapPool, noise: NoiseTape, window: FadeWindow):
        device = hift.conv_pre.weight.device
        self.hift = hift
        self.pool = pool
        self._noise = noise
        self._window = FadeWindow(window.rising.to(device), window.falling.to(device))

    def first(self, mel: Tensor, slots: Tensor, starts: Tensor, frames: Tensor) -> Tensor:
        """Chunks that begin their streams -> speech (B, T * hop)."""
        cached = mel.new_zeros(len(mel), 1, 0)
        speech, source = self.hift(mel, self._noise_of(mel, starts), cached, frames)
        self._keep(slots, mel, speech, source, frames)
        return speech

    def later(self, mel: Tensor, slots: Tensor, starts: Tensor, frames: Tensor) -> Tensor:
        """Chunks that continue theirs -> speech (B, (overlap + T) * hop), faded in."""
        pool = self.pool
        mel, frames = torch.cat([pool.mel[slots], mel], dim=2), frames + pool.mel.shape[2]
        speech, source = self.hift(mel, self._noise_of(mel, starts), pool.source[slots][:, None], frames)
        speech = cross_fade(pool.speech[slots], speech, self._window)
        self._keep(slots, mel, speech, source, frames)
        return speech

    def _noise_of(self, mel: Tensor, starts: Tensor) -> Tensor:
        hop = self.hift.config.hop
        return self._noise.gather(starts * hop, mel.shape[2] * hop)

    def _keep(self, slots: Tensor, mel: Tensor, speech: Tensor, source: Tensor, frames: Tensor) -> None:
        pool, hop = self.pool, self.hift.config.hop
        at = _last(frames, pool.mel.shape[2])
        pool.mel.index_copy_(0, slots, mel.gather(2, at[:, None].expand(-1, mel.shape[1], -1)))
        at = _last(frames * hop, pool.speech.shape[1])
        pool.source.index_copy_(0, slots, source[:, 0].gather(1, at))
        pool.speech.index_copy_(0, slots, speech.gather(1, at))


def _last(ends: Tensor, count: int) -> Tensor:
    """Indices (B, count) of what stands before each row's end; of a shorter row, which nothing follows, its first."""
    return (ends[:, None] - count + torch.arange(count, device=ends.device)).clamp(min=0)


class StreamingVocoder:
    """Renders mel chunks of any number of streams. Chunks overlap by as much audio as the window fades over.

    graphs: on a GPU, chunks of streams are CUDA graphs.
    """

    def __init__(
        self, hift: HiFTGenerator, noise: NoiseTape, window: FadeWindow, *, max_streams: int, graphs: bool = True
    ):
        config, device = hift.config, hift.conv_pre.weight.device
        self._hop = config.hop
        self._overlap = len(window.rising)
        self.pool = OverlapPool(max_streams, config.mel_bins, self._overlap // config.hop, self._overlap, device)
        self._plain = self._renderer = OverlapRenderer(hift, self.pool, noise, window)
        if graphs and device.type == "cuda":
            from common.token2wav.hift.graphs import GraphedRenderer  # for GPUs only

            self._renderer = GraphedRenderer(hift, self.pool, noise, window)

    def open(self) -> VocoderState:
        """Raises UnavailableError when all streams are taken."""
        return VocoderState(self.pool.acquire())

    def close(self, state: VocoderState) -> None:
        self.pool.release(state.slot)

    @torch.inference_mode()
    def step(self, chunks: Sequence[MelChunk]) -> list[Tensor]:
        """The audio (N,) of each chunk, of different streams, on the CPU; N is less than the frames' while the overlap
        is withheld.

        Chunks of a length class share a pass.
        """
        audio = [torch.zeros(0)] * len(chunks)
        groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
        mels = []
        for index, chunk in enumerate(chunks):
            state = chunk.state
            mels.append(chunk.mel if state.unheard is None else torch.cat([state.unheard, chunk.mel], dim=1))
            frames = mels[index].shape[1]
            if frames == 0 and chunk.last and state.begun:
                audio[index] = self.pool.speech[state.slot].cpu()
            elif frames and (chunk.last or state.begun or frames * self._hop >= self._overlap):
                groups[frames_class(frames), state.begun].append(index)
                state.unheard = None
            else:
                state.unheard = mels[index]
        for (_, begun), members in groups.items():
            lengths = [mels[index].shape[1] for index in members]
            mel = torch.stack([F.pad(mels[i], (0, max(lengths) - n)) for i, n in zip(members, lengths, strict=True)])
            places = [[chunks[i].state.slot, chunks[i].state.frame] for i in members]
            slots, starts = torch.tensor(places, device=mel.device).unbind(1)
            render = self._renderer.later if begun else self._renderer.first
            speech = render(mel, slots, starts, torch.tensor(lengths, device=mel.device)).cpu()
            kept = self._overlap // self._hop
            for row, (index, frames) in enumerate(zip(members, lengths, strict=True)):
                chunk = chunks[index]
                end = (frames + (kept if begun else 0)) * self._hop
                audio[index] = speech[row, : end if chunk.last else end - self._overlap]
                chunk.state.frame += frames - (0 if begun else kept)
                chunk.state.begun = True
        return audio

    @torch.inference_mode()
    def whole(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """mels (80, T) of whole utterances -> the audio (N,) of each on the CPU."""
        lengths = [mel.shape[1] for mel in mels]
        mel = torch.stack([F.pad(mel, (0, max(lengths) - mel.shape[1])) for mel in mels])
        frames = torch.tensor(lengths, device=mel.device)
        nobody = torch.full_like(frames, len(self.pool.mel) - 1)
        speech = self._plain.first(mel, nobody, torch.zeros_like(frames), frames).cpu()
        return [row[: length * self._hop] for row, length in zip(speech, lengths, strict=True)]
