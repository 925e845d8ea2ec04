"""CosyVoice2's and CosyVoice3's flows as upstream runs them: without state, every chunk of a stream rendered from the
stream's start."""

import torch
from cosyvoice_triton.constants import EULER_STEPS
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow
from cosyvoice_triton.networks.flow.layers import valid_frames
from cosyvoice_triton.networks.flow.unet import UNetFlow
from cosyvoice_triton.token2wav.flow.encoder_window import with_ahead
from torch import Tensor


@torch.no_grad()
def inference(
    flow: UNetFlow | CosyVoice3Flow,
    token: Tensor,
    prompt_token: Tensor,
    prompt_feat: Tensor,
    embedding: Tensor,
    *,
    noise: Tensor,
    streaming: bool,
    final: bool,
    steps: int = EULER_STEPS,
    seen: Tensor | None = None,
) -> Tensor:
    """Mel of the target tokens.

    token (B, N), prompt_token (B, P), prompt_feat (B, 2P, mel), embedding (B, speaker_dim), noise (1 or B, mel, at
    least as many frames as prompt and target) -> mel (B, mel, 2N), or (B, mel, 2 (N - 3)) unless `final`, since the
    last 3 tokens are then look-ahead only. `streaming` limits attention to 25-token chunks and all before them, counted
    from the prompt's start: what is computed up to the end of a chunk does not change with later tokens. `seen`
    (1, T, T) is the frames that each frame attends to instead.
    """
    mu = encode(flow, torch.cat([prompt_token, token], dim=1), streaming=streaming, final=final)
    B, _, T = mu.shape
    rows, estimator = flow.decoder.rows * B, flow.decoder.estimator
    valid = valid_frames(torch.full((rows,), T, device=mu.device), T) if seen is None else seen.expand(rows, -1, -1)
    mel = flow.decoder.solve(
        lambda _, *inputs: estimator(*inputs, valid=valid, streaming=streaming and seen is None),
        noise[:, :, :T],
        mu,
        flow.project_speaker(embedding),
        flow.prompt_condition(prompt_feat, T),
        steps,
    )
    return mel[:, :, prompt_feat.shape[1] :]


def encode(flow: UNetFlow | CosyVoice3Flow, token: Tensor, *, streaming: bool, final: bool) -> Tensor:
    """Prompt and target tokens (B, T) -> encoder output (B, mel, 2T), or 6 frames less unless `final`."""
    config = flow.config.encoder
    length = token.shape[1] - (0 if final else config.lookahead)
    windows = torch.stack([torch.tensor(with_ahead(row.cpu().numpy(), length)) for row in token]).to(token.device)
    visible = torch.full((length,), length)
    if streaming:
        visible = ((torch.arange(length) // config.chunk_tokens + 1) * config.chunk_tokens).clamp(max=length)
    visible = visible.to(token.device).expand(len(token), length)
    return flow.encode_window(windows, visible).transpose(1, 2)  # (B, T, mel) -> (B, mel, T)
