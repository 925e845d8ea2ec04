"""Causal UNet estimator of CosyVoice2: velocity of the mel under flow matching. Attribute names are checkpoint keys.

The official network has one level and changes the frame rate nowhere; only the skip connection and the names of a UNet
remain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice_triton.networks.flow.base import ConformerFlow
from cosyvoice_triton.networks.flow.config import UNetConfig, UNetFlowConfig
from cosyvoice_triton.networks.flow.layers import CausalConv1d, attention_mask, merge_heads, split_heads, time_angles

TIME_WIDENING = 4  # width of the time embedding / width of the network


class UNetTimeEmbedding(nn.Module):
    """Sinusoids of the flow time, sines first, then an MLP."""

    def __init__(self, frequencies: int, width: int) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.linear_1 = nn.Linear(frequencies, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """Embed flow times (B,) float32 -> (B, width) of the given dtype; the angles are computed in float32."""
        return self.linear_2(F.silu(self.linear_1(time_angles(t, self.frequencies).to(dtype))))


class CausalBlock(nn.Module):
    """Convolution, norm over channels, Mish. (B, C, T) -> (B, C', T)"""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        # Numbered as in the checkpoint, where a transpose takes the number in between.
        self.block = nn.ModuleDict({"0": CausalConv1d(in_channels, out_channels, 3), "2": nn.LayerNorm(out_channels)})

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Apply the block. mask (B, 1, T): 1 on frames that are not padding."""
        x = self.block["0"](x * mask)
        x = self.block["2"](x.transpose(1, 2)).transpose(1, 2)  # (B, C, T) -> (B, T, C) -> (B, C, T)
        return F.mish(x) * mask


class ResnetBlock(nn.Module):
    """Two causal blocks, the time embedding added between them, around a 1x1 convolution as residual path."""

    def __init__(self, in_channels: int, out_channels: int, time_width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Mish(), nn.Linear(time_width, out_channels))
        self.block1 = CausalBlock(in_channels, out_channels)
        self.block2 = CausalBlock(out_channels, out_channels)
        self.res_conv = nn.Conv1d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, mask: Tensor, time: Tensor) -> Tensor:
        """Apply the block: x (B, C, T), mask (B, 1, T), time (B, time width) -> (B, C', T)."""
        h = self.block1(x, mask) + self.mlp(time)[:, :, None]
        return self.block2(h, mask) + self.res_conv(x * mask)


class UNetAttention(nn.Module):
    def __init__(self, channels: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        inner = heads * head_dim
        self.to_q = nn.Linear(channels, inner, bias=False)
        self.to_k = nn.Linear(channels, inner, bias=False)
        self.to_v = nn.Linear(channels, inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, channels))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend: x (B, T, C), mask (B, 1, 1 or T, T) bool -> (B, T, C)."""
        q, k, v = (split_heads(project(x), self.heads) for project in (self.to_q, self.to_k, self.to_v))
        return self.to_out(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class GELUProjection(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(channels, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x))


class UNetFeedForward(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        # The identity takes the place of upstream's dropout, so that the last layer has the checkpoint's key.
        self.net = nn.Sequential(GELUProjection(channels, hidden), nn.Identity(), nn.Linear(hidden, channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, (B, T, C) -> (B, T, C)."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.channels)
        self.attn1 = UNetAttention(config.channels, config.heads, config.head_dim)
        self.norm3 = nn.LayerNorm(config.channels)
        self.ff = UNetFeedForward(config.channels, 4 * config.channels)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn1(self.norm1(x), mask)
        return x + self.ff(self.norm3(x))


class UNetStage(nn.ModuleList):
    """A resnet block and transformer blocks (module 0 and list 1 of the checkpoint's numbering)."""

    def __init__(self, config: UNetConfig, in_channels: int) -> None:
        super().__init__()
        self.append(ResnetBlock(in_channels, config.channels, TIME_WIDENING * config.channels))
        self.append(nn.ModuleList(TransformerBlock(config) for _ in range(config.blocks)))

    def features(self, x: Tensor, time: Tensor, mask: Tensor, attention: Tensor) -> Tensor:
        """Compute the features: x (B, C, T), time (B, time width), mask (B, 1, T), attention mask (B, 1, 1 or T, T)
        bool -> (B, C', T)."""
        resnet, transformers = self[0], self[1]
        x = resnet(x, mask, time).transpose(1, 2)  # (B, C, T) -> (B, T, C)
        for block in transformers.children():
            x = block(x, attention)
        return x.transpose(1, 2)  # (B, T, C) -> (B, C, T)


class MidStage(UNetStage):
    def forward(self, x: Tensor, time: Tensor, mask: Tensor, attention: Tensor) -> Tensor:
        return self.features(x, time, mask, attention)


class OuterStage(UNetStage):
    """A stage with a final convolution, where deeper UNets change the frame rate."""

    def __init__(self, config: UNetConfig, in_channels: int) -> None:
        super().__init__(config, in_channels)
        self.append(CausalConv1d(config.channels, config.channels, 3))

    def forward(self, x: Tensor, time: Tensor, mask: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features before and after the convolution, both (B, C, T)."""
        x = self.features(x, time, mask, attention)
        return x, self[2](x * mask)


class UNetEstimator(nn.Module):
    """Velocity of the mel at a flow time, given encoder output, speaker and prompt mel."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.channels
        self.time_mlp = UNetTimeEmbedding(config.in_channels, TIME_WIDENING * channels)
        self.down_blocks = nn.ModuleList([OuterStage(config, config.in_channels)])
        self.mid_blocks = nn.ModuleList(MidStage(config, channels) for _ in range(config.mid_stages))
        self.up_blocks = nn.ModuleList([OuterStage(config, 2 * channels)])
        self.final_block = CausalBlock(channels, channels)
        self.final_proj = nn.Conv1d(channels, config.out_channels, 1)

    def forward(
        self, x: Tensor, t: Tensor, mu: Tensor, speaker: Tensor, cond: Tensor, valid: Tensor, streaming: bool = False
    ) -> Tensor:
        """Compute velocity (B, mel, T) of x, mu, cond (B, mel, T), t (B,), speaker (B, mel), valid (B, 1, T) bool.

        valid: frames that are not padding. streaming: attention is limited to chunks of `config.chunk_frames` and what
        is before them, as in training for streams.
        """
        T = x.shape[2]
        time = self.time_mlp(t, x.dtype)
        mask = valid.to(x.dtype)
        attention = attention_mask(valid, self.config.chunk_frames if streaming else None)
        x = torch.cat([x, mu, speaker[:, :, None].expand(-1, -1, T), cond], dim=1)

        skip, x = self.down_blocks[0](x, time, mask, attention)
        for stage in self.mid_blocks:
            x = stage(x, time, mask, attention)
        _, x = self.up_blocks[0](torch.cat([x, skip], dim=1), time, mask, attention)
        return self.final_proj(self.final_block(x, mask) * mask) * mask


class UNetFlow(ConformerFlow[UNetEstimator]):
    """Encoder and UNet estimator; `cosyvoice_triton.token2wav.flow` streams it, computing each chunk's window again."""

    def __init__(self, config: UNetFlowConfig) -> None:
        super().__init__(config, UNetEstimator(config.estimator))
        self.config = config
