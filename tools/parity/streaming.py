"""The streaming loops: our engine compared with upstream's, chunk by chunk.

Upstream's loops have two errors that our engine does not: the DiT loop trims its cache as if the newest frames came
last, and then reuses noise; the UNet loop renders its final chunk without the streaming mask. Our engine is compared up
to the chunk where one of these (or a fixture's own trimming) takes effect; later chunks are computed by `reference`
with upstream's rules.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.constants import LOOKAHEAD_TOKENS, TOKEN_MEL_RATIO
from common.flow.cache import KeyValues
from common.flow.config import FlowConfig
from common.flow.dit import DiTFlow
from common.flow.unet import UNetFlow
from common.token2wav.dit.memory import DiTStream, PromptCaches
from common.token2wav.dit.streaming import DiTStreaming
from common.token2wav.engine import Token2Wav
from common.token2wav.hift.overlap import raw_hamming_window
from common.token2wav.hift.streaming import StreamingVocoder
from common.token2wav.limits import BatchLimits
from common.token2wav.noise import NoiseTape
from common.token2wav.stream import Chunk, Stream
from common.token2wav.unet.streaming import UNetStreaming
from common.voice.prompt import Prompt
from tools.parity import flow_dit, flow_unet, hift
from tools.parity.fixture import Check, Fixture
from tools.parity.reference import dit_flow, unet_flow
from tools.parity.tracing import steps_of

Outputs = Iterator[tuple[str, Tensor]]
LIMITS = BatchLimits(max_streams=2)


class RestartingTape(NoiseTape):
    """Noise that starts at row 0 of the table in every call, as in upstream's fixture."""

    def at(self, index: Tensor) -> Tensor:
        return super().at(index - index[..., :1])


def _vocoder(fixture: Fixture) -> StreamingVocoder:
    """The vocoder with upstream's window, whose halves add up to 1.08, and the fixture's noise."""
    network = hift.build(fixture, _file(fixture, "hift"))
    noise = RestartingTape(fixture["in/noise_table"])
    return StreamingVocoder(network, noise, raw_hamming_window(), limits=LIMITS)


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
    vocoder = _vocoder(fixture)
    noise = _flow_noise(fixture)
    prompt = _prompt(fixture, "in/prompt_mel")
    steps = steps_of(fixture)
    engine = Token2Wav(DiTStreaming(network, noise, PromptCaches(1 << 30), limits=LIMITS, steps=steps), vocoder)
    ours, upstream = engine.open(prompt), _UpstreamDiT(network, noise, prompt, steps)
    theirs = Stream(vocoder=vocoder.open())
    same_rules = _served(network.config)
    for call in fixture.meta["calls"]:
        tag, tokens, last = call["tag"], _tokens(fixture, call), call["last_chunk"]
        mel = upstream.step(tokens, last, call.get("flow_cache_frames_after_trim"))
        speech, state = _vocoded(vocoder, theirs, mel, last), theirs.vocoder
        if same_rules:
            speech, state = _audio(engine, ours, tokens, final=last), ours.vocoder
            assert isinstance(ours, DiTStream)
            same_rules = upstream.cache.estimator.attention.frames == upstream.cache.frames and ours.complete
        yield f"out/{tag}/speech", speech[None]
        yield from _where_stored(
            fixture,
            {
                f"out/{tag}/cache_source": vocoder.pool.source[state.slot][None, None],
                f"out/{tag}/cache_speech": vocoder.pool.speech[state.slot][None],
                f"mid/{tag}/mel": mel[None],
            },
        )


def _audio(engine: Token2Wav, stream: Stream, tokens: np.ndarray, *, final: bool, offset: int | None = None) -> Tensor:
    """The engine's audio (N,) of the next chunk. Raises the engine's ValueError."""
    (audio,) = engine.step([engine.chunk(stream, tokens, final=final, offset=offset)])
    return torch.from_numpy(audio)


def _vocoded(vocoder: StreamingVocoder, stream: Stream, mel: Tensor, final: bool) -> Tensor:
    """The audio (N,) of mel frames (80, T) that no flow of ours has made."""
    (audio,) = vocoder.step([Chunk(stream, np.zeros(0, np.int64), final, 0, 0, 0)], [mel])
    return audio


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
    vocoder = _vocoder(fixture)
    noise = _flow_noise(fixture)
    prompt = _prompt(fixture, "in/prompt_feat")
    steps = steps_of(fixture)
    engine = Token2Wav(UNetStreaming(network, noise, limits=LIMITS, steps=steps), vocoder)
    ours, theirs = engine.open(prompt), Stream(vocoder=vocoder.open())
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
        rendered = torch.cat([vocoder.pool.mel[theirs.vocoder.slot], mel], dim=1) if theirs.vocoder.begun else mel
        speech = _vocoded(vocoder, theirs, mel, last)
        same_rules = same_rules and call["stream"]
        if same_rules:
            speech = _audio(engine, ours, tokens, final=last, offset=offset)
        yield f"out/{tag}/speech", speech[None]
        yield from _where_stored(fixture, {f"mid/{tag}/vocoder_mel": rendered[None]})


CHECKS: dict[str, Check] = {
    "item8b_dit_streaming_token2wav": check_dit,
    "item8c_cosyvoice2_streaming_token2wav": check_unet,
}
