"""HiFT generator, inference only, with weight norm folded into plain convolutions. Upstream's `HiFTGenerator`."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from cosyvoice_triton.networks.hift.config import HiFTConfig
from cosyvoice_triton.networks.hift.source import F0_REACH, F0Predictor, HarmonicSource, silenced

_MAX_LOG_MAGNITUDE = math.log(100.0)  # of one STFT bin


def stft(wave: Tensor, window: Tensor, hop: int, *, center: bool = True) -> Tensor:
    """Transform wave (B, N) -> (B, n_fft + 2, N / hop + 1): real parts, then imaginary parts.

    Without `center` the first column begins at the first sample and the last one ends at the last:
    (N - n_fft) / hop + 1 columns.
    """
    spectrum = torch.stft(wave, len(window), hop, window=window, center=center, return_complex=True)
    return torch.cat([spectrum.real, spectrum.imag], dim=1)


def istft(x: Tensor, window: Tensor, hop: int, bins: Tensor | None) -> Tensor:
    """Transform (B, n_fft + 2, T), log magnitudes, then values whose sines are the phases -> (B, (T - 1) * hop).

    bins (B,): number of valid frames of each row. torch.istft is not used because it checks the sum of its windows on
    the host, which a CUDA graph cannot capture.
    """
    n_fft = len(window)
    log_magnitude, phase = x.chunk(2, dim=1)
    magnitude = log_magnitude.clamp(max=_MAX_LOG_MAGNITUDE).exp()  # bounded before it can overflow
    frames = torch.fft.irfft(torch.polar(magnitude, phase.sin()), n_fft, dim=1) * window[:, None]  # (B, n_fft, T)
    length = (frames.shape[2] - 1) * hop
    weight = window.square()[None, :, None].expand(1 if bins is None else len(x), -1, frames.shape[2])
    frames, weight = silenced(frames, bins), silenced(weight, bins)
    inner = slice(n_fft // 2, n_fft // 2 + length)
    wave, total = _overlap_add(frames, hop)[:, inner], _overlap_add(weight, hop)[:, inner]
    return wave / (total if bins is None else total.clamp(min=1e-8))  # after a row's end the sum is 0


def _overlap_add(frames: Tensor, hop: int) -> Tensor:
    """Add overlapping frames: (B, n_fft, T) -> (B, (T - 1) * hop + n_fft)."""
    _, n_fft, T = frames.shape
    length = (T - 1) * hop + n_fft
    return F.fold(frames, (1, length), (1, n_fft), stride=(1, hop)).flatten(1)


class Snake(nn.Module):
    """x + sin(alpha x)^2 / alpha, with one alpha per channel (Ziyin et al., arXiv:2006.08195)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Apply the snake: (B, C, T) -> (B, C, T), zero after each row's length (B,)."""
        if x.is_cuda:
            from cosyvoice_triton.kernels import snake  # imports Triton, which CPU builds of torch lack

            return snake(x, self.alpha, lengths)
        alpha = self.alpha[:, None]
        return silenced(x + torch.sin(alpha * x).square() / (alpha + 1e-9), lengths)


class ResBlock(nn.Module):
    """Pairs of a dilated and a plain convolution, each pair with a residual path. (B, C, T) -> (B, C, T)"""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()

        def conv(dilation: int) -> nn.Conv1d:
            return nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=dilation * (kernel - 1) // 2)

        self.convs1 = nn.ModuleList(conv(dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(conv(1) for _ in dilations)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        for act1, conv1, act2, conv2 in zip(
            self.activations1, self.convs1, self.activations2, self.convs2, strict=True
        ):
            x = x + conv2(act2(conv1(act1(x, lengths)), lengths))
        return x


class Past(NamedTuple):
    """What a chunk of a recording continues, of each row.

    frames (B,): how many of the F0_REACH mel frames before the chunk there are: fewer near the recording's beginning.
    phases (B, harmonics+1): of the source at the middle of the last of them, as `forward` returned them.
    """

    frames: Tensor
    phases: Tensor


Body = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # as `HiFTGenerator.body`


def residual_blocks(config: HiFTConfig, block: Callable[..., nn.Module]) -> tuple[nn.ModuleList, nn.ModuleList]:
    """Return the residual blocks of the source, one for each stage, and of the mel, one for each kernel size of each
    stage."""
    widths = config.widths[1:]
    of_source = zip(widths, config.source_resblock_kernels, config.source_resblock_dilations, strict=True)
    sizes = list(zip(config.resblock_kernels, config.resblock_dilations, strict=True))
    return (
        nn.ModuleList(block(*sizes_of_stage) for sizes_of_stage in of_source),
        nn.ModuleList(block(width, *of) for width in widths for of in sizes),
    )


class HiFTNetwork(nn.Module):
    """What both generators have. hop: samples per mel frame, `config.hop`."""

    config: HiFTConfig
    stft_window: Tensor
    resblocks: nn.ModuleList

    def body_to(self, dtype: torch.dtype) -> Self:
        """Convert the convolutions between source and output spectrum to `dtype`; f0, source and STFTs keep theirs."""
        for name in ("conv_pre", "ups", "source_downs", "source_resblocks", "resblocks", "conv_post"):
            getattr(self, name).to(dtype)
        return self

    def _parallel_resblocks(self, stage: int, x: Tensor, *context: Any) -> Tensor:
        """Return the mean of a stage's residual blocks, which differ in kernel size: (B, C, T) -> (B, C, T)."""
        count = len(self.config.resblock_kernels)
        first, *others = self.resblocks[stage * count : (stage + 1) * count]
        total = first(x, *context)
        for block in others:
            total = total + block(x, *context)
        return total / count


class HiFTGenerator(HiFTNetwork):
    """mel -> f0 -> harmonic source; mel and the source's STFT -> STFT of the speech -> waveform.

    Attribute names are the keys of `hift.pt` after `fuse_weight_norm`.
    """

    def __init__(self, config: HiFTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or HiFTConfig()
        widths = config.widths
        self.m_source = HarmonicSource(config)
        self.conv_pre = nn.Conv1d(config.mel_bins, widths[0], 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(wide, narrow, kernel, rate, padding=(kernel - rate) // 2)
            for wide, narrow, kernel, rate in zip(
                widths[:-1], widths[1:], config.upsample_kernels, config.upsample_rates, strict=True
            )
        )
        self.source_downs = nn.ModuleList(
            nn.Conv1d(config.n_fft + 2, width, 1 if rate == 1 else 2 * rate, rate, padding=rate // 2)
            for width, rate in zip(widths[1:], config.source_rates, strict=True)
        )
        self.source_resblocks, self.resblocks = residual_blocks(config, ResBlock)
        self.conv_post = nn.Conv1d(widths[-1], config.n_fft + 2, 7, padding=3)
        self.f0_predictor = F0Predictor(config.mel_bins, config.f0_channels)
        self.register_buffer("stft_window", torch.hann_window(config.n_fft), persistent=False)

    def decode(
        self, mel: Tensor, source: Tensor, frames: Tensor | None = None, *, body: Body | None = None
    ) -> Tensor:  # fmt: skip
        """Decode mel (B, mel_bins, T), source (B, 1, T*hop) -> speech (B, T*hop) in -audio_limit..audio_limit.

        frames (B,): length of each row, and body, as in `forward`.
        """
        config, dtype = self.config, self.conv_pre.weight.dtype
        bins = None if frames is None else frames * (config.hop // config.istft_hop) + 1
        wave = source.squeeze(1)
        if frames is not None:  # reflected at each row's own end, as the STFT does at that of the longest one
            last = frames[:, None] * config.hop - 1
            index = torch.arange(wave.shape[1], device=wave.device)
            wave = wave.gather(1, torch.where(index <= last, index, 2 * last - index).clamp(min=0))
        excitation = silenced(stft(wave, self.stft_window, config.istft_hop), bins).to(dtype)
        spectrum = (body or self.body)(silenced(mel, frames).to(dtype), excitation, frames).float()
        wave = istft(spectrum, self.stft_window, config.istft_hop, bins)
        return wave.clamp(-config.audio_limit, config.audio_limit)

    def body(self, mel: Tensor, excitation: Tensor, frames: Tensor | None = None) -> Tensor:
        """Compute the convolutions: mel (B, mel_bins, T), source STFT (B, n_fft + 2, bins) -> spectrum of its shape.

        bins: T * hop / istft_hop + 1. frames (B,): length of each row, as in `forward`.
        """
        config, lengths = self.config, frames
        bins = None if frames is None else frames * (config.hop // config.istft_hop) + 1
        x = self.conv_pre(mel)
        for stage, (up, rate) in enumerate(zip(self.ups, config.upsample_rates, strict=True)):
            x = up(silenced(F.leaky_relu(x, config.leaky_slope), lengths))
            lengths = None if lengths is None else lengths * rate
            if stage == len(self.ups) - 1:
                x = F.pad(x, (1, 0), mode="reflect")  # one more frame: the source's centred STFT has one more
                lengths = bins
            x = x + self.source_resblocks[stage](self.source_downs[stage](excitation), lengths)
            x = self._parallel_resblocks(stage, x, lengths)
        return self.conv_post(silenced(F.leaky_relu(x), lengths))

    def forward(
        self,
        mel: Tensor,
        noise: Tensor,
        frames: Tensor | None = None,
        past: Past | None = None,
        *,
        body: Body | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Render mel frames from the beginning of a recording, or from its `past` on.

        mel (B, mel_bins, T), with a past F0_REACH frames more at its beginning, which are not rendered; noise
        (B, T*hop, harmonics+1) of unit variance. Rows may be padded: with frames (B,), the number of frames to render,
        each row is computed as if it ended there, and its output after that is undefined; a past needs it. body: in
        place of the module's own. Returns speech (B, T*hop) and the source's phases (B, harmonics+1, T). ValueError for
        noise of another shape.
        """
        context, begins, carried = (0, None, None) if past is None else (F0_REACH, F0_REACH - past.frames, past.phases)
        B, T = mel.shape[0], mel.shape[2] - context
        expected = (B, T * self.config.hop, self.config.harmonics + 1)
        if noise.shape != expected:
            raise ValueError(f"noise of shape {tuple(noise.shape)} for a mel of {T} frames: expected {expected}")
        f0 = self.f0_predictor(mel, None if frames is None else frames + context, begins)[:, context:]
        source, phases = self.m_source(f0, noise, carried)
        return self.decode(mel[..., context:], source, frames, body=body), phases
