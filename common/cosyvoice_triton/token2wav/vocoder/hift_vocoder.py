"""Streaming HiFT: mel chunks in, audio without joints out.

Each chunk is vocoded together with the last mel frames of the one before, from the phases that the harmonic source had
there, and its audio is cross-faded with the tail that the chunk before withheld. Outside of cross-fades the audio is
that of the whole utterance rendered at once; within them it differs by what HiFT does not know at a chunk's end, the
next frames.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cosyvoice_triton.constants import OVERLAP_FRAMES
from cosyvoice_triton.device import on_host
from cosyvoice_triton.networks.hift.checkpoint import load_hift
from cosyvoice_triton.networks.hift.config import HiFTConfig
from cosyvoice_triton.networks.hift.generator import Body, HiFTGenerator, Past
from cosyvoice_triton.networks.hift.source import F0_REACH
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape, source_noise
from cosyvoice_triton.token2wav.stream import Chunk
from cosyvoice_triton.token2wav.vocoder.base import BatchVocoder, StreamSlots, VocoderOptions


def falling_half(samples: int) -> Tensor:
    """Return the second half of a Hann window of 2 * samples, float32 (samples,). With the first half it sums to one,
    so that what both chunks agree on is not changed; it begins at 1 and ends at 0 without a step.
    """
    position = (torch.arange(samples, dtype=torch.float64) + 0.5) / samples
    return torch.cos(math.pi / 2 * position).square().float()


class OverlapPool(StreamSlots):
    """What streams carry from chunk to chunk: 20 kB per stream at the official sizes, allocated once."""

    def __init__(self, slots: int, config: HiFTConfig, device: torch.device):
        samples = OVERLAP_FRAMES * config.hop
        # Frames that the next chunk repeats, after those that the f0 of the first one depends on.
        self.mel = torch.zeros(slots + 1, config.mel_bins, F0_REACH + OVERLAP_FRAMES, device=device)
        # Phases of the source, in cycles, at the middle of the frame before the repeated ones.
        self.phases = torch.zeros(slots + 1, config.harmonics + 1, dtype=torch.float64, device=device)
        self.speech = torch.zeros(slots + 1, samples, device=device)  # audio of the repeated frames, withheld
        super().__init__(slots, self.mel, self.phases, self.speech)


class OverlapRenderer:
    """One HiFT pass for a batch of chunks, which reads their overlaps from the pool and replaces them.

    mel (B, 80, T): new frames, padded after each row's `frames` (B,). slots (B,): of the pool. starts (B,): absolute
    index of the first frame that is rendered, repeated ones included. A row that does not end its stream has more than
    OVERLAP_FRAMES frames with the repeated ones: the frame before the next overlap is among them. body: in place of
    HiFT's own.
    """

    def __init__(self, hift: HiFTGenerator, pool: OverlapPool, noise: NoiseTape, body: Body | None = None):
        self.hift = hift
        self._body = body
        self.pool = pool
        self.scratch = pool.scratch
        self._noise = noise
        self._falling = falling_half(pool.speech.shape[1]).to(pool.speech.device)

    def inputs(self, B: int, T: int) -> tuple[Tensor, ...]:
        """Make the inputs of a batch of padding rows."""
        device = self.pool.mel.device
        scratch = torch.full((B,), self.scratch, device=device)
        mel = torch.zeros(B, self.hift.config.mel_bins, T, device=device)
        return mel, scratch, torch.zeros_like(scratch), torch.full_like(scratch, T)

    def render(self, begun: bool, mel: Tensor, slots: Tensor, *others: Tensor) -> Tensor:
        """Render the speech (B, T * hop) of chunks that begin their streams; of chunks that continue theirs (`begun`)
        (B, (OVERLAP_FRAMES + T) * hop), faded in."""
        (starts, frames), pool, hop, past = others, self.pool, self.hift.config.hop, None
        if begun:
            mel, frames = torch.cat([pool.mel[slots], mel], dim=2), frames + OVERLAP_FRAMES
            past = Past(starts.clamp(max=F0_REACH), pool.phases[slots])
        length = mel.shape[2] - (F0_REACH if begun else 0)
        noise = self._noise.gather(starts * hop, length * hop)
        speech, phases = self.hift(mel, noise, frames, past, body=self._body)
        if begun:
            speech[:, : len(self._falling)].lerp_(pool.speech[slots], self._falling)
        self._keep(slots, mel, speech, phases, frames)
        return speech

    def _keep(self, slots: Tensor, mel: Tensor, speech: Tensor, phases: Tensor, frames: Tensor) -> None:
        """Replace the rows of the pool. mel may begin with frames of context, which the others do not have."""
        pool = self.pool
        # A row that is not finite leaves its stream as it was, so that it can be rendered again.
        slots = torch.where(speech.sum(1).isfinite(), slots, pool.scratch)
        at = _tail_indices(frames + (mel.shape[2] - phases.shape[2]), pool.mel.shape[2])
        pool.mel.index_copy_(0, slots, mel.gather(2, at[:, None].expand(-1, mel.shape[1], -1)))
        at = _tail_indices(frames - OVERLAP_FRAMES, 1)
        pool.phases.index_copy_(0, slots, phases.gather(2, at[:, None].expand(-1, phases.shape[1], -1))[..., 0])
        at = _tail_indices(frames * self.hift.config.hop, pool.speech.shape[1])
        pool.speech.index_copy_(0, slots, speech.gather(1, at))


def _tail_indices(ends: Tensor, count: int) -> Tensor:
    """Return the indices (B, count) of the last `count` positions of each row, clamped where a row is shorter: nothing
    reads those of a row that ends its stream, nor the frames before a stream's beginning.
    """
    return (ends[:, None] - count + torch.arange(count, device=ends.device)).clamp(min=0)


def load(path: Path, options: VocoderOptions) -> "StreamingVocoder":
    """Load the HiFT of a `hift.pt`. Raises ValueError naming what does not fit."""
    hift = load_hift(path, options.device).body_to(options.dtype)
    noise = source_noise(hift.config.harmonics + 1, options.device)
    load_exact = None if options.dtype == torch.float32 else partial(load_hift, path, options.device)
    return StreamingVocoder(hift, noise, limits=options.limits, graphs=options.graphs, load_exact=load_exact)


class StreamingVocoder(BatchVocoder):
    """Streams HiFT."""

    needs = OVERLAP_FRAMES + 1

    def _make_pool(self) -> OverlapPool:
        return OverlapPool(self._limits.max_streams, self._network.config, self._device)

    def _make_renderer(self) -> OverlapRenderer:
        return OverlapRenderer(self._network, self.pool, self._noise)

    def _make_fused(self) -> OverlapRenderer:
        return OverlapRenderer(self._network, self.pool, self._noise, _fused_body(self._network))

    def _rest(self, chunk: Chunk, mel: Tensor) -> Tensor:
        return on_host(self.pool.speech[chunk.stream.vocoder.slot])[0]

    def _pass(
        self, begun: bool, mel: Tensor, slots: Tensor, starts: Tensor, frames: Tensor, ends: Sequence[bool]
    ) -> Tensor:
        return (self._graphed or self._plain).render(begun, mel, slots, starts, frames)

    def _sent(self, frames: int, *, begun: bool, final: bool) -> tuple[int, int]:
        sent = frames + (OVERLAP_FRAMES if begun else 0) - (0 if final else OVERLAP_FRAMES)
        return sent, sent * self._network.config.hop

    def _whole(self, mel: Tensor, frames: Tensor) -> Tensor:
        scratch = torch.full_like(frames, self.pool.scratch)
        return self._plain.render(False, mel, scratch, torch.zeros_like(frames), frames)


def _fused_body(hift: HiFTGenerator) -> Body | None:
    """Fuse the body, or return None where the network's own is faster: in float32, and without tensor cores."""
    if hift.conv_pre.weight.dtype == torch.float32:
        return None
    from cosyvoice_triton.token2wav.vocoder.hift_fused import fused_body  # its kernels need Triton

    return fused_body(hift)
