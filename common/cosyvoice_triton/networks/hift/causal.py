"""CosyVoice3's vocoder: HiFT of causal convolutions, inference only, which continues a stream from what it kept of it.

Nothing is vocoded twice: every convolution has the last inputs that it needs, and mel, f0, source and spectrum go on
where they were. Audio by chunks is that of the whole up to rounding. Upstream's `CausalHiFTGenerator` has no such state
and vocodes all mel again for every chunk. Attribute names are the keys of `hift.pt` after `fuse_weight_norm`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice_triton.networks.hift.config import HiFTConfig
from cosyvoice_triton.networks.hift.generator import HiFTNetwork, Snake, istft, residual_blocks, stft
from cosyvoice_triton.networks.hift.source import HarmonicSource, silenced

F0_LOOKAHEAD = 3  # mel frames after a frame that its f0 depends on
PRE_LOOKAHEAD = 4  # the same of the first convolution
WITHHELD_FRAMES = F0_LOOKAHEAD + PRE_LOOKAHEAD  # mel frames at the end of a chunk that wait for the next one


NoiseOf = Callable[[int], Tensor]  # samples -> (B, samples, harmonics + 1)


class KeptPast(NamedTuple):
    """What streams keep of their past, a row of each for every stream.

    pitch (B, P) float64: the last inputs of the f0 predictor's convolutions. phases (B, harmonics + 1) float64: of the
    source, in cycles. rest (B, R) float32: mel frames that wait, the last samples of the source, the last inputs of the
    other convolutions, the last columns of the spectrum.
    """

    pitch: Tensor
    phases: Tensor
    rest: Tensor


class Contexts:
    """Left contexts of one pass over a batch: each `extend` puts a row's last inputs in front of its new ones and keeps
    the last ones for the next pass, which extends in the same order.
    """

    def __init__(self, past: Tensor | None) -> None:
        """Begin a pass. past (B, *): what the pass before kept; None where streams begin."""
        self._past = past
        self._at = 0
        self._kept: list[Tensor] = []

    def extend(self, x: Tensor, ends: Tensor, reach: int, zeros: int) -> Tensor:
        """Extend x (B, C, T), rows valid up to `ends` (B,) -> (B, C, reach + T); `zeros` + T where streams begin."""
        B, C, _ = x.shape
        before = x.new_zeros(B, C, zeros) if self._past is None else self._next(C * reach).unflatten(1, (C, reach))
        x = torch.cat([before.to(x.dtype), x], dim=2)
        last = (ends + before.shape[2] - reach)[:, None] + torch.arange(reach, device=x.device)
        # Rows that end here have no next pass, and may be too short.
        self._kept.append(x.gather(2, last.clamp(0, x.shape[2] - 1)[:, None].expand(-1, C, -1)).flatten(1))
        return x

    def _next(self, size: int) -> Tensor:
        assert self._past is not None
        self._at += size
        return self._past[:, self._at - size : self._at]

    def kept(self, dtype: torch.dtype) -> Tensor:
        """Return the past of the next pass, (B, *)."""
        return torch.cat([part.to(dtype) for part in self._kept], dim=1)


class ContinuedConv1d(nn.Conv1d):
    """A convolution whose output depends on no later input."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, *, stride: int = 1, dilation: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride=stride, dilation=dilation)
        self._zeros = dilation * (kernel - 1) if stride == 1 else stride - 1
        # A strided one begins a stream with one more input than it has in later passes.
        self._reach = self._zeros + (stride > 1)

    def forward(self, x: Tensor, ends: Tensor | None = None, contexts: Contexts | None = None) -> Tensor:
        """Convolve (B, C, T), of which each row has `ends` (B,) valid -> (B, C', T / stride)."""
        assert ends is not None and contexts is not None, "a causal convolution continues a stream"
        return super().forward(contexts.extend(x, ends, self._reach, self._zeros) if self._reach else x)


class CausalF0Predictor(nn.Module):
    """Five convolutions over time and a linear layer: log mel -> f0 in Hz. Keys `f0_predictor.*` of `hift.pt`.

    In float64, as upstream computes it: an error in f0 is integrated into the phase of the source over a whole stream.
    """

    def __init__(self, mel_bins: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv1d(mel_bins, channels, F0_LOOKAHEAD + 1), nn.ELU()]
        for _ in range(4):
            layers += [ContinuedConv1d(channels, channels, 3), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, 1)
        self.double()

    def forward(self, mel: Tensor, ends: Tensor, contexts: Contexts) -> Tensor:
        """Predict f0 (B, T) in Hz, float64, never negative, from mel (B, mel_bins, T + F0_LOOKAHEAD); `ends` (B,) of it
        are valid."""
        hidden = mel.to(self.classifier.weight.dtype)
        for layer in self.condnet:
            hidden = layer(hidden, ends, contexts) if isinstance(layer, ContinuedConv1d) else layer(hidden)
        return self.classifier(hidden.transpose(1, 2)).squeeze(2).abs()  # (B, C, T) -> (B, T, C) -> (B, T)


class CausalResBlock(nn.Module):
    """Pairs of a dilated and a plain convolution, each pair with a residual path. (B, C, T) -> (B, C, T)"""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(ContinuedConv1d(channels, channels, kernel, dilation=d) for d in dilations)
        self.convs2 = nn.ModuleList(ContinuedConv1d(channels, channels, kernel) for _ in dilations)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def forward(self, x: Tensor, ends: Tensor, contexts: Contexts) -> Tensor:
        layers = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for act1, conv1, act2, conv2 in layers:
            y = conv1(act1(x, None), ends, contexts)
            x = x + conv2(act2(y, None), ends, contexts)
        return x


class CausalHiFTGenerator(HiFTNetwork):
    """mel -> f0 -> harmonic source; mel and the source's STFT -> STFT of the speech -> waveform.

    Columns: STFT frames, `hop / istft_hop` per mel frame and one more at the
    beginning of a stream.
    """

    def __init__(self, config: HiFTConfig) -> None:
        super().__init__()
        self.config = config
        widths = config.widths
        self.m_source = HarmonicSource(config, held=True)
        self.conv_pre = nn.Conv1d(config.mel_bins, widths[0], PRE_LOOKAHEAD + 1)
        self.ups = nn.ModuleList(
            ContinuedConv1d(wide, narrow, kernel)
            for wide, narrow, kernel in zip(widths[:-1], widths[1:], config.upsample_kernels, strict=True)
        )
        self.source_downs = nn.ModuleList(
            ContinuedConv1d(config.n_fft + 2, width, 1 if rate == 1 else 2 * rate, stride=rate)
            for width, rate in zip(widths[1:], config.source_rates, strict=True)
        )
        self.source_resblocks, self.resblocks = residual_blocks(config, CausalResBlock)
        self.conv_post = ContinuedConv1d(widths[-1], config.n_fft + 2, 7)
        self.f0_predictor = CausalF0Predictor(config.mel_bins, config.f0_channels)
        self.register_buffer("stft_window", torch.hann_window(config.n_fft), persistent=False)

    def vocoded(self, frames: int, *, begins: bool, ends: bool) -> int:
        """Return the mel frames that a row of `frames` new ones vocodes."""
        return frames + (0 if begins else WITHHELD_FRAMES) - (0 if ends else WITHHELD_FRAMES)

    def samples(self, frames: int, *, begins: bool, ends: bool) -> int:
        """Return how many samples of speech a row of `frames` new mel frames gets."""
        half = self.config.n_fft // 2  # withheld, because the next column adds to them
        whole = self.config.hop * self.vocoded(frames, begins=begins, ends=ends)
        return whole + (0 if begins else half) - (0 if ends else half)

    def forward(
        self, mel: Tensor, noise: NoiseOf, frames: Tensor, ends: Tensor, past: KeptPast | None = None, *, ending: bool
    ) -> tuple[Tensor, KeptPast]:
        """Render the next mel frames of streams, which begin if they have no past.

        mel (B, mel_bins, T), of which a row has `frames` (B,). noise: returns the source's noise (B, N, harmonics + 1),
        uniform in 0..1, of that many samples from where the source goes on: the first sample, or `hop` samples after
        those of the mel frames that were vocoded. ends (B,) bool: rows that end their stream here. A row that does not
        has WITHHELD_FRAMES + 1 frames or more, with those that wait. ending: whether a row may end.

        Returns speech (B, N), of which a row has `samples`, and the past of the next call.
        """
        begins = past is None
        pitch, rest = (Contexts(None), Contexts(None)) if past is None else (Contexts(past.pitch), Contexts(past.rest))
        D = self.vocoded(mel.shape[2], begins=begins, ends=ending)  # of the longest row
        waiting = 0 if begins else WITHHELD_FRAMES
        mel = rest.extend(mel, frames, WITHHELD_FRAMES, zeros=0)
        vocoded = frames + waiting - torch.where(ends, 0, WITHHELD_FRAMES)
        mel = F.pad(silenced(mel, frames + waiting), (0, PRE_LOOKAHEAD))[..., : D + PRE_LOOKAHEAD]

        # The source is one frame ahead of the mel: the STFT at the end of the last frame needs a few samples of it.
        first = 0 if begins else 1
        f0 = self.f0_predictor(mel[..., first:], vocoded + 1 - first, pitch).float()
        source, phases = self.m_source(f0, noise(f0.shape[1] * self.config.hop), None if past is None else past.phases)
        speech = self.decode(mel, source, vocoded, ends, rest, begins=begins)
        at = (vocoded - first).clamp(0, phases.shape[2] - 1)[:, None, None].expand(-1, phases.shape[1], 1)
        return speech, KeptPast(pitch.kept(torch.float64), phases.gather(2, at)[..., 0], rest.kept(torch.float32))

    def decode(
        self, mel: Tensor, source: Tensor, vocoded: Tensor, ends: Tensor, contexts: Contexts, *, begins: bool
    ) -> Tensor:
        """Decode mel (B, mel_bins, D + PRE_LOOKAHEAD), source (B, 1, N) -> speech, in -audio_limit..audio_limit, of the
        first `vocoded` (B,) of D frames. The rest is as in `forward`."""
        config, rate = self.config, self.config.hop // self.config.istft_hop
        columns = vocoded * rate + (1 if begins else 0)  # (B,)
        frames = mel.shape[2] - PRE_LOOKAHEAD
        wave = self._framed(source, vocoded, ends, frames, contexts, begins)
        excitation = stft(wave, self.stft_window, config.istft_hop, center=False).to(self.conv_pre.weight.dtype)

        x, valid = self.conv_pre(mel.to(excitation.dtype)), vocoded
        for stage, (up, up_rate) in enumerate(zip(self.ups, config.upsample_rates, strict=True)):
            valid = valid * up_rate
            x = F.leaky_relu(x, config.leaky_slope).repeat_interleave(up_rate, dim=2)
            x = up(x, valid, contexts)
            if stage == len(self.ups) - 1:
                x = F.pad(x, (1, 0), mode="reflect") if begins else x
                valid = columns
            driven = self.source_downs[stage](excitation, columns, contexts)
            x = x + self.source_resblocks[stage](driven, valid, contexts)
            x = self._parallel_resblocks(stage, x, valid, contexts)
        spectrum = self.conv_post(F.leaky_relu(x), valid, contexts).float()

        overlapping = config.n_fft // config.istft_hop
        spectrum = contexts.extend(spectrum, columns, overlapping, zeros=0)
        if begins:
            speech = istft(spectrum, self.stft_window, config.istft_hop, columns)
        else:
            speech = istft(spectrum, self.stft_window, config.istft_hop, columns + overlapping)
            speech = speech[:, (overlapping - 1) * config.istft_hop - config.n_fft // 2 :]
        return speech.clamp(-config.audio_limit, config.audio_limit)

    def _framed(
        self, source: Tensor, vocoded: Tensor, ends: Tensor, frames: int, contexts: Contexts, begins: bool
    ) -> Tensor:
        """Return the samples of the source (B, 1, N) that the STFT's next columns see, (B, N'): after those before, and
        mirrored where a stream begins or ends."""
        hop, step, n_fft = self.config.hop, self.config.istft_hop, self.config.n_fft
        reach = hop - step + n_fft // 2
        first = 0 if begins else 1
        wave = contexts.extend(source, (vocoded + 1 - first) * hop, reach, zeros=0)[:, 0]
        if begins:
            index = torch.arange(-(n_fft // 2), frames * hop + n_fft // 2, device=wave.device).abs()
            last = vocoded * hop - 1
        else:
            index = torch.arange(frames * hop + n_fft - step, device=wave.device)
            last = reach + (vocoded - 1) * hop - 1
        last = torch.where(ends, last, wave.shape[1] - 1)[:, None]
        return wave.gather(1, torch.where(index <= last, index, 2 * last - index).clamp(min=0))
