"""Stage `flow_dit`: Step-Audio2's flow. Its streams may be divided anywhere and attend to the prompt and 2 s."""

from pathlib import Path

import torch
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, STREAM_CACHE_FRAMES, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow import DiTConfig, DiTFlow, DiTFlowConfig, EncoderConfig
from torch import Tensor

from demo_voice.training import flow
from demo_voice.training.dataset import SpeechDataset
from demo_voice.training.training import prepare

CONFIG = DiTFlowConfig(
    encoder=EncoderConfig(width=96, heads=2, feed_forward=192, blocks=3, up_blocks=2),
    estimator=DiTConfig(width=192, depth=6, heads=6, head_dim=32, feed_forward=448, time_frequencies=64),
)
FILE = "flow_dit.pt"
FIRST_HOPS = (10, 15, 25, 50, 100)  # tokens, those of serving among them; later hops double
LARGEST_HOP = 100


def train(work: Path, seconds: float, device: str | torch.device) -> None:
    speech = SpeechDataset.load(work, prepare(device, seed=1))
    flow.fit(DiTFlow(CONFIG), view, work / FILE, speech, seconds)


def view(batch: flow.Batch, streaming: bool) -> tuple[Tensor, Tensor, dict]:
    """See flow.View. The encoder attends to all up to a chunk's end, the estimator to prompt and recent frames."""
    ahead = batch.ahead
    B, T, _ = ahead.shape
    device = ahead.device
    if not streaming:
        everything = torch.full((B, T), T, device=device)
        return ahead, everything, {"valid": torch.ones(B, 1, TOKEN_MEL_RATIO * T, dtype=torch.bool, device=device)}
    prompt = batch.prompt[:, None]
    begins, ends = chunks(batch.prompt, T)
    # The prompt is encoded on its own, before its streams: the tokens ahead of its last ones are its first ones.
    position = torch.arange(T, device=device)[:, None] + torch.arange(1 + LOOKAHEAD_TOKENS, device=device)
    wrapped = (position % prompt[:, :, None].clamp(min=1)).flatten(1)  # (B, T * (1 + look-ahead))
    of_prompt = batch.tokens.gather(1, wrapped).view_as(ahead)
    ahead = torch.where((position[None, :, :1] < prompt[:, :, None]), of_prompt, ahead)

    key = torch.arange(TOKEN_MEL_RATIO * T, device=device)
    begin, end = (x.repeat_interleave(TOKEN_MEL_RATIO, 1)[:, :, None] * TOKEN_MEL_RATIO for x in (begins, ends))
    recent = (key < TOKEN_MEL_RATIO * prompt[:, :, None]) | (key >= begin - STREAM_CACHE_FRAMES)
    return ahead, ends, {"valid": recent & (key < end)}  # one row per query instead of one for all


def chunks(prompt: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Begin and end of the chunk of each token, (B, tokens) each, in streams after prompts of (B,) tokens.

    The prompt is one chunk; the first hop of each stream is random.
    """
    device = prompt.device
    hops = tuple(tuple(min(first << hop, LARGEST_HOP) for hop in range(tokens // first + 1)) for first in FIRST_HOPS)
    table = flow.hop_table(hops, tokens, device)[torch.randint(len(FIRST_HOPS), (len(prompt),), device=device)]
    after = torch.arange(tokens, device=device) - prompt[:, None]
    index = after.clamp(min=0)[:, None].expand(-1, 2, -1)
    begins, ends = (table.gather(2, index) + prompt[:, None, None]).clamp(max=tokens).unbind(1)
    return torch.where(after < 0, 0, begins), torch.where(after < 0, prompt[:, None], ends)
