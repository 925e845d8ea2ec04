"""Upsampling conformer encoder of CosyVoice2's and Step-Audio2's flows: embeddings of speech tokens in, features at mel
rate out.

It computes a stream's whole window for every chunk and keeps no caches: it is small next to the estimator. Which tokens
a token may attend to is the caller's choice, so that one `forward` serves whole utterances and any division into
chunks.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice_triton.networks.flow.config import EncoderConfig
from cosyvoice_triton.networks.flow.layers import CausalConv1d, Conv1d, by_taps, merge_heads, split_heads

NORM_EPS = 1e-12
SCORES_AT_ONCE = 1 << 26  # 128 MiB in float16; half of that is slower
QUERIES_AT_ONCE = 64  # a tile of the attention kernel


class InputEmbedding(nn.Module):
    """Linear and norm, scaled by sqrt(width) as for additive positions, although positions here are relative."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        self.scale = math.sqrt(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * self.scale


class LookaheadLayer(nn.Module):
    """Mixes the next `lookahead` tokens into each token: a convolution over them, then a causal convolution."""

    def __init__(self, width: int, hidden: int, lookahead: int) -> None:
        super().__init__()
        self.conv1 = Conv1d(width, hidden, lookahead + 1)
        self.conv2 = CausalConv1d(hidden, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve each token followed by the tokens ahead of it, (B, T, 1 + lookahead, C) -> (B, T, C)"""
        y = F.linear(x.flatten(2), by_taps(self.conv1.weight), self.conv1.bias)
        y = self.conv2(F.leaky_relu(y).transpose(1, 2))  # (B, T, C) -> (B, C, T)
        return x[:, :, 0] + y.transpose(1, 2)  # (B, C, T) -> (B, T, C)


class Upsample(nn.Module):
    """Repeats each token `ratio` times and smooths with a causal convolution."""

    def __init__(self, width: int, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.conv = CausalConv1d(width, width, 2 * ratio + 1)

    def forward(self, x: Tensor) -> Tensor:
        """Upsample (B, C, T) -> (B, C, T * ratio)."""
        return self.conv(x.repeat_interleave(self.ratio, dim=2))


class RelativeAttention(nn.Module):
    """Self-attention with Transformer-XL's relative positions: scores add a term of the distance query - key."""

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

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Attend: x (B, T, C), `relative_positions` (2T - 1, C), mask (B, 1, T or 1, T) bool -> (B, T, C)."""
        B, T, _ = x.shape
        q = split_heads(self.linear_q(x), self.heads)  # (B, T, C) -> (B, H, T, D)
        k = split_heads(self.linear_k(x), self.heads)
        v = split_heads(self.linear_v(x), self.heads)
        p = split_heads(self.linear_pos(positions), self.heads)  # (2T - 1, C) -> (H, 2T - 1, D)
        of_content = q + self.pos_bias_u[:, None]
        of_distance = (q + self.pos_bias_v[:, None]) / math.sqrt(q.shape[-1])
        hidden = ~mask
        attended = []
        for first, end in query_blocks(T, B * self.heads):
            near = p[:, T - end : 2 * T - 1 - first]  # the distances from these queries
            bias = relative_shift(of_distance[:, :, first:end] @ near.transpose(1, 2))
            bias = bias.masked_fill(hidden if hidden.shape[2] == 1 else hidden[:, :, first:end], -torch.inf)
            attended.append(F.scaled_dot_product_attention(of_content[:, :, first:end], k, v, attn_mask=bias))
        return self.linear_out(merge_heads(torch.cat(attended, dim=2)))


class ConformerFeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w_1 = nn.Linear(width, hidden)
        self.w_2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(F.silu(self.w_1(x)))


class ConformerLayer(nn.Module):
    """Pre-norm attention and feed-forward; CosyVoice2's conformer has no convolution module."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.self_attn = RelativeAttention(config.width, config.heads)
        self.feed_forward = ConformerFeedForward(config.width, config.feed_forward)
        self.norm_mha = nn.LayerNorm(config.width, eps=NORM_EPS)
        self.norm_ff = nn.LayerNorm(config.width, eps=NORM_EPS)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Compute the layer; the arguments are those of `RelativeAttention.forward`."""
        x = x + self.self_attn(self.norm_mha(x), positions, mask)
        return x + self.feed_forward(self.norm_ff(x))


class UpsampleConformerEncoder(nn.Module):
    """Token embeddings to features at mel rate. Attribute names are the checkpoint's keys."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = InputEmbedding(config.width)
        self.pre_lookahead_layer = LookaheadLayer(config.width, config.width, config.lookahead)
        self.encoders = nn.ModuleList(ConformerLayer(config) for _ in range(config.blocks))
        self.up_layer = Upsample(config.width, config.ratio)
        self.up_embed = InputEmbedding(config.width)
        self.up_encoders = nn.ModuleList(ConformerLayer(config) for _ in range(config.up_blocks))
        self.after_norm = nn.LayerNorm(config.width)

    def forward(self, xs: Tensor, present: Tensor, visible: Tensor) -> Tensor:
        """Encode xs (B, T, 1 + lookahead, C) -> features (B, T * ratio, C).

        xs holds the embedding of each token followed by those of the tokens ahead of it; present (B, T, 1 + lookahead)
        bool is False where there is no such token (at the end of an utterance); visible (B, T): how many tokens,
        counted from the first, each token attends to, at least 1.
        """
        ratio = self.config.ratio
        x = self.embed(xs) * present[..., None].to(xs)
        x = self.pre_lookahead_layer(x)
        x = run_layers(self.encoders, x, _visible_keys(visible))

        x = self.up_layer(x.transpose(1, 2)).transpose(1, 2)  # (B, T, C) -> (B, C, T * ratio) -> (B, T * ratio, C)
        x = run_layers(self.up_encoders, self.up_embed(x), _visible_keys(visible.repeat_interleave(ratio, 1) * ratio))
        return self.after_norm(x)


def run_layers(layers: nn.ModuleList, x: Tensor, mask: Tensor) -> Tensor:
    """Run x (B, T, C) through conformer layers under one mask (B, 1, T or 1, T) bool -> (B, T, C)."""
    T, C = x.shape[1:]
    positions = relative_positions(T, T, C, x)
    for layer in layers:
        x = layer(x, positions, mask)
    return x


def _visible_keys(visible: Tensor) -> Tensor:
    """Make the attention mask (B, 1, T, T) bool from the number of keys that each query attends to, (B, T)."""
    return (torch.arange(visible.shape[1], device=visible.device) < visible[:, :, None])[:, None]


def relative_positions(queries: int, keys: int, width: int, like: Tensor) -> Tensor:
    """Compute sinusoids of every distance query - key, largest first: (keys + queries - 1, width).

    Queries are the last `queries` of the `keys`, so distances run from keys - 1 down to 1 - queries.
    """
    distance = torch.arange(keys - 1, -queries, -1, device=like.device, dtype=torch.float32)
    frequency = torch.exp(torch.arange(0, width, 2, device=like.device) * -(math.log(10_000) / width))
    angle = distance[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).to(like.dtype)  # sin and cos interleaved


def relative_shift(x: Tensor) -> Tensor:
    """Turn scores by distance into scores by key: (B, H, T, K + T - 1) -> (B, H, T, K), without a copy.

    Row i takes its entries from T - 1 - i on: each row begins one entry earlier than the one before.
    """
    T, R = x.shape[2:]
    if T == 1:
        return x
    return x.flatten(2)[..., T - 1 : T * R - 1].unflatten(2, (T, R - 1))[..., : R - T + 1]


def query_blocks(length: int, rows: int) -> list[tuple[int, int]]:
    """Return (first, end) of the queries whose scores are computed at once: for `rows` rows of `length` keys, at most
    SCORES_AT_ONCE scores by distance, and QUERIES_AT_ONCE or more queries.

    Without blocks, the scores of 64 windows of 400 tokens take 1.4 GB in float16 at mel rate, several times. An
    exported network has one block: it is made for every length.
    """
    if torch.compiler.is_exporting():
        return [(0, length)]
    most = SCORES_AT_ONCE // (rows * 2 * length) // QUERIES_AT_ONCE * QUERIES_AT_ONCE
    size = max(most, QUERIES_AT_ONCE)
    return [(first, min(first + size, length)) for first in range(0, length, size)]
