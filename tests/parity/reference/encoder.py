"""The flows' encoder under upstream's two calls: a whole sequence under a mask, and a stream chunk by chunk.

Both are computed by the encoder's own `forward`, which has no caches: a stream from its start for every chunk. What
upstream's caches would hold passes inside it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cosyvoice_triton.networks.flow.encoder import UpsampleConformerEncoder
from cosyvoice_triton.networks.flow.layers import split_heads, valid_frames
from torch import Tensor, nn


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
    windows = _with_ahead(encoder, xs if context is None else torch.cat([xs, context], dim=1), context is None)
    visible = lengths[:, None].expand(-1, T)
    if streaming:
        visible = torch.minimum(visible, (torch.arange(T) // config.chunk_tokens + 1) * config.chunk_tokens)
    return encoder(*windows, visible), valid_frames(lengths * config.ratio, T * config.ratio)


def _with_ahead(encoder: UpsampleConformerEncoder, xs: Tensor, ends: bool) -> tuple[Tensor, Tensor]:
    """Each token of xs (B, n, C) with those ahead of it, and which of them there are; see the encoder's `forward`.

    The last `lookahead` tokens are only ahead of others, unless the utterance `ends` with them.
    """
    size, absent = 1 + encoder.config.lookahead, encoder.config.lookahead if ends else 0
    present = F.pad(xs.new_ones(xs.shape[:2], dtype=torch.bool), (0, absent))
    return F.pad(xs, (0, 0, 0, absent)).unfold(1, size, 1).transpose(2, 3), present.unfold(1, size, 1)


@dataclass(frozen=True)
class EncoderStream:
    """A stream so far. inputs: of the encoder's `forward`; none before the first chunk."""

    encoder: UpsampleConformerEncoder
    inputs: tuple[Tensor, ...] = ()

    @property
    def tokens(self) -> int:
        return self.inputs[0].shape[1] if self.inputs else 0

    def then(self, xs: Tensor, final: bool) -> "EncoderStream":
        """The stream with one more chunk, which attends to all up to its end: xs (B, n + lookahead, C), or (B, n, C) if
        `final`. Look-ahead tokens are passed again as the first tokens of the next chunk."""
        windows, present = _with_ahead(self.encoder, xs, final)
        chunk = windows, present, torch.full(windows.shape[:2], self.tokens + windows.shape[1])
        joined = (torch.cat(parts, dim=1) for parts in zip(self.inputs, chunk, strict=True)) if self.inputs else chunk
        return EncoderStream(self.encoder, tuple(joined))

    def features(self) -> Tensor:
        """Features (B, T * ratio, C) of all tokens."""
        return self.encoder(*self.inputs)

    def caches(self) -> dict[str, Tensor]:
        """What upstream's caches hold after the last chunk.

        cnn_cache (B, C, 2 + 2 * ratio): the last inputs of both convolutions. att_cache (layers, B, H, frames, 2 D):
        keys and values concatenated, the layers at token rate repeated to mel rate.
        """
        encoder, passed = self.encoder, dict[nn.Module, tuple[Tensor, Tensor]]()

        def keep(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            passed[module] = inputs[0], output

        convolutions: list[Any] = [encoder.pre_lookahead_layer.conv2, encoder.up_layer.conv]
        layers: list[Any] = [layer.self_attn for layer in (*encoder.encoders, *encoder.up_encoders)]
        kept = [*convolutions, *(projection for layer in layers for projection in (layer.linear_k, layer.linear_v))]
        handles = [module.register_forward_hook(keep) for module in kept]
        frames = self.features().shape[1]
        for handle in handles:
            handle.remove()
        attention = []
        for layer in layers:
            both = [split_heads(passed[each][1], layer.heads) for each in (layer.linear_k, layer.linear_v)]
            joined = torch.cat(both, dim=-1)  # (B, H, T or T * ratio, 2 D)
            attention.append(joined.repeat(1, 1, frames // joined.shape[2], 1))
        ends = [passed[convolution][0][..., -convolution.reach :] for convolution in convolutions]
        return {"cnn_cache": torch.cat(ends, dim=2), "att_cache": torch.stack(attention)}
