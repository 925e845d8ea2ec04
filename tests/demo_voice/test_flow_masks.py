"""The attention masks in training equal the attention of streams in serving."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, MEL_BINS, SPEAKER_DIM, SPEECH_VOCAB, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow import (
    CosyVoice3Flow,
    CosyVoice3FlowConfig,
    DiTConfig,
    DiTFlow,
    DiTFlowConfig,
    EncoderConfig,
    LookaheadConfig,
    RotaryDiTConfig,
    UNetConfig,
    UNetFlow,
    UNetFlowConfig,
)
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.token2wav.flow.base import StreamingFlow
from cosyvoice_triton.token2wav.flow.kv_cache import PromptCaches
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import flow_noise
from cosyvoice_triton.token2wav.stream import VocoderState
from cosyvoice_triton.voice.prompt import Prompt

from demo_voice.training import flow, flow_cosyvoice3, flow_dit, flow_unet
from tests.support.streams import randomize
from tests.token2wav.conftest import FLOWS

ENCODER = EncoderConfig(width=16, heads=2, feed_forward=16, blocks=1, up_blocks=1)
LIMITS = BatchLimits(max_streams=1, chunk_boundary=25)
PROMPT, TARGET, STEPS = 51, 150, 2  # tokens; longer than the DiTs' attention window


@pytest.fixture
def batch() -> flow.Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SPEECH_VOCAB, (1, PROMPT + TARGET + LOOKAHEAD_TOKENS), generator=generator)
    tokens[:, -LOOKAHEAD_TOKENS:] = flow.ABSENT
    mel = torch.randn(1, MEL_BINS, TOKEN_MEL_RATIO * (PROMPT + TARGET), generator=generator)
    condition = mel.clone()
    condition[:, :, TOKEN_MEL_RATIO * PROMPT :] = 0
    return flow.Batch(tokens, mel, condition, torch.randn(1, SPEAKER_DIM, generator=generator), torch.tensor([PROMPT]))


@torch.no_grad()
def as_trained(network: flow.Flow, view: flow.View, batch: flow.Batch, streaming: bool) -> torch.Tensor:
    """The mel after the prompt, (80, T), with the masks of training."""
    ahead, visible, keywords = view(batch, streaming)
    mu = network.encode_window(ahead, visible).transpose(1, 2)
    both = {key: value.repeat(2, 1, 1) if isinstance(value, torch.Tensor) else value for key, value in keywords.items()}
    mel = network.decoder.solve(
        lambda _, *rows: network.decoder.estimator(*rows, **both),
        flow_noise().read(0, mu.shape[2]).T[None],
        mu,
        network.project_speaker(batch.embedding),
        batch.condition,
        STEPS,
    )
    return mel[0, :, TOKEN_MEL_RATIO * PROMPT :]


def prompt_of(batch: flow.Batch) -> Prompt:
    mel = batch.condition[0, :, : TOKEN_MEL_RATIO * PROMPT].T  # (C, T) -> (T, C)
    return Prompt(batch.tokens[0, :PROMPT].numpy(), mel.numpy(), batch.embedding[0].numpy(), text="")


def as_streamed(streaming: StreamingFlow, batch: flow.Batch, rules: HopRules) -> torch.Tensor:
    stream, schedule = streaming.open(prompt_of(batch), VocoderState(0)), rules.schedule(PROMPT)
    tokens = batch.tokens[0, PROMPT:-LOOKAHEAD_TOKENS].numpy()
    mels = []
    while (hop := schedule.next_hop(len(tokens), ended=True)) is not None:
        begin = 0 if streaming.cumulative else hop.offset
        mels += streaming.render([streaming.chunk(stream, tokens[begin : hop.end_of_context], final=hop.final)])
    return torch.cat(mels, dim=1)


def build(name: str) -> tuple[flow.Flow, StreamingFlow]:
    """A network of random weights, and its streaming form."""
    dit = {"width": 32, "depth": 2, "heads": 2, "head_dim": 16, "feed_forward": 32, "time_frequencies": 16}
    unet = UNetConfig(channels=16, heads=1, blocks=1, mid_stages=1)
    networks: dict[str, Callable[[], flow.Flow]] = {
        "dit": lambda: DiTFlow(DiTFlowConfig(encoder=ENCODER, estimator=DiTConfig(**dit))),
        "unet": lambda: UNetFlow(UNetFlowConfig(encoder=ENCODER, estimator=unet)),
        "cosyvoice3": lambda: CosyVoice3Flow(
            CosyVoice3FlowConfig(encoder=LookaheadConfig(hidden=16), estimator=RotaryDiTConfig(**dit))
        ),
    }
    network = networks[name]().eval().requires_grad_(False)
    torch.manual_seed(1)
    randomize(network)
    caches = () if name == "unet" else (PromptCaches(1 << 30),)
    return network, FLOWS[name](network, flow_noise(), *caches, limits=LIMITS, steps=STEPS)


@pytest.mark.parametrize(
    ("kind", "view", "rules"),
    [
        ("dit", flow_dit.view, HopRules(first_hop=15, max_hop=flow_dit.LARGEST_HOP)),
        ("unet", flow_unet.view, HopRules(boundary=25)),
        ("cosyvoice3", flow_cosyvoice3.view, HopRules(boundary=25)),
    ],
)
def test_training_uses_the_attention_of_streams_and_of_whole_utterances(batch, kind, view, rules, monkeypatch) -> None:
    monkeypatch.setattr(flow_dit, "FIRST_HOPS", (15,))
    monkeypatch.setattr(flow_cosyvoice3, "FIRST_HOPS", (2,))
    network, streaming = build(kind)
    tokens = batch.tokens[0, PROMPT:-LOOKAHEAD_TOKENS].numpy().astype(np.int64)
    (whole,) = streaming.whole([(prompt_of(batch), tokens)])
    for served, streamed in ((whole, False), (as_streamed(streaming, batch, rules), True)):
        torch.testing.assert_close(as_trained(network, view, batch, streaming=streamed), served, atol=2e-4, rtol=0)
