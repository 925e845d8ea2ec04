"""Sizes of HiFT; the defaults are CosyVoice2's."""

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from operator import mul

from cosyvoice_triton.checkpoint import Shapes, size_of
from cosyvoice_triton.constants import MEL_BINS, SAMPLE_RATE


@dataclass(frozen=True)
class HiFTConfig:
    """The first block is read from a checkpoint by `from_shapes`; no tensor shows the second.

    Names in upstream's configuration: harmonics is `nb_harmonics`, sine_amplitude `nsf_alpha`, noise_deviation
    `nsf_sigma`, voiced_threshold `nsf_voiced_threshold`, istft_hop `istft_params.hop_len`, leaky_slope `lrelu_slope`.
    """

    mel_bins: int = MEL_BINS
    channels: int = 512  # after conv_pre; halved by each upsampling stage
    f0_channels: int = 512
    harmonics: int = 8  # overtones above f0
    upsample_kernels: tuple[int, ...] = (16, 11, 7)
    resblock_kernels: tuple[int, ...] = (3, 7, 11)
    source_resblock_kernels: tuple[int, ...] = (7, 7, 11)
    n_fft: int = 16

    sample_rate: int = SAMPLE_RATE
    upsample_rates: tuple[int, ...] = (8, 5, 3)
    istft_hop: int = 4
    resblock_dilations: tuple[tuple[int, ...], ...] = ((1, 3, 5),) * 3  # per kernel size
    source_resblock_dilations: tuple[tuple[int, ...], ...] = ((1, 3, 5),) * 3  # per stage
    sine_amplitude: float = 0.1  # full scale is 1
    noise_deviation: float = 0.003  # standard deviation of the noise in voiced samples
    voiced_threshold: float = 10.0  # Hz; a frame with f0 at or below it is unvoiced
    leaky_slope: float = 0.1
    audio_limit: float = 0.99  # samples are clamped to -limit..limit

    @cached_property
    def hop(self) -> int:
        """Return the samples per mel frame; HOP_SAMPLES at the official sizes."""
        return prod(self.upsample_rates) * self.istft_hop

    @property
    def widths(self) -> list[int]:
        """Return the channels before the first upsampling stage and after each."""
        return [self.channels >> stage for stage in range(len(self.upsample_rates) + 1)]

    @property
    def source_rates(self) -> list[int]:
        """Return how much coarser than the source's STFT, which has the last stage's frame rate, each stage is."""
        return list(accumulate((1, *self.upsample_rates[:0:-1]), mul))[::-1]

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "HiFTConfig":
        """Return the sizes of a checkpoint with plain kernels (`fuse_weight_norm`). ValueError names a missing key."""
        size = partial(size_of, shapes)

        def kernels(pattern: str, count: int) -> tuple[int, ...]:
            return tuple(size(pattern.format(index), 2) for index in range(count))

        stages = len(cls.upsample_rates)
        return cls(
            mel_bins=size("conv_pre.weight", 1),
            channels=size("conv_pre.weight", 0),
            f0_channels=size("f0_predictor.classifier.weight", 1),
            harmonics=size("m_source.l_linear.weight", 1) - 1,
            upsample_kernels=kernels("ups.{}.weight", stages),
            resblock_kernels=kernels("resblocks.{}.convs1.0.weight", len(cls.resblock_dilations)),
            source_resblock_kernels=kernels("source_resblocks.{}.convs1.0.weight", stages),
            n_fft=size("conv_post.weight", 0) - 2,
        )
