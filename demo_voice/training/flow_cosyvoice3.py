"""Stage `flow_cosyvoice3`: CosyVoice3's flow, of mel up to 12 kHz.

Its chunks end at multiples of 25 tokens from the start of the prompt. A hop of several chunks attends to the chunks of
the prompt that are whole, and to 2 s before the hop.
"""

from itertools import repeat
from pathlib import Path

import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import FLOW_CHUNK_TOKENS, LOOKAHEAD_TOKENS, STREAM_CACHE_FRAMES, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow import CosyVoice3Flow, CosyVoice3FlowConfig, LookaheadConfig, RotaryDiTConfig
from cosyvoice_triton.networks.flow.checkpoint import with_rotary
from torch import Tensor

from demo_voice.training import flow
from demo_voice.training.dataset import SpeechDataset
from demo_voice.training.training import prepare, trained

CONFIG = CosyVoice3FlowConfig(
    encoder=LookaheadConfig(hidden=256),
    estimator=RotaryDiTConfig(width=160, depth=6, heads=5, head_dim=32, feed_forward=320, time_frequencies=64),
)
FILE = "flow_cosyvoice3.pt"
FIRST_HOPS = (1, 2, 3)  # chunks, of which the first may be the end of the prompt
LATER_HOPS = (1, 2, *repeat(4, 40))  # more than a crop has


def train(work: Path, seconds: float, device: str | torch.device) -> None:
    speech = SpeechDataset.load(work, prepare(device, seed=6))
    flow.fit(CosyVoice3Flow(CONFIG), view, work / FILE, speech, seconds, stacks.COSYVOICE3.mel_max_hz)


def view(batch: flow.Batch, streaming: bool) -> tuple[Tensor, Tensor, dict]:
    """See flow.View. The estimator attends to chunks, of prompt and recent frames."""
    ahead = batch.ahead
    B, T, _ = ahead.shape
    everything = torch.full((B, T), T, device=ahead.device)  # the encoder has no attention
    key = torch.arange(TOKEN_MEL_RATIO * T, device=ahead.device)
    if not streaming:
        return ahead, everything, {"valid": torch.ones_like(key, dtype=torch.bool).expand(B, 1, -1)}
    whole = (batch.prompt - LOOKAHEAD_TOKENS).clamp(min=0) // FLOW_CHUNK_TOKENS * FLOW_CHUNK_TOKENS
    after = torch.arange(T, device=ahead.device) - whole[:, None]
    hops = tuple(tuple(FLOW_CHUNK_TOKENS * chunks for chunks in (first, *LATER_HOPS)) for first in FIRST_HOPS)
    table = flow.hop_table(hops, T, ahead.device)[:, 0][torch.randint(len(FIRST_HOPS), (B,), device=ahead.device)]
    begin = torch.where(after < 0, 0, table.gather(1, after.clamp(min=0)) + whole[:, None])  # of each token's hop
    begin, whole = TOKEN_MEL_RATIO * begin.repeat_interleave(TOKEN_MEL_RATIO, 1), TOKEN_MEL_RATIO * whole
    recent = (key < whole[:, None, None]) | (key >= begin[:, :, None] - STREAM_CACHE_FRAMES)
    return ahead, everything, {"valid": recent, "streaming": True}


def export(work: Path, path: Path) -> None:
    """The trained network as an official `flow.pt`, float16 except for the rotary frequencies."""
    weights = {name: tensor.half() for name, tensor in trained(work / FILE).items()}
    torch.save(with_rotary(weights, CONFIG), path)
