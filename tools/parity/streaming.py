"""The streaming loops: our engine compared with upstream's, chunk by chunk.

Upstream's loops have three errors that our engine does not: the DiT loop trims its cache as if the newest frames came
last, and then reuses noise; the UNet loop renders its final chunk without the streaming mask; both begin the vocoder's
source anew in every chunk. Our flows are compared up to the chunk where one of the first two (or a fixture's own
trimming) takes effect, our vocoder in the first chunk; what comes later is computed by `reference` with upstream's
rules.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.constants import LOOKAHEAD_TOKENS, OVERLAP_SAMPLES, TOKEN_MEL_RATIO
from common.flow.cache import KeyValues
from common.flow.config import FlowConfig
from common.flow.dit import DiTFlow
from common.flow.unet import UNetFlow
from common.token2wav.dit.memory import PromptCaches
from common.token2wav.dit.streaming import DiTStreaming
from common.token2wav.hift.streaming import StreamingVocoder
from common.token2wav.limits import BatchLimits
from common.token2wav.noise import NoiseTape
from common.token2wav.stream import Chunk, Stream, VocoderState
from common.token2wav.unet.streaming import UNetStreaming
from common.voice.prompt import Prompt
from tools.parity import flow_dit, flow_unet, hift
from tools.parity.fixture import Check, Fixture
from tools.parity.reference import dit_flow, unet_flow
from tools.parity.reference.vocoder import ReferenceVocoder, hamming_window
from tools.parity.tracing import steps_of

Outputs = Iterator[tuple[str, Tensor]]
LIMITS = BatchLimits(max_streams=2)


class _Vocoder:
    """Our vocoder in the first chunk, upstream's after it, with the fixture's noise, which every chunk reads anew."""

    def __init__(self, fixture: Fixture) -> None:
        network = hift.build(fixture, _file(fixture, "hift"))
        noise = NoiseTape(fixture["in/noise_table"])
        self._served = StreamingVocoder(network, noise, limits=LIMITS)
        self._stream = Stream(vocoder=self._served.open())
        self.reference = ReferenceVocoder(
            network, hamming_window(OVERLAP_SAMPLES), lambda _, samples: noise.read(0, samples)
        )

    def step(self, mel: Tensor, final: bool) -> Tensor:
        """The audio (N,) of the next mel frames (80, T)."""
        speech = self.reference.step(mel, final)
        state = self._stream.vocoder
        if not state.begun:
            (served,) = self._served.step([Chunk(self._stream, np.zeros(0, np.int64), final, 0, 0, 0)], [mel])
            assert isinstance(served, Tensor), served
            speech = served
            self.reference.speech = self._served.pool.speech[state.slot]
        return speech


def _file(fixture: Fixture, part: str) -> str:
    """The weights file of the fixture whose network has this part."""
    for name in fixture.meta["weights_files"]:
        if part in fixture.weights_meta(name)["config"]:
            return name
    raise ValueError(f"{fixture.name}: none of {fixture.meta['weights_files']} describes a {part!r}")


def _served(config: FlowConfig) -> bool:
    """Whether our engine serves networks with this look-ahead; others are computed by `reference` throughout."""
    return config.encoder.lookahead == LOOKAHEAD_TOKENS


def _flow_noise(fixture: Fixture) -> NoiseTape:
    return NoiseTape(fixture["in/rand_noise"][0].T)  # (1, C, T) -> (T, C)


def _prompt(fixture: Fixture, mel: str) -> Prompt:
    """The prompt cut to whole tokens, as both loops do before they start."""
    tokens, frames = fixture["in/prompt_token"].reshape(-1), fixture[mel][0]
    length = min(len(tokens), len(frames) // TOKEN_MEL_RATIO)
    return Prompt(
        tokens=tokens[:length].numpy(),
        mel=frames[: length * TOKEN_MEL_RATIO].numpy(),
        embedding=fixture["in/embedding"][0].numpy(),
        text="",
    )


def _tokens(fixture: Fixture, call: dict[str, Any]) -> np.ndarray:
    first, end = call["token"]
    return fixture["in/token"].reshape(-1)[first:end].numpy()


def _where_stored(fixture: Fixture, results: dict[str, Tensor]) -> Outputs:
    yield from ((key, result) for key, result in results.items() if key in fixture)


def check_dit(fixture: Fixture) -> Outputs:
    """token2wav_dit: chunks are the engine's until it or upstream starts from a trimmed cache."""
    network: DiTFlow = flow_dit.build(fixture, _file(fixture, "dit"))
    vocoder = _Vocoder(fixture)
    noise = _flow_noise(fixture)
    prompt = _prompt(fixture, "in/prompt_mel")
    steps = steps_of(fixture)
    flow = DiTStreaming(network, noise, PromptCaches(1 << 30), limits=LIMITS, steps=steps)
    ours, upstream = flow.open(prompt, VocoderState(0)), _UpstreamDiT(network, noise, prompt, steps)
    same_rules = _served(network.config)
    for call in fixture.meta["calls"]:
        tag, tokens, last = call["tag"], _tokens(fixture, call), call["last_chunk"]
        mel = upstream.step(tokens, last, call.get("flow_cache_frames_after_trim"))
        if same_rules:
            (mel,) = flow.render([flow.chunk(ours, tokens, final=last)])
            same_rules = upstream.cache.estimator.attention.frames == upstream.cache.frames and ours.complete
        yield f"out/{tag}/speech", vocoder.step(mel, last)[None]
        yield from _where_stored(
            fixture,
            {
                f"out/{tag}/cache_source": vocoder.reference.source[None, None],
                f"out/{tag}/cache_speech": vocoder.reference.speech[None],
                f"mid/{tag}/mel": mel[None],
            },
        )


class _UpstreamDiT:
    """The flow with upstream's caller: newest frames first, trimmed at both ends, noise from the cache's length on."""

    def __init__(self, network: DiTFlow, noise: NoiseTape, prompt: Prompt, steps: int) -> None:
        self._network = network
        self._noise = noise
        self.cache = dit_flow.prefill(
            network,
            torch.from_numpy(prompt.tokens)[None],
            torch.from_numpy(prompt.mel)[None],
            torch.from_numpy(prompt.embedding)[None],
            noise=noise.read(0, len(prompt.mel)).T[None],  # (T, C) -> (1, C, T)
            steps=steps,
        )
        self._prompt_frames = len(prompt.mel)

    def step(self, tokens: np.ndarray, last: bool, keep: int | None) -> Tensor:
        cached = self.cache.estimator.attention.frames
        lookahead = 0 if last else self._network.config.encoder.lookahead
        frames = (len(tokens) - lookahead) * self._network.config.encoder.ratio
        noise = self._noise.read(cached, frames).T[None]  # (T, C) -> (1, C, T)
        mel, cache = dit_flow.inference_chunk(
            self._network, torch.from_numpy(tokens)[None], self.cache, final=last, noise=noise
        )
        attention = cache.estimator.attention
        newest_first = KeyValues(*(_newest_first(x, cached) for x in (attention.keys, attention.values)))
        if keep is not None:
            newest_first = dit_flow.trimmed(newest_first, self._prompt_frames, keep - self._prompt_frames)
        self.cache = replace(cache, estimator=replace(cache.estimator, attention=newest_first))
        return mel[0]


def _newest_first(x: Tensor, cached: int) -> Tensor:
    """(..., T, D) with the new frames after the cached ones -> before them. Attention has no positions."""
    return torch.cat([x[..., cached:, :], x[..., :cached, :]], dim=-2)


def check_unet(fixture: Fixture) -> Outputs:
    """token2wav: chunks are the engine's until upstream renders one without the streaming mask."""
    network: UNetFlow = flow_unet.build(fixture, _file(fixture, "estimator"))
    vocoder = _Vocoder(fixture)
    noise = _flow_noise(fixture)
    prompt = _prompt(fixture, "in/prompt_feat")
    steps = steps_of(fixture)
    flow = UNetStreaming(network, noise, limits=LIMITS, steps=steps)
    ours = flow.open(prompt, VocoderState(0))
    same_rules = _served(network.config)
    for call in fixture.meta["calls"]:
        tag, tokens, offset, last = call["tag"], _tokens(fixture, call), call["token_offset"], call["finalize"]
        mel = unet_flow.inference(
            network,
            torch.from_numpy(tokens)[None],
            torch.from_numpy(prompt.tokens)[None],
            torch.from_numpy(prompt.mel)[None],
            torch.from_numpy(prompt.embedding)[None],
            noise=fixture["in/rand_noise"],
            streaming=call["stream"],
            final=last,
            steps=steps,
        )[0, :, offset * network.config.encoder.ratio :]
        same_rules = same_rules and call["stream"]
        if same_rules:
            (mel,) = flow.render([flow.chunk(ours, tokens, final=last, offset=offset)])
        rendered = torch.cat([vocoder.reference.mel, mel], dim=1)
        yield f"out/{tag}/speech", vocoder.step(mel, last)[None]
        yield from _where_stored(fixture, {f"mid/{tag}/vocoder_mel": rendered[None]})


CHECKS: dict[str, Check] = {
    "item8b_dit_streaming_token2wav": check_dit,
    "item8c_cosyvoice2_streaming_token2wav": check_unet,
}
