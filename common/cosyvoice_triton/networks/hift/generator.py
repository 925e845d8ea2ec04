"""HiFT generator, inference only, with weight norm folded into plain convolutions. Upstream's `HiFTGenerator`."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice_triton.networks.hift.config import HiFTConfig
from cosyvoice_triton.networks.hift.f0 import F0_REACH, F0Predictor, silenced
from cosyvoice_triton.networks.hift.source import HarmonicSource
from cosyvoice_triton.networks.hift.spectrum import istft, stft


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
    phases (B, harmonics+1): of the source at the middle of the last of them, as `HiFTGenerator.source` returned them.
    """

    frames: Tensor
    phases: Tensor


Body = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # as `HiFTGenerator.body`


class HiFTGenerator(nn.Module):
    """mel -> f0 -> harmonic source; mel and the source's STFT -> STFT of the speech -> waveform.

    Attribute names are the keys of `hift.pt` after `fuse_weight_norm`. hop: samples per mel frame, `config.hop`.
    """

    stft_window: Tensor

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
        self.source_resblocks = nn.ModuleList(
            ResBlock(width, kernel, dilations)
            for width, kernel, dilations in zip(
                widths[1:], config.source_resblock_kernels, config.source_resblock_dilations, strict=True
            )
        )
        self.resblocks = nn.ModuleList(
            ResBlock(width, kernel, dilations)
            for width in widths[1:]
            for kernel, dilations in zip(config.resblock_kernels, config.resblock_dilations, strict=True)
        )
        self.conv_post = nn.Conv1d(widths[-1], config.n_fft + 2, 7, padding=3)
        self.f0_predictor = F0Predictor(config.mel_bins, config.f0_channels)
        self.register_buffer("stft_window", torch.hann_window(config.n_fft), persistent=False)

    def body_to(self, dtype: torch.dtype) -> "HiFTGenerator":
        """Convert the convolutions between source and output spectrum to `dtype`; f0, source and STFTs stay float32."""
        for part in (self.conv_pre, self.ups, self.source_downs, self.source_resblocks, self.resblocks, self.conv_post):
            part.to(dtype)
        return self

    def f0(self, mel: Tensor, ends: Tensor | None = None, begins: Tensor | None = None) -> Tensor:
        """Predict f0 (B, T) in Hz from mel (B, mel_bins, T): see `F0Predictor.forward`."""
        return self.f0_predictor(mel, ends, begins)

    def source(self, f0: Tensor, noise: Tensor, carried: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Make source (B, 1, T*hop), phases (B, harmonics+1, T) of f0 (B, T) in Hz: see `HarmonicSource.forward`."""
        return self.m_source(f0, noise, carried)

    def decode(
        self, mel: Tensor, source: Tensor, frames: Tensor | None = None, *, body: Body | None = None
    ) -> Tensor:  # fmt: skip
        """Decode mel (B, mel_bins, T), source (B, 1, T*hop) -> speech (B, T*hop) in -audio_limit..audio_limit.

        frames (B,): length of each row, and body, as in `forward`.
        """
        config, dtype = self.config, self.conv_pre.weight.dtype
        bins = None if frames is None else frames * (config.hop // config.istft_hop) + 1
        wave = self._mirrored(source.squeeze(1), frames)
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
        place of the module's own. Returns speech (B, T*hop) and the phases (B, harmonics+1, T) of `source`. ValueError
        for noise of another shape.
        """
        context, begins, carried = (0, None, None) if past is None else (F0_REACH, F0_REACH - past.frames, past.phases)
        B, T = mel.shape[0], mel.shape[2] - context
        expected = (B, T * self.config.hop, self.config.harmonics + 1)
        if noise.shape != expected:
            raise ValueError(f"noise of shape {tuple(noise.shape)} for a mel of {T} frames: expected {expected}")
        f0 = self.f0(mel, None if frames is None else frames + context, begins)[:, context:]
        source, phases = self.source(f0, noise, carried)
        return self.decode(mel[..., context:], source, frames, body=body), phases

    def _parallel_resblocks(self, stage: int, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the mean of a stage's residual blocks, which differ in kernel size: (B, C, T) -> (B, C, T)."""
        count = len(self.config.resblock_kernels)
        first, *others = self.resblocks[stage * count : (stage + 1) * count]
        total = first(x, lengths)
        for block in others:
            total = total + block(x, lengths)
        return total / count

    def _mirrored(self, wave: Tensor, frames: Tensor | None) -> Tensor:
        """Return wave (B, N), each row reflected at its own end, as the STFT does at the end of the longest row."""
        if frames is None:
            return wave
        last = frames[:, None] * self.config.hop - 1
        index = torch.arange(wave.shape[1], device=wave.device)
        return wave.gather(1, torch.where(index <= last, index, 2 * last - index).clamp(min=0))
