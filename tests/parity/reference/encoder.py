"""The flows' encoder under upstream's two calls: a whole sequence under a mask, and a stream chunk by chunk."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from cosyvoice_triton.networks.flow.cache import KeyValues
from cosyvoice_triton.networks.flow.encoder import (
    ConformerLayer,
    LookaheadLayer,
    RelativeAttention,
    UpsampleConformerEncoder,
    relative_positions,
    relative_shift,
    run_layers,
)
from cosyvoice_triton.networks.flow.layers import attention_mask, merge_heads, split_heads, valid_frames
from torch import Tensor, nn


@dataclass(frozen=True)
class EncoderCache:
    """What a stream carries from chunk to chunk. `encode_chunk` returns a new one and leaves the old one as it was."""

    lookahead: Tensor  # (B, C, 2): last inputs of the look-ahead layer's second convolution
    upsample: Tensor  # (B, C, 2 * ratio): last inputs of the upsampling convolution, at mel rate
    tokens: KeyValues  # (blocks, B, H, tokens, D)
    frames: KeyValues  # (up_blocks, B, H, frames, D)

    @classmethod
    def empty(cls, encoder: UpsampleConformerEncoder, batch: int) -> "EncoderCache":
        """The cache of streams that have no tokens yet."""
        config, weight = encoder.config, encoder.after_norm.weight
        heads, head_dim = config.heads, config.width // config.heads
        tokens = weight.new_empty(config.blocks, batch, heads, 0, head_dim)
        frames = weight.new_empty(config.up_blocks, batch, heads, 0, head_dim)
        return cls(
            lookahead=weight.new_zeros(batch, config.width, encoder.pre_lookahead_layer.conv2.reach),
            upsample=weight.new_zeros(batch, config.width, encoder.up_layer.conv.reach),
            tokens=KeyValues(tokens, tokens),
            frames=KeyValues(frames, frames),
        )

    def with_room(self, tokens: int, frames: int) -> "EncoderCache":
        """A copy whose keys and values are longer by so many tokens and frames."""
        return EncoderCache(
            self.lookahead.clone(), self.upsample.clone(), self.tokens.with_room(tokens), self.frames.with_room(frames)
        )


def encode_whole(
    encoder: UpsampleConformerEncoder,
    xs: Tensor,
    lengths: Tensor,
    context: Tensor | None = None,
    streaming: bool = False,
) -> tuple[Tensor, Tensor]:
    """xs (B, T, C), lengths (B,) -> features (B, T * ratio, C), valid frames (B, 1, T * ratio) bool.

    context (B, lookahead, C): tokens after the last one, for the look-ahead layer only; None is the end of an
    utterance. streaming: attention is limited to chunks of `config.chunk_tokens`, as in training.
    """
    T, config = xs.shape[1], encoder.config
    chunk = config.chunk_tokens if streaming else None
    x = encoder.embed(xs)
    if context is None:
        x = F.pad(x, (0, 0, 0, config.lookahead))
    else:
        x = torch.cat([x, encoder.embed(context)], dim=1)
    # (B, T + lookahead, C) -> (B, T, C, 1 + lookahead) -> (B, T, 1 + lookahead, C)
    x = encoder.pre_lookahead_layer(x.unfold(1, 1 + config.lookahead, 1).transpose(2, 3))
    x = run_layers(encoder.encoders, x, attention_mask(valid_frames(lengths, T), chunk))

    x = encoder.up_layer(x.transpose(1, 2)).transpose(1, 2)  # (B, T, C) -> (B, C, T * ratio) -> (B, T * ratio, C)
    valid = valid_frames(lengths * config.ratio, T * config.ratio)
    mask = attention_mask(valid, chunk and chunk * config.ratio)
    return encoder.after_norm(run_layers(encoder.up_encoders, encoder.up_embed(x), mask)), valid


def encode_chunk(
    encoder: UpsampleConformerEncoder, xs: Tensor, cache: EncoderCache, final: bool
) -> tuple[Tensor, EncoderCache]:
    """The next chunk of a stream: xs (B, n + lookahead, C), or (B, n, C) if `final` -> (B, n * ratio, C), cache.

    Look-ahead tokens are passed again as the first tokens of the next chunk.
    """
    config = encoder.config
    x = encoder.embed(xs)
    if final:
        x = F.pad(x, (0, 0, 0, config.lookahead))
    tokens = x.shape[1] - config.lookahead
    cache = cache.with_room(tokens, tokens * config.ratio)
    x = _look_ahead(encoder.pre_lookahead_layer, x, cache.lookahead)
    x = _run_cached(encoder.encoders, x, cache.tokens)

    x = x.transpose(1, 2).repeat_interleave(config.ratio, dim=2)  # (B, n, C) -> (B, C, n * ratio)
    x = encoder.up_layer.conv(x, cache.upsample).transpose(1, 2)  # (B, C, n * ratio) -> (B, n * ratio, C)
    x = _run_cached(encoder.up_encoders, encoder.up_embed(x), cache.frames)
    return encoder.after_norm(x), cache


def _look_ahead(layer: LookaheadLayer, x: Tensor, history: Tensor) -> Tensor:
    """(B, n + lookahead, C) -> (B, n, C); `history` is replaced in place."""
    y = layer.conv1(x.transpose(1, 2))  # (B, n + lookahead, C) -> (B, C, n)
    y = layer.conv2(F.leaky_relu(y), history)
    return x[:, : y.shape[2]] + y.transpose(1, 2)  # (B, C, n) -> (B, n, C)


def _run_cached(layers: nn.ModuleList, x: Tensor, cache: KeyValues) -> Tensor:
    """x (B, n, C) through conformer layers that attend to all of `cache`, whose last n frames they write."""
    n, C = x.shape[1:]
    positions = relative_positions(n, cache.frames, C, x)
    for index, layer in enumerate(layers):
        assert isinstance(layer, ConformerLayer)
        x = x + _attend(layer.self_attn, layer.norm_mha(x), positions, cache[index])
        x = x + layer.feed_forward(layer.norm_ff(x))
    return x


def _attend(attention: RelativeAttention, x: Tensor, positions: Tensor, cache: KeyValues) -> Tensor:
    """`RelativeAttention.forward` of the last n of K frames: positions (K + n - 1, C), no mask."""
    q = split_heads(attention.linear_q(x), attention.heads)  # (B, n, C) -> (B, H, n, D)
    k = split_heads(attention.linear_k(x), attention.heads)
    v = split_heads(attention.linear_v(x), attention.heads)
    k, v = cache.write(k, v)  # (B, H, n, D) -> (B, H, K, D)
    p = split_heads(attention.linear_pos(positions), attention.heads)  # (K + n - 1, C) -> (H, K + n - 1, D)
    bias = relative_shift((q + attention.pos_bias_v[:, None]) @ p.transpose(1, 2)) / math.sqrt(q.shape[-1])
    y = F.scaled_dot_product_attention(q + attention.pos_bias_u[:, None], k, v, attn_mask=bias)
    return attention.linear_out(merge_heads(y))
