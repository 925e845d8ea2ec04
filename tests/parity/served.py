"""The flows as token2wav serves them, on a fixture's device: windowed encoder, batched solve with its caches.

On a GPU this is the form with fused kernels and CUDA graphs.
"""

import copy
from typing import Any

import numpy as np
import torch
from cosyvoice_triton.constants import EULER_STEPS, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow.cache import KeyValues
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.networks.flow.unet import UNetFlow
from cosyvoice_triton.runtimes.loading import check_heads
from cosyvoice_triton.token2wav.flow.base import StreamingFlow
from cosyvoice_triton.token2wav.flow.cached_flow import CachedStreaming
from cosyvoice_triton.token2wav.flow.cosyvoice3_flow import CosyVoice3Streaming
from cosyvoice_triton.token2wav.flow.dit_flow import DiTStream, DiTStreaming
from cosyvoice_triton.token2wav.flow.kv_cache import PromptCaches
from cosyvoice_triton.token2wav.flow.unet_flow import UNetStreaming
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape
from cosyvoice_triton.token2wav.stream import Stream, VocoderState
from cosyvoice_triton.voice.prompt import Prompt
from torch import Tensor

from tests.parity.fixture import Fixture
from tests.parity.tracing import recorded

LIMITS = BatchLimits(max_streams=1)  # the fewest CUDA graphs
PROMPT_BYTES = 1 << 30


class ServedFlow:
    """A flow of `token2wav` and what passed inside it at the last call.

    mu: the encoder's output (1, T, mel): of `whole` and of a flow without caches with the prompt's, of others of what
    the estimator computed. mel: (1, mel, T), of `whole` with the prompt's.
    """

    mu: Tensor
    mel: Tensor

    def __init__(self, fixture: Fixture, network: CosyVoice3Flow | DiTFlow | UNetFlow, noise: Tensor) -> None:
        """noise: (1, mel, T) from the prompt's first frame on."""
        if (fixture.device.type, fixture.dtype) != ("cpu", torch.float32):
            network = copy.deepcopy(network).to(fixture.device, fixture.dtype)
        tape = NoiseTape(noise[0].T.contiguous().to(fixture.device))  # (1, C, T) -> (T, C)
        graphs = True
        try:
            check_heads(network)
        except ValueError:
            graphs = False  # heads of some fixtures are too small for the kernels, and are served by torch
        self.flow: StreamingFlow[Any]
        self.computed_by = "engine" if graphs or fixture.device.type == "cpu" else "engine, eager"
        options: dict[str, Any] = {"limits": LIMITS, "steps": EULER_STEPS, "graphs": graphs}
        if isinstance(network, UNetFlow):
            self.flow = UNetStreaming(network, tape, **options)
        else:
            # Upstream's flows forget nothing by themselves, also not the end of a prompt that a stream computes again.
            names = (name for name in ("in/prompt_token", "in/token") if name in fixture)
            frames = TOKEN_MEL_RATIO * sum(fixture[name].shape[-1] for name in names)
            kind: Any = DiTStreaming if isinstance(network, DiTFlow) else CosyVoice3Streaming
            self.flow = kind(network, tape, PromptCaches(PROMPT_BYTES), cache_frames=frames, **options)
            self.computed_by += f", cache_frames {frames}"
        fixture.computed_by = self.computed_by

    def open(self, prompt: Prompt) -> Stream:
        with recorded(self.flow._encoder, "encode") as encoded:
            stream = self.flow.open(prompt, VocoderState(0))
        if encoded:
            self.mu = encoded[-1][:, : len(prompt.mel)]
        return stream

    def chunk(self, stream: Stream, tokens: Tensor, *, final: bool, offset: int | None = None) -> Tensor:
        """The mel (80, T) that the tokens (n,) add."""
        chunk = self.flow.chunk(stream, tokens.numpy(), final=final, offset=offset)
        where = (self.flow, "_encode") if isinstance(self.flow, CachedStreaming) else (self.flow._encoder, "encode")
        with recorded(*where) as encoded:
            (mel,) = self.flow.render([chunk])
        self.mu = encoded[-1][:, : TOKEN_MEL_RATIO * chunk.computed]
        return mel.clone()

    def whole(self, prompt: Prompt, tokens: Tensor) -> Tensor:
        """The mel (80, T) of an utterance's tokens (n,)."""
        with recorded(self.flow._encoder, "encode") as encoded, recorded(self.flow._network, "solve") as solved:
            (mel,) = self.flow.whole([(prompt, tokens.numpy())])
        self.mel = solved[-1]
        self.mu = encoded[-1][:, : self.mel.shape[2]]
        return mel


def caches_of(served: ServedFlow, stream: Stream) -> tuple[KeyValues, Tensor]:
    """What upstream's caches hold after a DiT stream's last call: keys and values, the prompt's first,
    (steps, depth, 2, H, T, D), and the convolutions' history (steps, depth, convolution, 2, C, frame)."""
    assert isinstance(stream, DiTStream) and isinstance(served.flow, DiTStreaming)
    prompt, tail, pool = stream.prompt.attention, stream.cache, served.flow._pool
    attention = (
        torch.cat([of_prompt, ring[tail.slot, ..., : tail.frames, :]], dim=-2)
        for of_prompt, ring in ((prompt.keys, pool.keys), (prompt.values, pool.values))
    )
    return KeyValues(*attention), pool.history[tail.slot].transpose(-1, -2)


def prompt_of(tokens: Tensor, mel: Tensor, embedding: Tensor) -> Prompt:
    """tokens (P,), mel (T, 80) and embedding (D,) cut to whole tokens, as upstream's callers do."""
    length = min(len(tokens), len(mel) // TOKEN_MEL_RATIO)
    return Prompt(
        tokens=tokens[:length].numpy().astype(np.int64),
        mel=mel[: length * TOKEN_MEL_RATIO].numpy(),
        embedding=embedding.numpy(),
        text="",
    )
