"""The streaming loops: our engine against upstream's, chunk by chunk.

Two rules of upstream's loops are mistakes that our engine does not share: the DiT loop trims its cache as if the newest
frames came last and then reuses noise, and the UNet loop renders its last chunk without the streaming mask. The engine
is compared wherever those rules have not acted yet; the rest is composed from the same networks under upstream's rules.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.constants import TOKEN_MEL_RATIO
from common.flow.cache import DiTFlowCache, KeyValues
from common.flow.dit_flow import DiTFlow
from common.flow.unet_flow import UNetFlow
from common.overlap import raw_hamming_window
from common.prompt import Prompt
from common.token2wav.engine import Stream, Token2Wav
from common.token2wav.flows import Chunk, DiTStreaming, UNetStreaming, VoiceCache
from common.token2wav.noise import NoiseTape
from common.token2wav.vocoder import StreamingVocoder
from scripts.parity import flow_dit, flow_unet, hift
from scripts.parity.fixture import Check, Fixture

Outputs = Iterator[tuple[str, Tensor]]


class RestartingTape(NoiseTape):
    """Upstream's fixture draws the vocoder's noise from row 0 of the table in every call."""

    def read(self, start: int, length: int) -> Tensor:
        return super().read(0, length)


def _vocoder(fixture: Fixture) -> StreamingVocoder:
    """The vocoder with upstream's window, whose halves add up to 1.08, and the fixture's noise."""
    file = next(name for name in fixture.meta["weights_files"] if name.startswith("hift"))
    network = hift.build(fixture, file)
    return StreamingVocoder(network, RestartingTape(fixture["in/noise_table"]), raw_hamming_window())


def _flow_file(fixture: Fixture) -> str:
    return next(name for name in fixture.meta["weights_files"] if not name.startswith("hift"))


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


def _caches(fixture: Fixture, tag: str, stream: Stream) -> Outputs:
    for name, value in (("cache_source", stream.vocoder.source), ("cache_speech", stream.vocoder.speech)):
        key = f"out/{tag}/{name}"
        if key in fixture:
            yield key, value.reshape(fixture[key].shape)


def check_dit(fixture: Fixture) -> Outputs:
    """token2wav_dit: a chunk is the engine's own until a cache that it starts from was trimmed."""
    network: DiTFlow = flow_dit.build(fixture, _flow_file(fixture))
    vocoder = _vocoder(fixture)
    noise = _flow_noise(fixture)
    prompt = _prompt(fixture, "in/prompt_mel")
    steps = flow_dit.steps_of(fixture)
    engine = Token2Wav(DiTStreaming(network, noise, VoiceCache(0), steps=steps), vocoder)
    ours, upstream = engine.open(prompt), _UpstreamDiT(network, noise, prompt, steps)
    theirs = vocoder.open()
    trimmed = False
    for call in fixture.meta["calls"]:
        tag, tokens, last = call["tag"], _tokens(fixture, call), call["last_chunk"]
        mel = upstream.step(tokens, last, call.get("flow_cache_frames_after_trim"))
        speech = vocoder.step(theirs, mel, last=last)
        if not trimmed:
            audio = engine.step(ours, Chunk(tokens, last))
            yield f"out/{tag}/speech", torch.from_numpy(audio)[None]
            yield from _caches(fixture, tag, ours)
        else:
            yield f"out/{tag}/speech", speech[None]
            yield from _caches(fixture, tag, Stream(ours.flow, theirs))
        yield f"mid/{tag}/mel", mel[None]
        before, after = call.get("flow_cache_frames_before_trim"), call.get("flow_cache_frames_after_trim")
        trimmed = trimmed or before != after


class _UpstreamDiT:
    """The flow under upstream's caller: newest frames first, cut to both ends, noise from the cache's length on."""

    def __init__(self, network: DiTFlow, noise: NoiseTape, prompt: Prompt, steps: int):
        self._network = network
        self._noise = noise
        self._cache: DiTFlowCache = network.setup_cache(
            torch.from_numpy(prompt.tokens)[None],
            torch.from_numpy(prompt.mel)[None],
            torch.from_numpy(prompt.embedding)[None],
            noise=noise.read(0, len(prompt.mel)).T[None],  # (T, C) -> (1, C, T)
            steps=steps,
        )
        self._prompt_frames = len(prompt.mel)

    def step(self, tokens: np.ndarray, last: bool, keep: int | None) -> Tensor:
        cached = self._cache.estimator.attention.frames
        lookahead = 0 if last else self._network.config.encoder.lookahead
        frames = (len(tokens) - lookahead) * self._network.config.encoder.ratio
        noise = self._noise.read(cached, frames).T[None]  # (T, C) -> (1, C, T)
        mel, cache = self._network.inference_chunk(torch.from_numpy(tokens)[None], self._cache, last=last, noise=noise)
        attention = cache.estimator.attention
        newest_first = KeyValues(*(_newest_first(x, cached) for x in (attention.keys, attention.values)))
        if keep is not None and keep < newest_first.frames:
            newest_first = newest_first.trimmed(self._prompt_frames, keep - self._prompt_frames)
        self._cache = replace(cache, estimator=replace(cache.estimator, attention=newest_first))
        return mel[0]


def _newest_first(x: Tensor, cached: int) -> Tensor:
    """(..., T, D) with the new frames behind the cached ones -> before them. Attention knows no positions."""
    return torch.cat([x[..., cached:, :], x[..., :cached, :]], dim=-2)


def check_unet(fixture: Fixture) -> Outputs:
    """token2wav: every chunk is the engine's own but those that upstream renders without the streaming mask."""
    network: UNetFlow = flow_unet.build(fixture, _flow_file(fixture))
    vocoder = _vocoder(fixture)
    noise = _flow_noise(fixture)
    prompt = _prompt(fixture, "in/prompt_feat")
    engine = Token2Wav(UNetStreaming(network, noise), vocoder)
    stream = engine.open(prompt)
    for call in fixture.meta["calls"]:
        tokens, last = _tokens(fixture, call), call["finalize"]
        if call["stream"]:
            audio = torch.from_numpy(engine.step(stream, Chunk(tokens, last, offset=call["token_offset"])))
        else:
            mel = network.inference(
                torch.from_numpy(tokens)[None],
                torch.from_numpy(prompt.tokens)[None],
                torch.from_numpy(prompt.mel)[None],
                torch.from_numpy(prompt.embedding)[None],
                noise=fixture["in/rand_noise"],
                streaming=False,
                finalize=last,
            )
            audio = vocoder.step(stream.vocoder, mel[0, :, call["token_offset"] * TOKEN_MEL_RATIO :], last=last)
        yield f"out/{call['tag']}/speech", audio[None]


CHECKS: dict[str, Check] = {
    "item8b_dit_streaming_token2wav": check_dit,
    "item8c_cosyvoice2_streaming_token2wav": check_unet,
}
