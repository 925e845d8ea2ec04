"""The conformer encoder by fused kernels, for GPUs: what `UpsampleConformerEncoder` computes of a batch of windows."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice_triton import kernels
from cosyvoice_triton.networks.flow.base import ConformerFlow
from cosyvoice_triton.networks.flow.encoder import (
    NORM_EPS,
    ConformerLayer,
    InputEmbedding,
    Upsample,
    relative_positions,
)
from cosyvoice_triton.networks.flow.layers import by_taps

Norm = tuple[Tensor, Tensor]  # scale and shift


class _Layer(NamedTuple):
    """Weights of a layer; matrices are (out, in). positions, biases: see `kernels.attend_relative`."""

    attention_norm: Norm
    qkv: Tensor
    qkv_bias: Tensor
    positions: Tensor
    biases: Tensor
    out: Tensor
    out_bias: Tensor
    norm: Norm
    w_1: Tensor
    w_1_bias: Tensor
    w_2: Tensor
    w_2_bias: Tensor


class FusedEncoder:
    """Five kernels, and two for norms, per layer. Rows do not affect each other, and padding is not computed.

    longest: tokens of the longest window.
    """

    @torch.inference_mode()
    def __init__(self, network: ConformerFlow[Any], longest: int):
        encoder = network.encoder
        config = encoder.config
        layers: list[Any] = list(encoder.encoders)
        up_layers: list[Any] = list(encoder.up_encoders)
        self._heads, self._ratio = config.heads, config.ratio
        embedded = _embedded(encoder.embed, network.input_embedding.weight)
        # The last row is of tokens that are absent, which have the number -1.
        self._tokens = torch.cat([embedded, torch.zeros_like(embedded[:1])])
        ahead = encoder.pre_lookahead_layer
        self._conv1, self._conv1_bias = by_taps(ahead.conv1.weight), ahead.conv1.bias
        self._conv2, self._conv2_bias = by_taps(ahead.conv2.weight), ahead.conv2.bias
        self._layers = [_layer(layer, longest) for layer in layers]
        self._up, self._up_bias = _upsampling(encoder.up_layer)
        self._up_embed = encoder.up_embed
        self._up_layers = [_layer(layer, config.ratio * longest) for layer in up_layers]
        self._last_norm, self._projection = encoder.after_norm, network.encoder_proj

    def __call__(self, tokens: Tensor, visible: Tensor, *, tried: int | None = None) -> Tensor:
        """Compute `MelFlow.encode_window`; what comes after a window, as far as its last token sees, is 0. tried: by
        only so many first layers before and after the upsampling."""
        B, T, _ = tokens.shape
        frames = visible.amax(1)
        x = self._tokens[tokens]  # (B, T, 1 + lookahead, C)
        y = kernels.linear(x.flatten(2), self._conv1, self._conv1_bias, activation="leaky_relu")
        h = kernels.linear(y, self._conv2, self._conv2_bias, add_to=x[:, :, 0].contiguous())
        h = self._run(self._layers[:tried], h, visible, frames, 1)

        frames = self._ratio * frames
        h = kernels.linear(h, self._up, self._up_bias).view(B, self._ratio * T, -1)  # (B, T, ratio * C) -> (B, 2T, C)
        h = _embedded(self._up_embed, h)
        h = self._run(self._up_layers[:tried], h, visible, frames, self._ratio)
        last, projection = self._last_norm, self._projection
        mu = kernels.linear(
            h, projection.weight, projection.bias, norm=(last.weight, last.bias), eps=last.eps, frames=frames
        )
        return mu.masked_fill((torch.arange(mu.shape[1], device=mu.device) >= frames[:, None])[:, :, None], 0)

    def _run(self, layers: list[_Layer], h: Tensor, visible: Tensor, frames: Tensor, ratio: int) -> Tensor:
        """Run h (B, T, C) through layers, in place. frames (B,): of each window."""
        B, T, C = h.shape
        for of in layers:
            q, k, v = h.new_empty(3, B, self._heads, T, C // self._heads)
            kernels.linear(h, of.qkv, of.qkv_bias, norm=of.attention_norm, eps=NORM_EPS, heads=(q, k, v), frames=frames)
            attended = kernels.attend_relative(q, k, v, of.positions, of.biases, visible, ratio)
            kernels.linear(attended, of.out, of.out_bias, add_to=h, frames=frames)
            y = kernels.linear(h, of.w_1, of.w_1_bias, norm=of.norm, eps=NORM_EPS, activation="silu", frames=frames)
            kernels.linear(y, of.w_2, of.w_2_bias, add_to=h, frames=frames)
        return h


def _embedded(embedding: InputEmbedding, x: Tensor) -> Tensor:
    """Compute what an `InputEmbedding` makes of x (..., C)."""
    return embedding.out(x) * embedding.scale


def _layer(layer: ConformerLayer, longest: int) -> _Layer:
    attention, forward = layer.self_attn, layer.feed_forward
    inputs = attention.linear_q, attention.linear_k, attention.linear_v
    width = attention.linear_pos.weight.shape[1]
    distances = relative_positions(longest, longest, width, attention.linear_pos.weight)
    return _Layer(
        attention_norm=_norm(layer.norm_mha),
        qkv=torch.cat([of.weight for of in inputs]),
        qkv_bias=torch.cat([of.bias for of in inputs]),
        positions=F.linear(distances, attention.linear_pos.weight).unflatten(1, (attention.heads, -1)),
        biases=torch.stack([attention.pos_bias_u, attention.pos_bias_v]),
        out=attention.linear_out.weight,
        out_bias=attention.linear_out.bias,
        norm=_norm(layer.norm_ff),
        w_1=forward.w_1.weight,
        w_1_bias=forward.w_1.bias,
        w_2=forward.w_2.weight,
        w_2_bias=forward.w_2.bias,
    )


def _norm(norm: nn.LayerNorm) -> Norm:
    return norm.weight, norm.bias


def _upsampling(layer: Upsample) -> tuple[Tensor, Tensor]:
    """Merge the repetition of each token and the convolution behind it into one convolution of three tokens: weight
    (ratio * C, 3 C) and bias. A tap of the original meets one of these tokens, which one depends on the frame's place
    in its token."""
    ratio, kernel, bias = layer.ratio, layer.conv.weight.float(), layer.conv.bias
    assert bias is not None
    of_frames = kernel.new_zeros(ratio, *kernel.shape[:2], 3)
    for frame in range(ratio):
        for tap in range(kernel.shape[2]):
            of_frames[frame, :, :, (frame + tap) // ratio] += kernel[:, :, tap]
    return by_taps(of_frames.flatten(0, 1)).to(layer.conv.weight), bias.repeat(ratio)
