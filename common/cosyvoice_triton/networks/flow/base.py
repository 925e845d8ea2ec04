"""What the flows share: token embedding, speaker projection, prompt condition; two of them also the encoder."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Generic

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosyvoice_triton.networks.flow.config import ConformerFlowConfig, FlowConfig
from cosyvoice_triton.networks.flow.encoder import UpsampleConformerEncoder
from cosyvoice_triton.networks.flow.matching import Estimator, FlowMatching


class MelFlow(nn.Module, Generic[Estimator]):
    """Speech tokens to log mel by conditional flow matching. Attribute names are the checkpoint's keys."""

    decoder: FlowMatching[Estimator]

    def __init__(self, config: FlowConfig, token_width: int) -> None:
        super().__init__()
        # Initialised here: nn.Embedding's own initialisation imports torch's compiler on the meta device (seconds).
        self.input_embedding = nn.Embedding.from_pretrained(torch.randn(config.vocab, token_width))
        self.spk_embed_affine_layer = nn.Linear(config.speaker_dim, config.mel_bins)

    @abstractmethod
    def encode_window(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """Encode windows: tokens (B, T, 1 + lookahead), visible (B, T) -> encoder output mu (B, 2T, mel).

        `tokens` holds each speech token followed by the tokens ahead of it, -1 where there is none; `visible` is the
        number of tokens, counted from the first, that each token attends to, if the encoder has attention.
        """

    def solve(
        self,
        mu: Tensor,
        valid: Tensor,
        prompt_feat: Tensor,
        embedding: Tensor,
        *,
        noise: Tensor,
        steps: int,
        before_step: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """Return the mel (B, mel, T) of whole utterances, prompt included; rows do not affect each other.

        mu (B, mel, T): encoder output; valid (B, 1, T) bool: frames that are not padding; prompt_feat (B, P, mel): the
        prompt's mel, zero-padded; embedding (B, speaker_dim): x-vector; noise (1 or B, mel, T).
        """
        valid = valid.repeat(self.decoder.rows, 1, 1)
        estimator = self.decoder.estimator
        return self.decoder.solve(
            lambda _, *rows: estimator(*rows, valid=valid),
            noise,
            mu,
            self.project_speaker(embedding),
            self.prompt_condition(prompt_feat, mu.shape[2]),
            steps,
            before_step,
        )

    def project_speaker(self, embedding: Tensor) -> Tensor:
        """Project an x-vector (B, speaker_dim), which is normalised here -> (B, mel)."""
        return self.spk_embed_affine_layer(F.normalize(embedding, dim=1).to(self.spk_embed_affine_layer.weight.dtype))

    def prompt_condition(self, prompt_feat: Tensor, frames: int) -> Tensor:
        """Extend the prompt's mel (B, P, mel) -> (B, mel, frames): the prompt's frames, then zeros."""
        condition = prompt_feat.transpose(1, 2).to(
            self.spk_embed_affine_layer.weight.dtype
        )  # (B, P, mel) -> (B, mel, P)
        return F.pad(condition, (0, frames - condition.shape[2]))


class ConformerFlow(MelFlow[Estimator]):
    """A flow with the upsampling conformer encoder, which CosyVoice2's and Step-Audio2's have."""

    def __init__(self, config: ConformerFlowConfig, estimator: Estimator) -> None:
        super().__init__(config, config.encoder.width)
        self.encoder = UpsampleConformerEncoder(config.encoder)
        self.encoder_proj = nn.Linear(config.encoder.width, config.mel_bins)
        self.decoder = FlowMatching(estimator, config.guidance, config.time_grid)

    def encode_window(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """See `MelFlow.encode_window` and the encoder's `forward`."""
        h = self.encoder(self.input_embedding(tokens.clamp(min=0)), tokens >= 0, visible)
        return self.encoder_proj(h)
