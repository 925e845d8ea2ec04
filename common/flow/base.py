"""What the two flows share: token embedding, speaker projection, encoder, prompt condition."""

from typing import Generic

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.flow.config import FlowConfig
from common.flow.encoder import UpsampleConformerEncoder
from common.flow.matching import Estimator, FlowMatching


class MelFlow(nn.Module, Generic[Estimator]):
    """Speech tokens to mel. Attribute names are the checkpoint's keys."""

    def __init__(self, config: FlowConfig, estimator: Estimator) -> None:
        super().__init__()
        # drawn here: nn.Embedding's own draw makes torch import its compiler on the meta device, which takes seconds
        self.input_embedding = nn.Embedding.from_pretrained(torch.randn(config.vocab, config.encoder.width))
        self.spk_embed_affine_layer = nn.Linear(config.speaker_dim, config.mel_bins)
        self.encoder = UpsampleConformerEncoder(config.encoder)
        self.encoder_proj = nn.Linear(config.encoder.width, config.mel_bins)
        self.decoder = FlowMatching(estimator, config.guidance)

    def encode_window(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """Streams as far as they go: tokens (B, T, 1 + lookahead), visible (B, T) -> encoder output (B, 2T, mel).

        Each token comes with those ahead of it, -1 where there is none; `visible` as in the encoder's `forward_window`.
        """
        h = self.encoder.forward_window(self.input_embedding(tokens.clamp(min=0)), tokens >= 0, visible)
        return self.encoder_proj(h)

    def solve(
        self,
        mu: Tensor,
        valid: Tensor,
        prompt_feat: Tensor,
        embedding: Tensor,
        *,
        noise: Tensor,
        steps: int,
        **mask: bool,
    ) -> Tensor:
        """Mel (B, mel, T) of utterances as far as they go, the prompt's included. No row hears another or its padding.

        mu (B, mel, T): encoder output, valid (B, 1, T): of each row's own frames, prompt_feat (B, P, mel): zeros behind
        a row's own, noise (1 or B, mel, T). `mask`: options of the estimator's attention.
        """
        valid = valid.repeat(2, 1, 1)  # rows of the guidance batch
        estimator = self.decoder.estimator
        return self.decoder.solve(
            lambda _, *rows: estimator(*rows, valid=valid, **mask),
            noise,
            mu,
            self.project_speaker(embedding),
            self.prompt_condition(prompt_feat, mu.shape[2]),
            steps,
        )

    def project_speaker(self, embedding: Tensor) -> Tensor:
        """x-vector (B, speaker_dim) of any length -> (B, mel)"""
        return self.spk_embed_affine_layer(F.normalize(embedding, dim=1).to(self.encoder_proj.weight.dtype))

    def prompt_condition(self, prompt_feat: Tensor, frames: int) -> Tensor:
        """Prompt mel (B, P, mel) -> (B, mel, frames): the prompt's frames, then zeros."""
        condition = prompt_feat.transpose(1, 2).to(self.encoder_proj.weight.dtype)  # (B, P, mel) -> (B, mel, P)
        return F.pad(condition, (0, frames - condition.shape[2]))
