"""The flow of Step-Audio2: chunk by chunk from a prompt cache, or a whole utterance at once."""

import torch
from torch import Tensor

from common.constants import EULER_STEPS
from common.flow.base import MelFlow
from common.flow.cache import DiTFlowCache
from common.flow.config import DiTFlowConfig
from common.flow.dit import DiTEstimator
from common.flow.layers import valid_frames


class DiTFlow(MelFlow[DiTEstimator]):
    def __init__(self, config: DiTFlowConfig) -> None:
        super().__init__(config, DiTEstimator(config.estimator))
        self.config = config

    @torch.no_grad()
    def setup_cache(
        self,
        prompt_token: Tensor,
        prompt_feat: Tensor,
        embedding: Tensor,
        *,
        noise: Tensor,
        steps: int = EULER_STEPS,
    ) -> DiTFlowCache:
        """The state of a stream that has heard its prompt; streams of one voice may all start from it.

        prompt_token (B, P), prompt_feat (B, 2P, mel), embedding (B, speaker_dim), noise (1 or B, mel, >= 2P). The
        prompt's look-ahead are its own first tokens again, as the network has always been served.
        """
        B, frames = prompt_token.shape[0], prompt_feat.shape[1]
        cache = DiTFlowCache(
            encoder=self.encoder.empty_cache(B),
            estimator=self.decoder.estimator.empty_cache(steps, rows=2 * B),
            speaker=self.project_speaker(embedding),
            prompt_frames=frames,
            frames=0,
        )
        token = torch.cat([prompt_token, prompt_token[:, : self.config.encoder.lookahead]], dim=1)
        condition = self.prompt_condition(prompt_feat, frames)
        _, cache = self._advance(token, cache, condition, last=False, noise=noise[:, :, :frames])
        return cache

    @torch.no_grad()
    def inference_chunk(
        self, token: Tensor, cache: DiTFlowCache, *, last: bool, noise: Tensor
    ) -> tuple[Tensor, DiTFlowCache]:
        """The stream's next mel: token (B, n + 3), or (B, n) if `last`, noise (1 or B, mel, 2n) -> (B, mel, 2n).

        The 3 look-ahead tokens are sent again at the head of the next chunk. Noise is the caller's, taken at the
        absolute frame `cache.frames`, so that a stream does not depend on how it was cut.
        """
        lookahead = 0 if last else self.config.encoder.lookahead
        frames = (token.shape[1] - lookahead) * self.config.encoder.ratio
        condition = torch.zeros_like(cache.speaker)[:, :, None].expand(-1, -1, frames)
        return self._advance(token, cache, condition, last, noise)

    @torch.no_grad()
    def inference(
        self,
        token: Tensor,
        token_len: Tensor,
        prompt_feat: Tensor,
        prompt_feat_len: Tensor,
        embedding: Tensor,
        *,
        noise: Tensor,
        steps: int = EULER_STEPS,
    ) -> Tensor:
        """Whole utterances: token (B, N) with the prompt's at the head -> mel (B, mel, 2N), the prompt's included.

        Rows may be padded: token_len (B,), prompt_feat (B, P, mel) with prompt_feat_len (B,); noise (1 or B, mel, 2N).
        """
        valid = valid_frames(token_len, token.shape[1]).transpose(1, 2)  # (B, 1, N) -> (B, N, 1)
        h, valid = self.encoder(self.input_embedding(token) * valid, token_len)
        mu = self.encoder_proj(h).transpose(1, 2)  # (B, 2N, mel) -> (B, mel, 2N)
        prompt_feat = prompt_feat * valid_frames(prompt_feat_len, prompt_feat.shape[1]).transpose(1, 2)
        return self.solve(mu, valid, prompt_feat, embedding, noise=noise, steps=steps)

    def _advance(
        self, token: Tensor, cache: DiTFlowCache, condition: Tensor, last: bool, noise: Tensor
    ) -> tuple[Tensor, DiTFlowCache]:
        h, encoder = self.encoder.forward_chunk(self.input_embedding(token), cache.encoder, last)
        mu = self.encoder_proj(h).transpose(1, 2)  # (B, T, mel) -> (B, mel, T)
        frames = mu.shape[2]
        step_caches = cache.estimator.with_room(frames)

        def velocity(step: int, x: Tensor, t: Tensor, mu: Tensor, speaker: Tensor, condition: Tensor) -> Tensor:
            return self.decoder.estimator.forward_chunk(x, t, mu, speaker, condition, step_caches[step])

        mel = self.decoder.solve(velocity, noise, mu, cache.speaker, condition, steps=step_caches.conv.shape[0])
        advanced = DiTFlowCache(encoder, step_caches, cache.speaker, cache.prompt_frames, cache.frames + frames)
        return mel, advanced
