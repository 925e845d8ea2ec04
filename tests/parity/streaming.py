"""The streaming loops: our engine compared with upstream's, chunk by chunk.

Upstream's loops have three errors that our engine does not: the DiT loop trims its cache as if the newest frames came
last, and then reuses noise; the UNet loop renders its final chunk without the streaming mask; both begin the vocoder's
source anew in every chunk. Our flows are compared up to the chunk where one of the first two (or a fixture's own
trimming) takes effect, our vocoder in the first chunk; what comes later is computed by `reference` with upstream's
rules.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from cosyvoice_triton.constants import OVERLAP_SAMPLES, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow.cache import KeyValues
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.token2wav.flow.dit_flow import DiTStream
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape
from cosyvoice_triton.token2wav.stream import Chunk, Stream
from cosyvoice_triton.token2wav.vocoder.hift_vocoder import StreamingVocoder
from cosyvoice_triton.voice.prompt import Prompt
from torch import Tensor

from tests.parity import flow_dit, flow_unet, hift
from tests.parity.fixture import Check, Fixture
from tests.parity.reference import dit_flow, window_flow
from tests.parity.reference.vocoder import ReferenceVocoder, hamming_window
from tests.parity.served import LIMITS, ServedFlow, prompt_of
from tests.support.streams import tensors

Outputs = Iterator[tuple[str, Tensor]]


class _Vocoder:
    """Our vocoder in the first chunk, upstream's after it, with the fixture's noise, which every chunk reads anew."""

    def __init__(self, fixture: Fixture) -> None:
        network = hift.build(fixture, fixture.meta["weights_files"][1])
        served = copy.deepcopy(network).to(fixture.device).body_to(fixture.dtype)
        self._served = StreamingVocoder(served, NoiseTape(fixture["in/noise_table"].to(fixture.device)), limits=LIMITS)
        self._stream = Stream(vocoder=self._served.open())
        self._fixture = fixture
        noise = NoiseTape(fixture["in/noise_table"])
        self.reference = ReferenceVocoder(network, hamming_window(OVERLAP_SAMPLES), noise)

    def speech(self, key: str, mel: Tensor, theirs: Tensor, final: bool) -> Outputs:
        """The audio (1, N) of the next mel frames (80, T), under `key`.

        In float16 of upstream's: a mel's error of 1e-3 moves f0, whose integral over the chunk is the phase.
        """
        before = of_mel = self._fixture.computed_by
        if self._fixture.dtype != torch.float32:
            mel, of_mel = theirs, "reference"
        self._fixture.computed_by = f"mel: {of_mel}; vocoder: {'reference' if self._stream.vocoder.begun else 'engine'}"
        yield key, self._step(mel, final)[None]
        self._fixture.computed_by = before

    def _step(self, mel: Tensor, final: bool) -> Tensor:
        """The audio (N,) of the next mel frames (80, T)."""
        speech = self.reference.step(mel.cpu().float(), final)
        state = self._stream.vocoder
        if not state.begun:
            mel = mel.to(self._served.pool.mel.device)
            (served,) = self._served.begin([Chunk(self._stream, np.zeros(0, np.int64), final, 0, 0, 0)], [mel])()
            assert isinstance(served, Tensor), served
            speech = served
            self.reference.speech = self._served.pool.speech[state.slot].cpu()
        return speech


def _prompt(fixture: Fixture, mel: str) -> Prompt:
    return prompt_of(fixture["in/prompt_token"].reshape(-1), fixture[mel][0], fixture["in/embedding"][0])


def _tokens(fixture: Fixture, call: dict[str, Any]) -> np.ndarray:
    first, end = call["token"]
    return fixture["in/token"].reshape(-1)[first:end].numpy()


def _where_stored(fixture: Fixture, results: dict[str, Tensor]) -> Outputs:
    yield from ((key, result) for key, result in results.items() if key in fixture)


def check_dit(fixture: Fixture) -> Outputs:
    """token2wav_dit: chunks are the engine's until it or upstream starts from a trimmed cache."""
    network, vocoder = flow_dit.build(fixture, fixture.meta["weights_files"][0]), _Vocoder(fixture)
    prompt = _prompt(fixture, "in/prompt_mel")
    served = ServedFlow(fixture, network, fixture["in/rand_noise"])
    ours, upstream = served.open(prompt), _UpstreamDiT(network, fixture["in/rand_noise"], prompt)
    same_rules, by_engine = True, fixture.computed_by
    for call in fixture.meta["calls"]:
        tag, tokens, last = call["tag"], _tokens(fixture, call), call["last_chunk"]
        mel = theirs = upstream.step(tokens, last, call.get("flow_cache_frames_after_trim"))
        fixture.computed_by = by_engine if same_rules else "reference"
        if same_rules:
            mel = served.chunk(ours, torch.from_numpy(tokens), final=last)
            assert isinstance(ours, DiTStream)
            kept, frames = upstream.cache.estimator.attention.frames, TOKEN_MEL_RATIO * upstream.cache.encoder.tokens
            same_rules = kept == frames and ours.complete
        yield from vocoder.speech(f"out/{tag}/speech", mel, theirs, last)
        yield from _where_stored(fixture, {f"mid/{tag}/mel": mel[None]})
        fixture.computed_by = "vocoder: reference"
        source, speech = vocoder.reference.source, vocoder.reference.speech
        caches = {f"out/{tag}/cache_source": source[None, None], f"out/{tag}/cache_speech": speech[None]}
        yield from _where_stored(fixture, caches)


class _UpstreamDiT:
    """The flow with upstream's caller: newest frames first, trimmed at both ends, noise from the cache's length on."""

    def __init__(self, network: DiTFlow, noise: Tensor, prompt: Prompt) -> None:
        self._network, self._noise = network, noise
        self.cache = dit_flow.prefill(network, *tensors(prompt), noise=noise)

    def step(self, tokens: np.ndarray, last: bool, keep: int | None) -> Tensor:
        cached = self.cache.estimator.attention.frames
        lookahead = 0 if last else self._network.config.encoder.lookahead
        frames = (len(tokens) - lookahead) * self._network.config.encoder.ratio
        noise = self._noise[:, :, cached : cached + frames]
        mel, cache = dit_flow.inference_chunk(
            self._network, torch.from_numpy(tokens)[None], self.cache, final=last, noise=noise
        )
        attention = cache.estimator.attention
        newest_first = KeyValues(*(_newest_first(x, cached) for x in (attention.keys, attention.values)))
        self.cache = replace(cache, estimator=replace(cache.estimator, attention=newest_first))
        if keep is not None:
            self.cache = self.cache.trimmed(keep - self.cache.prompt_frames)
        return mel[0]


def _newest_first(x: Tensor, cached: int) -> Tensor:
    """(..., T, D) with the new frames after the cached ones -> before them. Attention has no positions."""
    return torch.cat([x[..., cached:, :], x[..., :cached, :]], dim=-2)


def check_unet(fixture: Fixture) -> Outputs:
    """token2wav: chunks are the engine's until upstream renders one without the streaming mask."""
    network, vocoder = flow_unet.build(fixture, fixture.meta["weights_files"][0]), _Vocoder(fixture)
    prompt = _prompt(fixture, "in/prompt_feat")
    served = ServedFlow(fixture, network, fixture["in/rand_noise"])
    ours = served.open(prompt)
    same_rules, by_engine = True, fixture.computed_by
    for call in fixture.meta["calls"]:
        tag, tokens, offset, last = call["tag"], _tokens(fixture, call), call["token_offset"], call["finalize"]
        mel = theirs = window_flow.inference(
            network,
            torch.from_numpy(tokens)[None],
            *tensors(prompt),
            noise=fixture["in/rand_noise"],
            streaming=call["stream"],
            final=last,
        )[0, :, offset * network.config.encoder.ratio :]
        same_rules = same_rules and call["stream"]
        fixture.computed_by = by_engine if same_rules else "reference"
        if same_rules:
            mel = served.chunk(ours, torch.from_numpy(tokens), final=last, offset=offset)
        rendered = torch.cat([vocoder.reference.mel, mel.cpu().float()], dim=1)
        yield from vocoder.speech(f"out/{tag}/speech", mel, theirs, last)
        yield from _where_stored(fixture, {f"mid/{tag}/vocoder_mel": rendered[None]})


CHECKS: dict[str, Check] = {
    "item8b_dit_streaming_token2wav": check_dit,
    "item8c_cosyvoice2_streaming_token2wav": check_unet,
}
