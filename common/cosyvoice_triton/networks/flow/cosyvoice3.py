"""CosyVoice3's flow: look-ahead layer and rotary diffusion transformer. Attribute names are the checkpoint's keys.

It has no encoder with attention: the estimator gets the embedded tokens, each with those ahead of it mixed in, at mel
rate. The estimator is causal in chunks, as CosyVoice2's UNet is.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice_triton.networks.flow.base import FlowMatching, MelFlow
from cosyvoice_triton.networks.flow.config import CosyVoice3FlowConfig, RotaryDiTConfig
from cosyvoice_triton.networks.flow.encoder import LookaheadLayer
from cosyvoice_triton.networks.flow.layers import attention_mask, merge_heads, split_heads, time_angles

NORM_EPS = 1e-6
ROTARY_BASE = 10_000


def rotary_frequencies(head_dim: int, device: str | None = None) -> Tensor:
    """Return the angle per frame of each pair of channels, (head_dim / 2,) float32."""
    return ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)


@lru_cache(maxsize=8)  # computed on the CPU for equal values, and kept, because a CUDA graph cannot copy from there
@torch.inference_mode(False)  # kept for later callers: an inference tensor cannot be used in training
def _frequencies_on(device: torch.device, head_dim: int) -> Tensor:
    return rotary_frequencies(head_dim, "cpu").to(device)


def rotary(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Compute cosine and sine of frames' angles: positions (...), `rotary_frequencies` -> (2, ..., head_dim / 2)."""
    angle = positions.float()[..., None] * frequencies
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Apply RoPE to x (B, T, C): rotate pairs of neighbouring channels, the first ones only, by each frame's angles.

    rotary (2, 1 or B, T, head_dim / 2). Upstream applies the rotary embedding before it splits the heads, so that only
    the first head has positions.
    """
    cosine, sine = rotary
    head_dim = 2 * rotary.shape[-1]
    pairs = x[..., :head_dim].float().unflatten(-1, (-1, 2))  # (B, T, head_dim) -> (B, T, head_dim / 2, 2)
    even, odd = pairs.unbind(-1)
    rotated = torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], dim=-1)
    return torch.cat([rotated.flatten(2).to(x.dtype), x[..., head_dim:]], dim=-1)


class TimeEmbedding(nn.Module):
    """Sinusoids of the flow time, sines first, then an MLP."""

    def __init__(self, frequencies: int, width: int) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.time_mlp = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """Embed flow times (B,) float32 -> (B, width) of the given dtype; the angles are computed in float32."""
        return self.time_mlp(time_angles(t, self.frequencies).to(dtype))


class ConvPositions(nn.Module):
    """Two causal grouped convolutions with Mish. (B, T, C) -> (B, T, C)"""

    def __init__(self, width: int, kernel: int, groups: int) -> None:
        super().__init__()
        self.reach = kernel - 1
        self.conv1 = nn.Sequential(nn.Conv1d(width, width, kernel, groups=groups), nn.Mish())
        self.conv2 = nn.Sequential(nn.Conv1d(width, width, kernel, groups=groups), nn.Mish())

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)  # (B, T, C) -> (B, C, T)
        for conv in (self.conv1, self.conv2):
            x = conv(F.pad(x, (self.reach, 0)))
        return x.transpose(1, 2)  # (B, C, T) -> (B, T, C)


class EstimatorInput(nn.Module):
    """Projection of the estimator's inputs, and the convolutions' positions added to it."""

    def __init__(self, config: RotaryDiTConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.in_channels, config.width)
        self.conv_pos_embed = ConvPositions(config.width, config.conv_kernel, config.conv_groups)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        return x + self.conv_pos_embed(x)


class BlockModulation(nn.Module):
    """Shifts, scales and gates of a block's two norms, from the time embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 6 * width)

    def forward(self, time: Tensor) -> tuple[Tensor, ...]:
        """Compute the modulation of a block: time (B, C) -> six tensors (B, 1, C)."""
        return self.linear(F.silu(time))[:, None].chunk(6, dim=-1)


class RotaryAttention(nn.Module):
    """Self-attention whose first head has rotary positions; the others have none."""

    def __init__(self, config: RotaryDiTConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        inner = config.heads * config.head_dim
        self.to_q = nn.Linear(config.width, inner)
        self.to_k = nn.Linear(config.width, inner)
        self.to_v = nn.Linear(config.width, inner)
        self.to_out = nn.Sequential(nn.Linear(inner, config.width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend: x (B, T, C), mask (B, 1, 1 or T, T) bool -> (B, T, C)."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        turns = rotary(positions, _frequencies_on(x.device, self.head_dim))
        q, k = (rotate(project(x), turns) for project in (self.to_q, self.to_k))
        q, k, v = (split_heads(part, self.heads) for part in (q, k, self.to_v(x)))  # (B, T, C) -> (B, H, T, D)
        return self.to_out(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        # The identity takes the place of upstream's dropout, so that the last layer has the checkpoint's key.
        first = nn.Sequential(nn.Linear(width, hidden), nn.GELU(approximate="tanh"))
        self.ff = nn.Sequential(first, nn.Identity(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.ff(x)


class RotaryDiTBlock(nn.Module):
    """Attention and feed-forward, each between a norm and a gate that the time embedding modulates (adaLN)."""

    def __init__(self, config: RotaryDiTConfig) -> None:
        super().__init__()
        self.attn_norm = BlockModulation(config.width)
        self.attn = RotaryAttention(config)
        self.ff = FeedForward(config.width, config.feed_forward)

    def forward(self, x: Tensor, time: Tensor, mask: Tensor) -> Tensor:
        """Apply the block: x (B, T, C), time (B, C), mask (B, 1, 1 or T, T) bool -> (B, T, C)."""
        attn_shift, attn_scale, attn_gate, ff_shift, ff_scale, ff_gate = self.attn_norm(time)
        x = x + attn_gate * self.attn(_norm(x) * (1 + attn_scale) + attn_shift, mask)
        return x + ff_gate * self.ff(_norm(x) * (1 + ff_scale) + ff_shift)


class FinalNorm(nn.Module):
    """The norm before the projection to mel, modulated by the time embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Normalise and modulate: x (B, T, C), time (B, C) -> (B, T, C)."""
        scale, shift = self.linear(F.silu(time))[:, None].chunk(2, dim=-1)
        return _norm(x) * (1 + scale) + shift


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)


class RotaryDiTEstimator(nn.Module):
    """Velocity of the mel at a flow time, given encoder output, speaker and prompt mel."""

    def __init__(self, config: RotaryDiTConfig) -> None:
        super().__init__()
        self.config = config
        self.time_embed = TimeEmbedding(config.time_frequencies, config.width)
        self.input_embed = EstimatorInput(config)
        self.transformer_blocks = nn.ModuleList(RotaryDiTBlock(config) for _ in range(config.depth))
        self.norm_out = FinalNorm(config.width)
        self.proj_out = nn.Linear(config.width, config.out_channels)

    def forward(
        self, x: Tensor, t: Tensor, mu: Tensor, speaker: Tensor, cond: Tensor, valid: Tensor, streaming: bool = False
    ) -> Tensor:
        """Compute velocity (B, mel, T) of x, mu, cond (B, mel, T), t (B,), speaker (B, mel), valid (B, 1, T) bool.

        valid: frames that are not padding. streaming: attention is limited to chunks of `config.chunk_frames` and what
        is before them, as in training for streams.
        """
        time = self.time_embed(t, x.dtype)
        mask = attention_mask(valid, self.config.chunk_frames if streaming else None)
        x = torch.cat([x, cond, mu, speaker[:, :, None].expand(-1, -1, x.shape[2])], dim=1)
        x = self.input_embed(x.transpose(1, 2))  # (B, 4 * mel, T) -> (B, T, C)
        for block in self.transformer_blocks:
            x = block(x, time, mask)
        return self.proj_out(self.norm_out(x, time)).transpose(1, 2)  # (B, T, mel) -> (B, mel, T)


class CosyVoice3Flow(MelFlow[RotaryDiTEstimator]):
    """Look-ahead layer and rotary DiT; `cosyvoice_triton.token2wav.flow` streams it with caches."""

    def __init__(self, config: CosyVoice3FlowConfig) -> None:
        super().__init__(config, config.encoder.width)
        self.config = config
        self.pre_lookahead_layer = LookaheadLayer(config.encoder.width, config.encoder.hidden, config.encoder.lookahead)
        self.decoder = FlowMatching(RotaryDiTEstimator(config.estimator), config.guidance, config.time_grid)

    def encode_window(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """See `MelFlow.encode_window`; there is no attention, so `visible` changes nothing."""
        xs = self.input_embedding(tokens.clamp(min=0)) * (tokens >= 0)[..., None]
        return self.pre_lookahead_layer(xs).repeat_interleave(self.config.encoder.ratio, dim=1)
