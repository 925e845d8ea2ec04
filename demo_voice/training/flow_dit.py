"""Stage `flow_dit`: Step-Audio2's flow. Its streams may be divided anywhere and attend to the prompt and 2 s."""

from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import torch
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, STREAM_CACHE_FRAMES, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow import DiTConfig, DiTFlow, DiTFlowConfig, EncoderConfig
from cosyvoice_triton.networks.flow.dit import DiTEstimator
from torch import Tensor

from demo_voice.training import flow
from demo_voice.training.dataset import SpeechDataset
from demo_voice.training.training import prepare

CONFIG = DiTFlowConfig(
    encoder=EncoderConfig(width=96, heads=2, feed_forward=192, blocks=3, up_blocks=2),
    estimator=DiTConfig(width=192, depth=6, heads=6, head_dim=32, feed_forward=448, time_frequencies=64),
)
FILE = "flow_dit.pt"
FIRST_HOPS = (15, 20, 25, 50, 100)  # tokens; later hops double
LARGEST_HOP = 100


def train(work: Path, seconds: float, device: str | torch.device) -> None:
    speech = SpeechDataset.load(work, prepare(device, seed=1))
    network = DiTFlow(CONFIG)
    zero_modulation(network.decoder.estimator)
    flow.fit(network, view, work / FILE, speech, seconds)


def zero_modulation(estimator: DiTEstimator) -> None:
    """adaLN-Zero: gates start at zero, so that every block starts as the identity."""
    for block in (*estimator.blocks, estimator.final_layer):
        torch.nn.init.zeros_(block.adaLN_modulation[1].weight)
        torch.nn.init.zeros_(block.adaLN_modulation[1].bias)


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
    tables = _tables(FIRST_HOPS, tokens, device)
    table = tables[torch.randint(len(FIRST_HOPS), (len(prompt),), device=device)]  # (B, 2, tokens)
    after = torch.arange(tokens, device=device) - prompt[:, None]
    index = after.clamp(min=0)[:, None].expand(-1, 2, -1)
    begins, ends = (table.gather(2, index) + prompt[:, None, None]).clamp(max=tokens).unbind(1)
    return torch.where(after < 0, 0, begins), torch.where(after < 0, prompt[:, None], ends)


@lru_cache
def _tables(first_hops: tuple[int, ...], tokens: int, device: torch.device) -> Tensor:
    """(first hops, 2, tokens): begin and end of the chunk of every token of a stream."""
    return torch.tensor([_boundaries(first, tokens) for first in first_hops], device=device)


def _boundaries(first: int, tokens: int) -> tuple[list[int], list[int]]:
    """Begin and end of the chunk of every token of a stream whose hops start at `first` and double."""
    hops = [min(first << chunk, LARGEST_HOP) for chunk in range(tokens // first + 1)]
    ends = list(accumulate(hops))
    of_token = [chunk for chunk, hop in enumerate(hops) for _ in range(hop)][:tokens]
    return [ends[chunk] - hops[chunk] for chunk in of_token], [ends[chunk] for chunk in of_token]
