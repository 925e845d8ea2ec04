"""HiFT's convolutions by fused kernels, for GPUs.

Each convolution is one launch, which applies what comes before the next one: activations, residual paths, the mean of
parallel blocks. Tensors are (B, T, C), those of a stage's parallel blocks (blocks, B, T, C).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cosyvoice_triton.kernels import FrameConvolution, Lengths, convolve_frames, snake_factors, uses_tensor_cores
from cosyvoice_triton.networks.hift.generator import HiFTGenerator, ResBlock

CONV_POST_SLOPE = 0.01  # of the leaky ReLU before `conv_post`, which has the default of torch


def fused_body(hift: HiFTGenerator) -> "FusedBody | None":
    """Fuse the network's body, or return None where the GPU has no tensor cores for its type: cuDNN is faster then."""
    return FusedBody(hift) if uses_tensor_cores(hift.conv_pre.weight.dtype) else None


class Pair(NamedTuple):
    """The weights of one residual block or of parallel ones: convolutions, and factors (blocks, 2, C) of the snakes
    before them."""

    dilation: int
    snake1: Tensor
    conv1: FrameConvolution
    snake2: Tensor
    conv2: FrameConvolution


class VocoderStage(NamedTuple):
    """rate: of the upsampling. stride: of `down`, which reads the excitation."""

    rate: int
    up: FrameConvolution
    stride: int
    down: FrameConvolution
    source: list[Pair]
    blocks: list[Pair]


class FusedBody:
    """Computes `HiFTGenerator.body` by fused kernels. Its weights are a copy, in the type of the network's."""

    @torch.no_grad()
    def __init__(self, hift: HiFTGenerator):
        self._config = config = hift.config
        self._dtype = hift.conv_pre.weight.dtype
        parts: list[Any] = [hift.ups, hift.source_downs, hift.source_resblocks]
        blocks: Any = hift.resblocks
        count = len(config.resblock_kernels)
        # The longest kernel first: its programs, which take the longest, begin first.
        order = sorted(range(count), key=config.resblock_kernels.__getitem__, reverse=True)
        self._pre, self._post = _convolution([hift.conv_pre]), _convolution([hift.conv_post])
        self._stages = [
            VocoderStage(
                rate=up.stride[0],
                up=_upsampling(up),
                stride=down.stride[0],
                down=_convolution([down]),
                source=_pairs([source]),
                blocks=_pairs([blocks[stage * count + index] for index in order]),
            )
            for stage, (up, down, source) in enumerate(zip(*parts, strict=True))
        ]

    def __call__(self, mel: Tensor, excitation: Tensor, frames: Tensor | None = None) -> Tensor:
        """Compute `HiFTGenerator.body`, but the spectrum is float32. What is after a row's end is not read."""
        config, (B, _, T) = self._config, mel.shape
        if frames is None:
            frames = torch.full((B,), T, device=mel.device)
        excitation = self._frames_first(excitation)
        bins = Lengths(frames, config.hop // config.istft_hop, more=1)
        x, lengths = mel.new_empty(B, T, config.channels, dtype=self._dtype), Lengths(frames, 1)
        convolve_frames(self._frames_first(mel), self._pre, lengths, active=x, slope=config.leaky_slope)
        for stage in self._stages:
            up = x.new_empty(B, x.shape[1], len(stage.up.weight))
            convolve_frames(x, stage.up, lengths, out=up)
            up = up.view(B, x.shape[1] * stage.rate, -1)  # a frame's channels are those of `rate` frames
            lengths = lengths._replace(rate=lengths.rate * stage.rate)
            last = stage is self._stages[-1]
            if last:
                lengths = bins
            x, active = _join_source(stage, up, excitation, bins, lengths)
            del up  # its memory serves what follows
            x = _parallel_blocks(stage, x, active, lengths, CONV_POST_SLOPE if last else config.leaky_slope)
        spectrum = x.new_empty(B, len(self._post.weight), x.shape[1], dtype=torch.float32)
        convolve_frames(x, self._post, lengths, out=spectrum.transpose(1, 2))
        return spectrum

    def _frames_first(self, x: Tensor) -> Tensor:
        """Put frames first: (B, C, T) -> (B, T, C) of the network's type."""
        return x.to(self._dtype).transpose(1, 2).contiguous()


def _join_source(
    stage: VocoderStage, up: Tensor, excitation: Tensor, bins: Lengths, lengths: Lengths
) -> tuple[Tensor, Tensor]:
    """Add what the source's block makes of the excitation (B, bins, n_fft + 2) to `up` (B, T, C), of which the last
    stage's has one frame less. Return the sum, (B, T, C), and the first snakes of it, (blocks, B, T, C)."""
    (B, _, C), T = up.shape, excitation.shape[1]
    T = T if stage.stride == 1 else (T - 1) // stage.stride
    x, active = up.new_empty(B, T, C), up.new_empty(B, T, C)
    snake = stage.source[0].snake1
    convolve_frames(excitation, stage.down, bins, stride=stage.stride, out=x, active=active, snake=snake)
    hidden, residual = _until_last(stage.source, x, active, x, lengths)
    snake = stage.blocks[0].snake1
    actives = up.new_empty(len(snake), B, T, C)
    convolve_frames(
        hidden, stage.source[-1].conv2, lengths, residual=residual, added=up, out=x, active=actives, snake=snake
    )  # fmt: skip
    return x, actives


def _parallel_blocks(stage: VocoderStage, x: Tensor, active: Tensor, lengths: Lengths, slope: float) -> Tensor:
    """Compute the leaky ReLU of the mean of a stage's parallel blocks: x (B, T, C), first snakes (blocks, B, T, C)."""
    hidden, residual = _until_last(stage.blocks, x, active, torch.empty_like(active), lengths)
    made = torch.empty_like(x)
    convolve_frames(hidden, stage.blocks[-1].conv2, lengths, residual=residual, active=made, slope=slope)
    return made


def _until_last(
    pairs: list[Pair], x: Tensor, active: Tensor, kept: Tensor, lengths: Lengths
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute all but the last convolution of residual blocks; return the input of that and its residual. active: first
    snakes of x, overwritten. kept: where the pairs leave their results; may be x."""
    hidden = torch.empty_like(active)
    for pair, following in zip(pairs, pairs[1:], strict=False):
        convolve_frames(active, pair.conv1, lengths, dilation=pair.dilation, active=hidden, snake=pair.snake2)
        convolve_frames(hidden, pair.conv2, lengths, residual=x, out=kept, active=active, snake=following.snake1)
        x = kept
    last = pairs[-1]
    convolve_frames(active, last.conv1, lengths, dilation=last.dilation, active=hidden, snake=last.snake2)
    return hidden, x


def _convolution(convs: Sequence[Any], *, merged: bool = False) -> FrameConvolution:
    """Join `nn.Conv1d`s with equal channels. merged: their results are added."""
    # (C_out, C_in, taps) -> (C_out, taps, C_in)
    weight = torch.cat([conv.weight.transpose(1, 2) for conv in convs], dim=1).flatten(1).contiguous()
    bias = torch.stack([conv.bias for conv in convs])
    return FrameConvolution(
        weight, bias.sum(0, keepdim=True) if merged else bias, tuple(conv.kernel_size[0] for conv in convs)
    )


def _upsampling(up: Any) -> FrameConvolution:
    """Turn a transposed convolution, of (B, T, C) to (B, T * rate, C'), into a plain one to (B, T, rate * C').

    Of an output frame t = rate * q + phase, tap j reads the input frame (t + padding - j) / rate if that is whole:
    q + d for j = phase + padding - rate * d. Each phase uses some of the frames around q.
    """
    kernel = up.weight.permute(2, 1, 0)  # (C, C', taps) -> (taps, C', C)
    (size,), (rate,), (padding,) = up.kernel_size, up.stride, up.padding
    reach = max((rate - 1 + padding) // rate, (size - 1 - padding) // rate)
    weight = kernel.new_zeros(rate, kernel.shape[1], 2 * reach + 1, kernel.shape[2])
    for phase in range(rate):
        for d in range(-reach, reach + 1):
            tap = phase + padding - rate * d
            if 0 <= tap < size:
                weight[phase, :, reach + d] = kernel[tap]
    return FrameConvolution(weight.flatten(2).flatten(0, 1), up.bias.repeat(rate)[None], (2 * reach + 1,))


def _pairs(blocks: Sequence[ResBlock]) -> list[Pair]:
    """Make the pairs of parallel blocks, which have equal dilations. The mean of their last results is one
    convolution."""
    made = []
    columns: Any = zip(*(_parts(block) for block in blocks), strict=True)
    for index, parts in enumerate(columns):
        act1, conv1, act2, conv2 = zip(*parts, strict=True)
        (dilation,) = {conv.dilation[0] for conv in conv1}
        last = len(blocks) > 1 and index == len(blocks[0].convs1) - 1
        made.append(
            Pair(
                dilation,
                snake_factors(torch.stack([act.alpha for act in act1])),
                _convolution(conv1),
                snake_factors(torch.stack([act.alpha for act in act2])),
                _convolution(conv2, merged=last),
            )
        )
    return made


def _parts(block: ResBlock) -> list[tuple[nn.Module, ...]]:
    return [*zip(block.activations1, block.convs1, block.activations2, block.convs2, strict=True)]
