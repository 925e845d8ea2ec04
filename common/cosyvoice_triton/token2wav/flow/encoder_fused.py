"""The conformer encoder by fused kernels, for GPUs: what `UpsampleConformerEncoder` computes of a batch of windows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton import kernels
from cosyvoice_triton.networks.flow.base import ConformerFlow
from cosyvoice_triton.networks.flow.encoder import NORM_EPS, InputEmbedding, Upsample, relative_positions
from cosyvoice_triton.networks.flow.layers import by_taps, weights


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
        self._layers = [_Layer(layer, longest) for layer in layers]
        self._up, self._up_bias = _upsampling(encoder.up_layer)
        self._up_embed = encoder.up_embed
        self._up_layers = [_Layer(layer, config.ratio * longest) for layer in up_layers]
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

    def _run(self, layers: list["_Layer"], h: Tensor, visible: Tensor, frames: Tensor, ratio: int) -> Tensor:
        """Run h (B, T, C) through layers, in place. frames (B,): of each window."""
        B, T, C = h.shape
        for of in layers:
            q, k, v = h.new_empty(3, B, self._heads, T, C // self._heads)
            kernels.linear(h, *of.qkv, norm=of.attention_norm, eps=NORM_EPS, heads=(q, k, v), frames=frames)
            attended = kernels.attend_relative(q, k, v, of.positions, of.biases, visible, ratio)
            kernels.linear(attended, *of.out, add_to=h, frames=frames)
            y = kernels.linear(h, *of.widen, norm=of.norm, eps=NORM_EPS, activation="silu", frames=frames)
            kernels.linear(y, *of.narrow, add_to=h, frames=frames)
        return h


def _embedded(embedding: InputEmbedding, x: Tensor) -> Tensor:
    """Compute what an `InputEmbedding` makes of x (..., C)."""
    return embedding.out(x) * embedding.scale


class _Layer:
    """A `ConformerLayer` as the kernels take it: weight and bias of each product, scale and shift of each norm.
    positions, biases: see `kernels.attend_relative`."""

    def __init__(self, layer: Any, longest: int) -> None:
        attention, forward = layer.self_attn, layer.feed_forward
        inputs = attention.linear_q, attention.linear_k, attention.linear_v
        self.qkv = torch.cat([of.weight for of in inputs]), torch.cat([of.bias for of in inputs])
        of_positions = attention.linear_pos.weight
        distances = relative_positions(longest, longest, of_positions.shape[1], of_positions)
        self.positions = F.linear(distances, of_positions).unflatten(1, (attention.heads, -1))
        self.biases = torch.stack([attention.pos_bias_u, attention.pos_bias_v])
        self.attention_norm, self.norm = weights(layer.norm_mha), weights(layer.norm_ff)
        self.out, self.widen, self.narrow = map(weights, (attention.linear_out, forward.w_1, forward.w_2))


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
