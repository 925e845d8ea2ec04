"""Stage `flow_unet`: CosyVoice2's flow. Its chunks end at multiples of 25 tokens from the start of the prompt."""

from pathlib import Path

import torch
from cosyvoice_triton.constants import FLOW_CHUNK_TOKENS, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow import EncoderConfig, UNetConfig, UNetFlow, UNetFlowConfig
from cosyvoice_triton.networks.flow.layers import valid_frames
from torch import Tensor

from demo_voice.training import flow
from demo_voice.training.dataset import SpeechDataset
from demo_voice.training.training import prepare

CONFIG = UNetFlowConfig(
    encoder=EncoderConfig(width=96, heads=2, feed_forward=192, blocks=3, up_blocks=2),
    estimator=UNetConfig(channels=128, heads=2, blocks=1, mid_stages=3),
)
FILE = "flow_unet.pt"


def train(work: Path, seconds: float, device: str | torch.device) -> None:
    speech = SpeechDataset.load(work, prepare(device, seed=2))
    flow.fit(UNetFlow(CONFIG), view, work / FILE, speech, seconds)


def view(batch: flow.Batch, streaming: bool) -> tuple[Tensor, Tensor, dict]:
    """See flow.View. Encoder and estimator have the same chunks."""
    ahead = batch.ahead
    B, T, _ = ahead.shape
    token = torch.arange(T, device=ahead.device)
    ends = (
        ((token // FLOW_CHUNK_TOKENS + 1) * FLOW_CHUNK_TOKENS).clamp(max=T) if streaming else torch.full_like(token, T)
    )
    frames = TOKEN_MEL_RATIO * T
    valid = valid_frames(torch.full((B,), frames, device=ahead.device), frames)
    return ahead, ends.expand(B, T), {"valid": valid, "streaming": streaming}
