"""Streaming causal HiFT: each chunk continues its stream where the one before ended, so nothing is vocoded twice and
there is nothing to cross-fade."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cosyvoice_triton.device import on_device
from cosyvoice_triton.networks.hift.causal import WITHHELD_FRAMES, CausalHiFTGenerator, KeptPast
from cosyvoice_triton.networks.hift.checkpoint import load_causal_hift
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape, uniform_noise
from cosyvoice_triton.token2wav.vocoder.base import BatchVocoder, StreamSlots, VocoderOptions


def load(path: Path, options: VocoderOptions) -> "CausalVocoder":
    """Load the causal HiFT of a `hift.pt`. Raises ValueError naming what does not fit."""
    hift = load_causal_hift(path, options.device).body_to(options.dtype)
    noise = uniform_noise(hift.config.harmonics + 1, options.device)
    load_exact = None if options.dtype == torch.float32 else partial(load_causal_hift, path, options.device)
    return CausalVocoder(hift, noise, limits=options.limits, graphs=options.graphs, load_exact=load_exact)


class PastPool(StreamSlots):
    """The pasts of streams, allocated once: 0.6 MiB per stream at the official sizes."""

    def __init__(self, slots: int, hift: CausalHiFTGenerator):
        self.past = KeptPast(*(x.new_zeros(slots + 1, x.shape[1]) for x in empty_past(hift)))
        super().__init__(slots, *self.past)


@torch.inference_mode()
def empty_past(hift: CausalHiFTGenerator) -> KeptPast:
    """Make what a stream keeps after its first frames, for its sizes."""
    weight = hift.conv_pre.weight
    mel = torch.zeros(1, hift.config.mel_bins, WITHHELD_FRAMES + 1, device=weight.device)
    frames, ends = torch.tensor([mel.shape[2]], device=weight.device), torch.tensor([False], device=weight.device)
    _, past = hift(mel, lambda n: mel.new_zeros(1, n, hift.config.harmonics + 1), frames, ends, ending=False)
    return past


class CausalRenderer:
    """One pass for a batch of chunks, which reads their pasts from the pool and replaces them.

    mel (B, 80, T): new frames, padded after each row's `frames` (B,). slots (B,): of the pool. starts (B,): the frame
    where each goes on. ends (B,) bool: rows that end their streams.
    """

    def __init__(self, hift: CausalHiFTGenerator, pool: PastPool, noise: NoiseTape):
        self.hift = hift
        self.pool = pool
        self.scratch = pool.scratch
        self._noise = noise

    def render(self, begun: bool, mel: Tensor, slots: Tensor, *others: Tensor, ending: bool = True) -> Tensor:
        """Render the speech (B, N). ending: whether a row may end, for which there must be room; a CUDA graph always
        has it."""
        starts, frames, ends = others
        past = KeptPast(*(x[slots] for x in self.pool.past)) if begun else None
        first = (starts + 1) * self.hift.config.hop if begun else starts
        speech, following = self.hift(
            mel, lambda samples: self._noise.gather(first, samples), frames, ends, past, ending=ending
        )
        # A row that is not finite leaves its stream as it was, so that it can be rendered again.
        slots = torch.where(speech.sum(1).isfinite(), slots, self.scratch)
        for kept, new in zip(self.pool.past, following, strict=True):
            kept.index_copy_(0, slots, new)
        return speech

    def inputs(self, B: int, T: int) -> tuple[Tensor, ...]:
        """Make the inputs of a batch of padding rows."""
        device = self.hift.conv_pre.weight.device
        scratch = torch.full((B,), self.scratch, device=device)
        mel = torch.zeros(B, self.hift.config.mel_bins, T, device=device)
        return mel, scratch, torch.zeros_like(scratch), torch.full_like(scratch, T), torch.zeros_like(scratch).bool()


class CausalVocoder(BatchVocoder):
    """Streams the causal HiFT."""

    needs = WITHHELD_FRAMES + 1

    def _make_pool(self) -> PastPool:
        return PastPool(self._limits.max_streams, self._network)

    def _make_renderer(self) -> CausalRenderer:
        return CausalRenderer(self._network, self.pool, self._noise)

    def _pass(
        self, begun: bool, mel: Tensor, slots: Tensor, starts: Tensor, frames: Tensor, ends: Sequence[bool]
    ) -> Tensor:
        inputs = mel, slots, starts, frames, on_device(ends, mel.device)
        if self._graphed:
            return self._graphed.render(begun, *inputs)
        return self._plain.render(begun, *inputs, ending=any(ends))

    def _sent(self, frames: int, *, begun: bool, final: bool) -> tuple[int, int]:
        of_hift = {"begins": not begun, "ends": final}
        return self._network.vocoded(frames, **of_hift), self._network.samples(frames, **of_hift)

    def _whole(self, mel: Tensor, frames: Tensor) -> Tensor:
        starts = torch.zeros_like(frames)
        ends = torch.ones_like(frames, dtype=torch.bool)
        return self._network(mel, lambda samples: self._noise.gather(starts, samples), frames, ends, ending=True)[0]
