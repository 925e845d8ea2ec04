"""Streaming causal HiFT: each chunk continues its stream where the one before ended, so nothing is vocoded twice and
there is nothing to cross-fade."""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cosyvoice_triton.device import on_device
from cosyvoice_triton.networks.hift.causal import WITHHELD_FRAMES, CausalHiFTGenerator, KeptPast
from cosyvoice_triton.networks.hift.checkpoint import load_causal_hift
from cosyvoice_triton.token2wav.flow.base import VocoderOptions
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape, uniform_noise
from cosyvoice_triton.token2wav.vocoder.base import BatchVocoder, StreamSlots
from cosyvoice_triton.token2wav.vocoder.vocoder_graphs import GraphedRenderer


def load(path: Path, options: VocoderOptions) -> "CausalVocoder":
    """Load the causal HiFT of a `hift.pt`. Raises ValueError naming what does not fit."""
    hift = load_causal_hift(path, options.device).body_to(options.dtype)
    noise = uniform_noise(hift.config.harmonics + 1, options.device)
    load_exact = None if options.dtype == torch.float32 else partial(load_causal_hift, path, options.device)
    return CausalVocoder(hift, noise, limits=options.limits, graphs=options.graphs, load_exact=load_exact)


class PastPool(StreamSlots):
    """The pasts of streams, allocated once: 0.6 MiB per stream at the official sizes."""

    def __init__(self, slots: int, hift: CausalHiFTGenerator):
        super().__init__(slots)
        self.past = KeptPast(*(x.new_zeros(slots + 1, x.shape[1]) for x in empty_past(hift)))

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.past)


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
    """Streams the causal HiFT. graphs: by CUDA graphs on a GPU. load_exact: loads the network in float32; without it,
    `hift` is that. pool: of another vocoder, whose streams are rendered.
    """

    def __init__(
        self,
        hift: CausalHiFTGenerator,
        noise: NoiseTape,
        *,
        limits: BatchLimits,
        graphs: bool = True,
        load_exact: Callable[[], CausalHiFTGenerator] | None = None,
        pool: PastPool | None = None,
    ):
        device = hift.conv_pre.weight.device
        self.pool = pool or PastPool(limits.max_streams, hift)
        super().__init__(self.pool, limits, device, needs=WITHHELD_FRAMES + 1)
        self._hift, self._noise, self._load_exact = hift, noise, load_exact
        self._plain = CausalRenderer(hift, self.pool, noise)
        self._graphed = GraphedRenderer(self._plain, limits) if graphs and device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Return the memory in bytes that is reserved for streams."""
        return self.pool.nbytes

    def for_worker(self, worker: int) -> "CausalVocoder | None":
        if self._graphed is None:
            return None
        vocoder = copy(self)
        vocoder._limits = self._limits.of_worker(worker)
        vocoder._graphed = GraphedRenderer(self._plain, vocoder._limits)
        return vocoder

    def exact(self) -> "CausalVocoder":
        """Load the same vocoder in float32, by plain operations, over the same streams, for a single use."""
        hift = self._load_exact() if self._load_exact else self._hift
        return CausalVocoder(hift, self._noise, limits=self._limits, graphs=False, pool=self.pool)

    def _pass(
        self, begun: bool, mel: Tensor, slots: Tensor, starts: Tensor, frames: Tensor, ends: Sequence[bool]
    ) -> Tensor:
        inputs = mel, slots, starts, frames, on_device(ends, mel.device)
        if self._graphed:
            return self._graphed.render(begun, *inputs)
        return self._plain.render(begun, *inputs, ending=any(ends))

    def _sent(self, frames: int, *, begun: bool, final: bool) -> tuple[int, int]:
        of_hift = {"begins": not begun, "ends": final}
        return self._hift.vocoded(frames, **of_hift), self._hift.samples(frames, **of_hift)

    def _whole(self, mel: Tensor, frames: Tensor) -> Tensor:
        starts = torch.zeros_like(frames)
        ends = torch.ones_like(frames, dtype=torch.bool)
        return self._hift(mel, lambda samples: self._noise.gather(starts, samples), frames, ends, ending=True)[0]
