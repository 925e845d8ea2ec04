"""Step-Audio2's flow: the causal diffusion transformer estimator. Attribute names are the checkpoint's keys.

`forward` computes whole utterances under a mask; `forward_chunk` continues streams from an `EstimatorCache` and needs
no mask: a frame attends to its own chunk and to everything in the cache. Attention has no positional term, so the order
of cached frames does not affect the result.

This is the definition of the network, and the only form that is exported to ONNX. Streams are served by the solver of
`cosyvoice_triton.token2wav.flow.dit_flow`, which computes the same faster; the tests compare both.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice_triton.networks.flow.base import ConformerFlow
from cosyvoice_triton.networks.flow.cache import CONV_HISTORY, EstimatorCache, KeyValues
from cosyvoice_triton.networks.flow.config import DiTConfig, DiTFlowConfig
from cosyvoice_triton.networks.flow.layers import TIME_SCALE, CausalConv1d, attention_mask, merge_heads, split_heads

NORM_EPS = 1e-6  # of the norms that adaLN modulates
CONV_KERNEL = CONV_HISTORY + 1


class DiTTimeEmbedding(nn.Module):
    """Sinusoids of the flow time, cosines first, then an MLP."""

    def __init__(self, frequencies: int, width: int) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.mlp = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """Embed flow times (B,) float32 -> (B, width) of the given dtype; the angles are computed in float32."""
        half = self.frequencies // 2
        frequency = torch.exp(torch.arange(half, device=t.device) * -(math.log(10_000) / half))
        angle = TIME_SCALE * t[:, None] * frequency
        return self.mlp(torch.cat([angle.cos(), angle.sin()], dim=-1).to(dtype))


class DiTAttention(nn.Module):
    """Self-attention with a layer norm on the queries and keys of each head."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, heads * head_dim)
        self.to_k = nn.Linear(width, heads * head_dim)
        self.to_v = nn.Linear(width, heads * head_dim)
        self.q_norm = nn.LayerNorm(head_dim)
        self.k_norm = nn.LayerNorm(head_dim)
        self.proj = nn.Linear(heads * head_dim, width)

    def forward(self, x: Tensor, mask: Tensor | None, cache: KeyValues | None) -> Tensor:
        """Attend: x (B, T, C), mask (B, 1, 1 or T, T) bool -> (B, T, C). `cache` of this layer is written in place."""
        q = self.q_norm(split_heads(self.to_q(x), self.heads))  # (B, T, C) -> (B, H, T, D)
        k = self.k_norm(split_heads(self.to_k(x), self.heads))
        v = split_heads(self.to_v(x), self.heads)
        if cache is not None:
            k, v = cache.write(k, v)
        return self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class DiTMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CausalConvBlock(nn.Module):
    """Convolution, norm, Mish, convolution. (B, T, C) -> (B, T, C)"""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Numbered as in the checkpoint, where transposes take the numbers in between.
        layers = {
            "1": CausalConv1d(width, width, CONV_KERNEL),
            "3": nn.LayerNorm(width),
            "6": CausalConv1d(width, width, CONV_KERNEL),
        }
        self.block = nn.ModuleDict(layers)

    def forward(self, x: Tensor, history: Tensor | None) -> Tensor:
        """Apply both convolutions. `history` (2, B, C, kernel - 1), their last inputs, is replaced in place."""
        first, second = (None, None) if history is None else history
        x = self.block["1"](x.transpose(1, 2), first).transpose(1, 2)  # (B, T, C) -> (B, C, T) -> (B, T, C)
        x = F.mish(self.block["3"](x))
        return self.block["6"](x.transpose(1, 2), second).transpose(1, 2)  # (B, T, C) -> (B, C, T) -> (B, T, C)


class DiTBlock(nn.Module):
    """Attention, convolution and MLP, each between a norm and a gate that the time embedding modulates (adaLN)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width = config.width
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)
        self.attn = DiTAttention(width, config.heads, config.head_dim)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)
        self.mlp = DiTMLP(width, config.feed_forward)
        self.norm3 = nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)
        self.conv = CausalConvBlock(width)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 9 * width))

    def forward(self, x: Tensor, time: Tensor, mask: Tensor | None, cache: EstimatorCache | None) -> Tensor:
        """Apply the block: x (B, T, C), time (B, 1, C), mask (B, 1, 1 or T, T) bool. Writes the layer's `cache` in
        place."""
        modulation = self.adaLN_modulation(time).chunk(9, dim=-1)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp, shift_conv, scale_conv, gate_conv = (
            modulation
        )
        keys_values, history = (None, None) if cache is None else (cache.attention, cache.conv)
        x = x + gate_attn * self.attn(_modulate(self.norm1(x), shift_attn, scale_attn), mask, keys_values)
        x = x + gate_conv * self.conv(_modulate(self.norm3(x), shift_conv, scale_conv), history)
        return x + gate_mlp * self.mlp(_modulate(self.norm2(x), shift_mlp, scale_mlp))


class FinalLayer(nn.Module):
    """Modulated norm and projection to mel."""

    def __init__(self, width: int, out_channels: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)
        self.linear = nn.Linear(width, out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Apply the layer: x (B, T, C), time (B, 1, C) -> (B, T, mel)."""
        shift, scale = self.adaLN_modulation(time).chunk(2, dim=-1)
        return self.linear(_modulate(self.norm_final(x), shift, scale))


class DiTEstimator(nn.Module):
    """Velocity of the mel at a flow time, given encoder output, speaker and prompt mel."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.t_embedder = DiTTimeEmbedding(config.time_frequencies, config.width)
        self.in_proj = nn.Linear(config.in_channels, config.width)
        self.blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.depth))
        self.final_layer = FinalLayer(config.width, config.out_channels)

    def forward(self, x: Tensor, t: Tensor, mu: Tensor, speaker: Tensor, condition: Tensor, valid: Tensor) -> Tensor:
        """Compute the velocity (B, mel, T) of x, mu, condition (B, mel, T), t (B,), speaker (B, mel), valid (B, 1 or T,
        T) bool.

        valid: which frames (last axis) are attended to, by every frame or by each (second axis).
        """
        return self._run(x, t, mu, speaker, condition, mask=attention_mask(valid, None))

    def forward_chunk(
        self, x: Tensor, t: Tensor, mu: Tensor, speaker: Tensor, condition: Tensor, cache: EstimatorCache
    ) -> Tensor:
        """Compute `forward` for the next T frames of streams. `cache` (of one Euler step, so indexed by layer) already
        has room for them (`with_room`) and is written in place."""
        return self._run(x, t, mu, speaker, condition, cache=cache)

    def empty_cache(self, steps: int, rows: int) -> EstimatorCache:
        """Return the cache of streams that have no frames yet; `rows` counts both halves of the guidance batch."""
        weight = self.in_proj.weight
        return EstimatorCache.empty(self.config, steps, rows, weight.device, weight.dtype)

    def _run(
        self,
        x: Tensor,
        t: Tensor,
        mu: Tensor,
        speaker: Tensor,
        condition: Tensor,
        mask: Tensor | None = None,
        cache: EstimatorCache | None = None,
    ) -> Tensor:
        time = self.t_embedder(t, x.dtype)[:, None]  # (B, C) -> (B, 1, C)
        x = torch.cat([x, mu, speaker[:, :, None].expand(-1, -1, x.shape[2]), condition], dim=1)
        x = self.in_proj(x.transpose(1, 2))  # (B, 4 * mel, T) -> (B, T, C)
        for index, block in enumerate(self.blocks):
            x = block(x, time, mask, None if cache is None else cache[index])
        return self.final_layer(x, time).transpose(1, 2)  # (B, T, mel) -> (B, mel, T)


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


class DiTFlow(ConformerFlow[DiTEstimator]):
    """Encoder and DiT estimator; `cosyvoice_triton.token2wav.flow` streams it with caches."""

    def __init__(self, config: DiTFlowConfig) -> None:
        super().__init__(config, DiTEstimator(config.estimator))
        self.config = config
