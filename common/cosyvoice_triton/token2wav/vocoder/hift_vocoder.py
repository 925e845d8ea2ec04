"""Streaming HiFT: mel chunks in, audio without joints out.

Each chunk is vocoded together with the last mel frames of the one before, from the phases that the harmonic source had
there. Their audio is cross-faded with the tail that the chunk before withheld.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cosyvoice_triton.constants import OVERLAP_FRAMES
from cosyvoice_triton.device import on_host
from cosyvoice_triton.networks.hift.checkpoint import load_hift
from cosyvoice_triton.networks.hift.generator import Body, HiFTGenerator
from cosyvoice_triton.token2wav.flow.base import VocoderOptions
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape, source_noise
from cosyvoice_triton.token2wav.stream import Chunk
from cosyvoice_triton.token2wav.vocoder.base import BatchVocoder
from cosyvoice_triton.token2wav.vocoder.overlap import OverlapPool, OverlapRenderer
from cosyvoice_triton.token2wav.vocoder.vocoder_graphs import GraphedRenderer


def load(path: Path, options: VocoderOptions) -> "StreamingVocoder":
    """Load the HiFT of a `hift.pt`. Raises ValueError naming what does not fit."""
    hift = load_hift(path, options.device).body_to(options.dtype)
    noise = source_noise(hift.config.harmonics + 1, options.device)
    load_exact = None if options.dtype == torch.float32 else partial(load_hift, path, options.device)
    return StreamingVocoder(hift, noise, limits=options.limits, graphs=options.graphs, load_exact=load_exact)


class StreamingVocoder(BatchVocoder):
    """Streams HiFT. graphs: by CUDA graphs on a GPU. load_exact: loads the network in float32; without it, `hift` is
    that. pool: of another vocoder, whose streams are rendered.
    """

    def __init__(
        self,
        hift: HiFTGenerator,
        noise: NoiseTape,
        *,
        limits: BatchLimits,
        graphs: bool = True,
        load_exact: Callable[[], HiFTGenerator] | None = None,
        pool: OverlapPool | None = None,
    ):
        device = hift.conv_pre.weight.device
        self.pool = pool or OverlapPool(limits.max_streams, hift.config, device)
        super().__init__(self.pool, limits, device, needs=OVERLAP_FRAMES + 1)
        self._hift, self._noise, self._load_exact = hift, noise, load_exact
        self._hop = hift.config.hop
        self._plain = OverlapRenderer(hift, self.pool, noise)
        self._renderer: OverlapRenderer | GraphedRenderer = self._plain
        if graphs and device.type == "cuda":
            self._fused = OverlapRenderer(hift, self.pool, noise, _fused_body(hift))  # of all workers
            self._renderer = GraphedRenderer(self._fused, limits)

    @property
    def nbytes(self) -> int:
        """Return the memory in bytes that is reserved for streams."""
        return self.pool.nbytes

    def for_worker(self, worker: int) -> "StreamingVocoder | None":
        if self._renderer is self._plain:
            return None
        vocoder = copy(self)
        vocoder._limits = self._limits.of_worker(worker)
        vocoder._renderer = GraphedRenderer(self._fused, vocoder._limits)
        return vocoder

    def exact(self) -> "StreamingVocoder":
        """Load the same vocoder in float32, by plain operations, over the same streams, for a single use."""
        hift = self._load_exact() if self._load_exact else self._hift
        return StreamingVocoder(hift, self._noise, limits=self._limits, graphs=False, pool=self.pool)

    def _rest(self, chunk: Chunk, mel: Tensor) -> Tensor:
        return on_host(self.pool.speech[chunk.stream.vocoder.slot])[0]

    def _pass(
        self, begun: bool, mel: Tensor, slots: Tensor, starts: Tensor, frames: Tensor, ends: Sequence[bool]
    ) -> Tensor:
        return self._renderer.render(begun, mel, slots, starts, frames)

    def _sent(self, frames: int, *, begun: bool, final: bool) -> tuple[int, int]:
        sent = frames + (OVERLAP_FRAMES if begun else 0) - (0 if final else OVERLAP_FRAMES)
        return sent, sent * self._hop

    def _whole(self, mel: Tensor, frames: Tensor) -> Tensor:
        return self._plain.first(mel, torch.full_like(frames, self.pool.scratch), torch.zeros_like(frames), frames)


def _fused_body(hift: HiFTGenerator) -> Body | None:
    """Fuse the body, or return None where the network's own is faster: in float32, and without tensor cores."""
    if hift.conv_pre.weight.dtype == torch.float32:
        return None
    from cosyvoice_triton.token2wav.vocoder.hift_fused import fused_body  # its kernels need Triton

    return fused_body(hift)
