"""HiFT as CUDA graphs: batches of the mel lengths that chunks usually have, and single streams of any length.

A last chunk is as long as its utterance happens to end, so that equal ones seldom meet. Running it kernel by kernel
would cost more than its kernels: the convolution library plans each new shape for tens of milliseconds.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from common.constants import OVERLAP_FRAMES, OVERLAP_SAMPLES, TOKEN_MEL_RATIO
from common.hift.generator import HiFTGenerator

BATCHES = (1, 2, 4, 8, 16, 32, 64)
HOPS = (15, 25, 30, 50, 60, 100)  # tokens of the chunks that the schedules make
MAX_FRAMES = 64 * (TOKEN_MEL_RATIO * 25 + OVERLAP_FRAMES)  # of a batch together: bounds the memory of activations
MAX_HOP = 102  # tokens of a last chunk: the largest hop and what was too little for a chunk of its own
WARM_UPS = 2


@dataclass
class _Bucket:
    mel: Tensor  # (B, 80, T)
    noise: Tensor  # (B, T * hop, harmonics + 1)
    cached: Tensor  # (B, 1, S)
    graph: torch.cuda.CUDAGraph
    speech: Tensor
    source: Tensor


class GraphedHiFT:
    """Called as the network is. A first chunk has no cached source, every later one has `OVERLAP_SAMPLES` of it."""

    def __init__(self, hift: HiFTGenerator):
        self.config = hift.config
        self._hift = hift
        lengths = [_length(hop) for hop in HOPS] + [(TOKEN_MEL_RATIO * HOPS[0], 0)]
        sizes = {(B, T, S) for B, (T, S) in itertools.product(BATCHES, lengths) if B * T <= MAX_FRAMES}
        sizes |= {(1, *_length(hop)) for hop in range(1, MAX_HOP + 1)}
        self._memory = torch.cuda.graph_pool_handle()
        self._buckets: dict[tuple[int, int, int], _Bucket] = {}
        for size in tqdm(sorted(sizes, key=lambda s: -s[0] * s[1]), desc="capturing the vocoder", unit="graph"):
            self._buckets[size] = self._capture(*size)

    def __call__(self, mel: Tensor, noise: Tensor, cached: Tensor) -> tuple[Tensor, Tensor]:
        """mel (B, 80, T), noise (B, T * hop, harmonics + 1), cached (B, 1, S) -> speech, source; of the next call."""
        B, _, T = mel.shape
        fitting = [size for size in self._buckets if size[0] >= B and size[1:] == (T, cached.shape[2])]
        if not fitting and B > 1:
            largest = max((size[0] for size in self._buckets if size[1:] == (T, cached.shape[2])), default=1)
            pieces = zip(mel.split(largest), noise.split(largest), cached.split(largest), strict=True)
            # A bucket's results are those of its last call: each piece's are kept before the next one runs.
            results = [[x.clone() for x in self(*piece)] for piece in pieces]
            return torch.cat([speech for speech, _ in results]), torch.cat([source for _, source in results])
        if not fitting:
            speech, source = self._hift(mel, noise, cached)
            return speech, source
        bucket = self._buckets[min(fitting)]
        bucket.mel[:B], bucket.noise[:B], bucket.cached[:B] = mel, noise, cached
        bucket.graph.replay()
        return bucket.speech[:B], bucket.source[:B]

    def _capture(self, B: int, T: int, S: int) -> _Bucket:
        hift, config = self._hift, self.config
        device = hift.conv_pre.weight.device
        mel = torch.zeros(B, config.mel_bins, T, device=device)
        noise = torch.zeros(B, T * config.hop, config.harmonics + 1, device=device)
        cached = torch.zeros(B, 1, S, device=device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                hift(mel, noise, cached)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            speech, source = hift(mel, noise, cached)
        return _Bucket(mel, noise, cached, graph, speech, source)


def _length(hop: int) -> tuple[int, int]:
    """Mel frames and cached samples of a chunk of `hop` tokens that is not its stream's first."""
    return TOKEN_MEL_RATIO * hop + OVERLAP_FRAMES, OVERLAP_SAMPLES
