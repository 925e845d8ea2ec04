"""The flow of CosyVoice2: a stateless network that recomputes a stream from its start for each chunk."""

import torch
from torch import Tensor

from common.constants import EULER_STEPS
from common.flow.base import MelFlow
from common.flow.config import UNetFlowConfig
from common.flow.layers import valid_frames
from common.flow.unet import UNetEstimator


class UNetFlow(MelFlow[UNetEstimator]):
    def __init__(self, config: UNetFlowConfig) -> None:
        super().__init__(config, UNetEstimator(config.estimator))
        self.config = config

    @torch.no_grad()
    def inference(
        self,
        token: Tensor,
        prompt_token: Tensor,
        prompt_feat: Tensor,
        embedding: Tensor,
        *,
        noise: Tensor,
        streaming: bool,
        finalize: bool,
        steps: int = EULER_STEPS,
    ) -> Tensor:
        """Mel of the target tokens.

        token (B, N), prompt_token (B, P), prompt_feat (B, 2P, mel), embedding (B, speaker_dim), noise (1 or B, mel,
        at least as many frames as prompt and target) -> mel (B, mel, 2N), or (B, mel, 2 (N - 3)) unless `finalize`,
        when the last 3 tokens are look-ahead only. `streaming` limits attention to 25-token chunks and all to their
        left, counted from the prompt's start: what is computed up to a chunk's end does not change with later tokens.
        """
        mu = self.encode(torch.cat([prompt_token, token], dim=1), streaming=streaming, finalize=finalize)
        B, _, T = mu.shape
        valid = valid_frames(torch.full((B,), T, device=mu.device), T)
        noise = noise[:, :, :T]
        mel = self.solve(mu, valid, prompt_feat, embedding, noise=noise, steps=steps, streaming=streaming)
        return mel[:, :, prompt_feat.shape[1] :]

    def encode(self, token: Tensor, *, streaming: bool, finalize: bool) -> Tensor:
        """Prompt and target tokens (B, T) -> encoder output (B, mel, 2T), or 6 frames less unless `finalize`."""
        x = self.input_embedding(token)
        context = None
        if not finalize:
            lookahead = self.config.encoder.lookahead
            x, context = x[:, :-lookahead], x[:, -lookahead:]
        lengths = torch.full((x.shape[0],), x.shape[1], device=x.device)
        h, _ = self.encoder(x, lengths, context, streaming)
        return self.encoder_proj(h).transpose(1, 2)  # (B, T, mel) -> (B, mel, T)
