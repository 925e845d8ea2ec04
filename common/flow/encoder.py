"""Upsampling conformer encoder: token embeddings in, features at mel rate out. Both flows use it.

`forward` runs a whole sequence under a mask; `forward_chunk` continues a stream from an `EncoderCache`;
`forward_window` computes streams anew as far as they go. Each chunk of a stream sees itself and all before it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.flow.cache import EncoderCache, KeyValues
from common.flow.config import EncoderConfig
from common.flow.layers import CausalConv1d, Conv1d, attention_mask, merge_heads, split_heads, valid_frames


class InputEmbedding(nn.Module):
    """Linear and norm, scaled as in a transformer with additive positions, although positions here are relative."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        self.scale = math.sqrt(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * self.scale


class LookaheadLayer(nn.Module):
    """Mixes the next `lookahead` frames into each frame: one convolution to the right, one to the left."""

    def __init__(self, width: int, lookahead: int) -> None:
        super().__init__()
        self.conv1 = Conv1d(width, width, lookahead + 1)
        self.conv2 = CausalConv1d(width, width, 3)

    def forward(self, x: Tensor, history: Tensor | None = None) -> Tensor:
        """(B, T + lookahead, C) -> (B, T, C)"""
        ahead = self.conv1.kernel_size[0]
        return self.forward_gathered(x.unfold(1, ahead, 1).transpose(2, 3), history)  # -> (B, T, 1 + lookahead, C)

    def forward_gathered(self, x: Tensor, history: Tensor | None = None) -> Tensor:
        """Each frame with those ahead of it, (B, T, 1 + lookahead, C) -> (B, T, C)"""
        y = F.linear(x.flatten(2), self.conv1.weight.transpose(1, 2).flatten(1), self.conv1.bias)
        y = self.conv2(F.leaky_relu(y).transpose(1, 2), history)  # (B, T, C) -> (B, C, T)
        return x[:, :, 0] + y.transpose(1, 2)  # (B, C, T) -> (B, T, C)


class Upsample(nn.Module):
    """Each frame `ratio` times, smoothed by a causal convolution."""

    def __init__(self, width: int, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.conv = CausalConv1d(width, width, 2 * ratio + 1)

    def forward(self, x: Tensor, history: Tensor | None = None) -> Tensor:
        """(B, C, T) -> (B, C, T * ratio)"""
        return self.conv(x.repeat_interleave(self.ratio, dim=2), history)


class RelativeAttention(nn.Module):
    """Self-attention whose scores add a term of the distance between query and key (Transformer-XL)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear_q = nn.Linear(width, width)
        self.linear_k = nn.Linear(width, width)
        self.linear_v = nn.Linear(width, width)
        self.linear_out = nn.Linear(width, width)
        self.linear_pos = nn.Linear(width, width, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(heads, width // heads))
        self.pos_bias_v = nn.Parameter(torch.zeros(heads, width // heads))

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: KeyValues | None) -> Tensor:
        """x (B, T, C); positions as `relative_positions` makes them; mask (B, 1, T or 1, K) bool."""
        q = split_heads(self.linear_q(x), self.heads)  # (B, T, C) -> (B, H, T, D)
        k = split_heads(self.linear_k(x), self.heads)
        v = split_heads(self.linear_v(x), self.heads)
        if cache is not None:
            k, v = cache.write(k, v)
        p = split_heads(self.linear_pos(positions), self.heads)  # (K + T - 1, C) -> (H, K + T - 1, D)
        bias = relative_shift((q + self.pos_bias_v[:, None]) @ p.transpose(1, 2)) / math.sqrt(q.shape[-1])
        if mask is not None:
            bias = bias.masked_fill(~mask, -torch.inf)
        y = F.scaled_dot_product_attention(q + self.pos_bias_u[:, None], k, v, attn_mask=bias)
        return self.linear_out(merge_heads(y))


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w_1 = nn.Linear(width, hidden)
        self.w_2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(F.silu(self.w_1(x)))


class ConformerLayer(nn.Module):
    """Attention and feed-forward with pre-norm; CosyVoice2's conformer has no convolution module."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.self_attn = RelativeAttention(config.width, config.heads)
        self.feed_forward = FeedForward(config.width, config.feed_forward)
        self.norm_mha = nn.LayerNorm(config.width, eps=1e-12)
        self.norm_ff = nn.LayerNorm(config.width, eps=1e-12)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: KeyValues | None) -> Tensor:
        x = x + self.self_attn(self.norm_mha(x), positions, mask, cache)
        return x + self.feed_forward(self.norm_ff(x))


class UpsampleConformerEncoder(nn.Module):
    """Token embeddings to features at mel rate. Attribute names are the checkpoint's keys."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = InputEmbedding(config.width)
        self.pre_lookahead_layer = LookaheadLayer(config.width, config.lookahead)
        self.encoders = nn.ModuleList(ConformerLayer(config) for _ in range(config.blocks))
        self.up_layer = Upsample(config.width, config.ratio)
        self.up_embed = InputEmbedding(config.width)
        self.up_encoders = nn.ModuleList(ConformerLayer(config) for _ in range(config.up_blocks))
        self.after_norm = nn.LayerNorm(config.width)

    def forward(
        self, xs: Tensor, lengths: Tensor, context: Tensor | None = None, streaming: bool = False
    ) -> tuple[Tensor, Tensor]:
        """xs (B, T, C), lengths (B,) -> features (B, T * ratio, C), valid frames (B, 1, T * ratio) bool.

        `context` (B, lookahead, C) is seen by the look-ahead layer only; zeros stand for it at the end of an
        utterance. `streaming` limits attention to the chunks that a stream would have seen.
        """
        T = xs.shape[1]
        ratio = self.config.ratio
        chunk = self.config.chunk_tokens if streaming else None
        x = self.embed(xs)
        if context is None:
            x = F.pad(x, (0, 0, 0, self.config.lookahead))
        else:
            x = torch.cat([x, self.embed(context)], dim=1)
        x = self.pre_lookahead_layer(x)
        x = self._run(self.encoders, x, attention_mask(valid_frames(lengths, T), chunk))

        x = self.up_layer(x.transpose(1, 2)).transpose(1, 2)  # (B, T, C) -> (B, C, T * ratio) -> (B, T * ratio, C)
        valid = valid_frames(lengths * ratio, T * ratio)
        x = self._run(self.up_encoders, self.up_embed(x), attention_mask(valid, chunk and chunk * ratio))
        return self.after_norm(x), valid

    def forward_chunk(self, xs: Tensor, cache: EncoderCache, last: bool) -> tuple[Tensor, EncoderCache]:
        """The next chunk of a stream: xs (B, n + lookahead, C), or (B, n, C) if `last` -> (B, n * ratio, C), cache.

        Look-ahead frames are sent again as the first frames of the next chunk.
        """
        x = self.embed(xs)
        if last:
            x = F.pad(x, (0, 0, 0, self.config.lookahead))
        tokens = x.shape[1] - self.config.lookahead
        cache = cache.with_room(tokens, tokens * self.config.ratio)
        x = self.pre_lookahead_layer(x, cache.lookahead)
        x = self._run(self.encoders, x, cache=cache.tokens)

        x = self.up_layer(x.transpose(1, 2), cache.upsample).transpose(1, 2)  # as in forward
        x = self._run(self.up_encoders, self.up_embed(x), cache=cache.frames)
        return self.after_norm(x), cache

    def forward_window(self, xs: Tensor, present: Tensor, visible: Tensor) -> Tensor:
        """Streams as far as they go, without caches: xs (B, T, 1 + lookahead, C) -> features (B, T * ratio, C).

        xs holds each token with those ahead of it, of which `present` (B, T, 1 + lookahead) says whether they are
        there; `visible` (B, T) how many tokens, counted from the first, each one sees: at least one.
        """
        ratio = self.config.ratio
        x = self.embed(xs) * present[..., None].to(xs)
        x = self.pre_lookahead_layer.forward_gathered(x)
        x = self._run(self.encoders, x, _visible_keys(visible))

        x = self.up_layer(x.transpose(1, 2)).transpose(1, 2)  # as in forward
        x = self._run(self.up_encoders, self.up_embed(x), _visible_keys(visible.repeat_interleave(ratio, 1) * ratio))
        return self.after_norm(x)

    def empty_cache(self, batch: int) -> EncoderCache:
        """The cache of a stream that has not begun."""
        config, weight = self.config, self.after_norm.weight
        heads, head_dim = config.heads, config.width // config.heads
        tokens = weight.new_empty(config.blocks, batch, heads, 0, head_dim)
        frames = weight.new_empty(config.up_blocks, batch, heads, 0, head_dim)
        return EncoderCache(
            lookahead=weight.new_zeros(batch, config.width, self.pre_lookahead_layer.conv2.reach),
            upsample=weight.new_zeros(batch, config.width, self.up_layer.conv.reach),
            tokens=KeyValues(tokens, tokens),
            frames=KeyValues(frames, frames),
        )

    @staticmethod
    def _run(layers: nn.ModuleList, x: Tensor, mask: Tensor | None = None, cache: KeyValues | None = None) -> Tensor:
        B, T, C = x.shape
        positions = relative_positions(T, T if cache is None else cache.frames, C, x)
        for index, layer in enumerate(layers):
            x = layer(x, positions, mask, None if cache is None else cache[index])
        return x


def _visible_keys(visible: Tensor) -> Tensor:
    """How many keys each query sees, (B, T) -> attention mask (B, 1, T, T) bool."""
    return (torch.arange(visible.shape[1], device=visible.device) < visible[:, :, None])[:, None]


def relative_positions(queries: int, keys: int, width: int, like: Tensor) -> Tensor:
    """Sinusoids of every distance query - key, largest first: (keys + queries - 1, width).

    Queries are the last `queries` of the `keys`, so distances run from keys - 1 down to 1 - queries.
    """
    distance = torch.arange(keys - 1, -queries, -1, device=like.device, dtype=torch.float32)
    frequency = torch.exp(torch.arange(0, width, 2, device=like.device) * -(math.log(10_000) / width))
    angle = distance[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).to(like.dtype)  # sin and cos interleaved


def relative_shift(x: Tensor) -> Tensor:
    """Scores by distance -> scores by key: (B, H, T, K + T - 1) -> (B, H, T, K).

    Row i wants its entries from T - 1 - i on; one column of padding makes that a change of strides.
    """
    B, H, T, R = x.shape
    return F.pad(x, (1, 0)).flatten(2)[..., T:].view(B, H, T, R)[..., : R - T + 1]
