"""Step-Audio2's flow as upstream runs it: chunk by chunk from a prompt cache, or a whole utterance at once."""

from dataclasses import dataclass, replace

import torch
from cosyvoice_triton.constants import EULER_STEPS
from cosyvoice_triton.networks.flow.cache import EstimatorCache, KeyValues
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.networks.flow.layers import valid_frames
from torch import Tensor

from tests.parity.reference.encoder import EncoderStream, encode_whole


@dataclass(frozen=True)
class DiTFlowCache:
    """Everything a stream carries from chunk to chunk. The functions below return a new one and change none."""

    encoder: EncoderStream
    estimator: EstimatorCache
    speaker: Tensor  # (B, mel): projected x-vector
    prompt_frames: int

    def trimmed(self, tail_frames: int) -> "DiTFlowCache":
        """The estimator's keys and values of the prompt and of the `tail_frames` most recent frames only.

        The encoder keeps everything: its relative positions count from the start of the stream.
        """
        attention = self.estimator.attention
        if attention.frames <= self.prompt_frames + tail_frames:
            return self
        kept = (
            torch.cat([x[..., : self.prompt_frames, :], x[..., x.shape[-2] - tail_frames :, :]], dim=-2)
            for x in (attention.keys, attention.values)
        )
        return replace(self, estimator=replace(self.estimator, attention=KeyValues(*kept)))


@torch.no_grad()
def prefill(
    flow: DiTFlow,
    prompt_token: Tensor,
    prompt_feat: Tensor,
    embedding: Tensor,
    *,
    noise: Tensor,
    steps: int = EULER_STEPS,
) -> DiTFlowCache:
    """The prompt cache of a voice (upstream's `setup_cache`), from which any number of its streams may start.

    prompt_token (B, P), prompt_feat (B, 2P, mel), embedding (B, speaker_dim), noise (1 or B, mel, >= 2P). The
    look-ahead after the prompt's last tokens is its own first tokens, as in upstream. Without a prompt (P = 0), which
    upstream's function cannot run, the caches are those of a stream that begins.
    """
    B, frames = prompt_token.shape[0], prompt_feat.shape[1]
    cache = DiTFlowCache(
        encoder=EncoderStream(flow.encoder),
        estimator=flow.decoder.estimator.empty_cache(steps, rows=flow.decoder.rows * B),
        speaker=flow.project_speaker(embedding),
        prompt_frames=frames,
    )
    if frames == 0:
        return cache
    token = torch.cat([prompt_token, prompt_token[:, : flow.config.encoder.lookahead]], dim=1)
    condition = flow.prompt_condition(prompt_feat, frames)
    _, cache = _advance(flow, token, cache, condition, final=False, noise=noise[:, :, :frames])
    return cache


@torch.no_grad()
def inference_chunk(
    flow: DiTFlow, token: Tensor, cache: DiTFlowCache, *, final: bool, noise: Tensor
) -> tuple[Tensor, DiTFlowCache]:
    """The stream's next mel: token (B, n + 3), or (B, n) if `final`, noise (1 or B, mel, 2n) -> (B, mel, 2n), cache.

    The 3 look-ahead tokens are passed again as the first tokens of the next chunk.
    """
    lookahead = 0 if final else flow.config.encoder.lookahead
    frames = (token.shape[1] - lookahead) * flow.config.encoder.ratio
    condition = torch.zeros_like(cache.speaker)[:, :, None].expand(-1, -1, frames)
    return _advance(flow, token, cache, condition, final, noise)


@torch.no_grad()
def inference(
    flow: DiTFlow,
    token: Tensor,
    token_len: Tensor,
    prompt_feat: Tensor,
    prompt_feat_len: Tensor,
    embedding: Tensor,
    *,
    noise: Tensor,
    steps: int = EULER_STEPS,
) -> Tensor:
    """Whole utterances: token (B, N), the prompt's tokens first -> mel (B, mel, 2N), the prompt's included.

    Rows may be padded: token_len (B,), prompt_feat (B, P, mel) with prompt_feat_len (B,); noise (1 or B, mel, 2N).
    """
    valid = valid_frames(token_len, token.shape[1]).transpose(1, 2)  # (B, 1, N) -> (B, N, 1)
    h, valid = encode_whole(flow.encoder, flow.input_embedding(token) * valid, token_len)
    mu = flow.encoder_proj(h).transpose(1, 2)  # (B, 2N, mel) -> (B, mel, 2N)
    prompt_feat = prompt_feat * valid_frames(prompt_feat_len, prompt_feat.shape[1]).transpose(1, 2)
    return flow.solve(mu, valid, prompt_feat, embedding, noise=noise, steps=steps)


def _advance(
    flow: DiTFlow, token: Tensor, cache: DiTFlowCache, condition: Tensor, final: bool, noise: Tensor
) -> tuple[Tensor, DiTFlowCache]:
    encoder, frames = cache.encoder.then(flow.input_embedding(token), final), noise.shape[2]
    mu = flow.encoder_proj(encoder.features()[:, -frames:]).transpose(1, 2)  # (B, T, mel) -> (B, mel, T)
    step_caches = cache.estimator.with_room(frames)

    def velocity(step: int, x: Tensor, t: Tensor, mu: Tensor, speaker: Tensor, condition: Tensor) -> Tensor:
        return flow.decoder.estimator.forward_chunk(x, t, mu, speaker, condition, step_caches[step])

    mel = flow.decoder.solve(velocity, noise, mu, cache.speaker, condition, steps=step_caches.conv.shape[0])
    return mel, DiTFlowCache(encoder, step_caches, cache.speaker, cache.prompt_frames)
