"""Streams of 30 s compared with references that keep the whole stream, or exactly what a stream of that age keeps."""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import (
    CONTEXT_TOKENS,
    HOP_SAMPLES,
    LOOKAHEAD_TOKENS,
    SAMPLE_RATE,
    STREAM_CACHE_FRAMES,
    TOKEN_MEL_RATIO,
    TOKEN_RATE,
)
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.networks.flow.unet import UNetFlow
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.base import StreamingFlow
from cosyvoice_triton.token2wav.flow.dit_flow import DiTStreaming
from cosyvoice_triton.token2wav.flow.prompt_caches import PromptCaches
from cosyvoice_triton.token2wav.flow.unet_flow import UNetStreaming
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import SOURCE_NOISE_SECONDS, NoiseTape, flow_noise
from cosyvoice_triton.token2wav.stream import VocoderState
from cosyvoice_triton.token2wav.vocoder.hift_vocoder import StreamingVocoder
from cosyvoice_triton.voice.prompt import Prompt
from torch import Tensor

from tests.parity.reference import dit_flow, window_flow
from tests.parity.reference.encoder import encode_chunk
from tests.support.streams import VOICES_BYTES, dit_pieces, ids, prompt, tensors, unet_pieces

pytestmark = pytest.mark.slow  # every test renders 30 s of audio or more

TOKENS = 30 * TOKEN_RATE
LIMITS = BatchLimits(max_streams=2)
NOISE = flow_noise()


class Plan(NamedTuple):
    """A stream and the batch in which it begins."""

    voice: Prompt
    tokens: np.ndarray
    hops: list[int]
    begins: int = 0

    @property
    def ends(self) -> list[int]:
        """Tokens rendered after each chunk."""
        return [*np.cumsum(self.hops).tolist(), len(self.tokens)]


def rendered(flow: StreamingFlow, plans: list[Plan]) -> list[list[Tensor]]:
    """The mels (80, T) of each stream's chunks. All streams that have begun share every batch."""
    split = unet_pieces if flow.cumulative else dit_pieces
    pieces = [iter(split(plan.tokens, plan.hops)) for plan in plans]
    streams = [flow.open(plan.voice, VocoderState(0)) for plan in plans]
    mels: list[list[Tensor]] = [[] for _ in plans]
    for turn in range(max(plan.begins + len(plan.hops) + 1 for plan in plans)):
        due = {
            index: piece
            for index, plan in enumerate(plans)
            if turn >= plan.begins and (piece := next(pieces[index], None))
        }
        chunks = [piece.of(flow, streams[index]) for index, piece in due.items()]
        for index, mel in zip(due, flow.render(chunks), strict=True):
            mels[index].append(mel)
    return mels


def dit_reference(network: DiTFlow, plan: Plan, steps: int) -> list[Tensor]:
    """Upstream's loop. Of its own frames the estimator keeps the last STREAM_CACHE_FRAMES; once a stream is longer than
    CONTEXT_TOKENS, the encoder begins after the prompt with the last of these, in the chunks in which they came."""
    P, mels = TOKEN_MEL_RATIO * len(plan.voice.tokens), []
    begun = cache = dit_flow.prefill(network, *tensors(plan.voice), noise=NOISE.read(0, P).T[None], steps=steps)
    tokens = torch.from_numpy(plan.tokens)[None]
    for index, (offset, end) in enumerate(pairwise([0, *plan.ends])):
        if (first := offset - CONTEXT_TOKENS) > 0:
            encoder = begun.encoder
            for begin, until in pairwise([first, *(at for at in plan.ends[:index] if at > first)]):
                embedded = network.input_embedding(tokens[:, begin : until + LOOKAHEAD_TOKENS])
                _, encoder = encode_chunk(network.encoder, embedded, encoder, final=False)
            cache = replace(cache, encoder=encoder)
        final = end == len(plan.tokens)
        mel, cache = dit_flow.inference_chunk(
            network,
            tokens[:, offset : end + (0 if final else LOOKAHEAD_TOKENS)],
            cache,
            final=final,
            noise=NOISE.read(P + TOKEN_MEL_RATIO * offset, TOKEN_MEL_RATIO * (end - offset)).T[None],
        )
        cache = cache.trimmed(STREAM_CACHE_FRAMES)
        mels.append(mel[0])
    return mels


@torch.inference_mode()
def test_streams_of_the_dit_of_different_ages_equal_their_references(
    dit_network: DiTFlow,
) -> None:
    """The second stream is 530 tokens younger; chunks are shorter and longer than the ring, which wraps many times."""
    plans = [
        Plan(prompt(1), ids(1, TOKENS), [15, 30, 7, 60, 100, 100, 19, 100, 99, 55, 11, 44]),
        Plan(prompt(2, tokens=9), ids(2, 210), [15, 33, 2, 50], begins=8),
    ]
    flow = DiTStreaming(
        dit_network,
        NOISE,
        PromptCaches(VOICES_BYTES),
        limits=LIMITS,
        steps=2,
    )
    for plan, mels in zip(plans, rendered(flow, plans), strict=True):
        for mel, expected in zip(mels, dit_reference(dit_network, plan, 2), strict=True):
            torch.testing.assert_close(mel, expected, atol=1e-4, rtol=0)


def unet_reference(network: UNetFlow, plan: Plan, end: int, forgotten: int) -> Tensor:
    """The mel of a stream up to token `end`, rendered at once under the training masks, as if the prompt were followed
    by its tokens from `forgotten` on; every frame has the noise of its place in the whole stream."""
    P = TOKEN_MEL_RATIO * len(plan.voice.tokens)
    own = NOISE.read(P + TOKEN_MEL_RATIO * forgotten, TOKEN_MEL_RATIO * (end - forgotten))
    (mel,) = window_flow.inference(
        network,
        torch.from_numpy(plan.tokens[forgotten : end + LOOKAHEAD_TOKENS])[None],
        *tensors(plan.voice),
        noise=torch.cat([NOISE.read(0, P), own]).T[None],
        streaming=True,
        final=end == len(plan.tokens),
        steps=1,
    )
    return mel


@torch.inference_mode()
def test_streams_of_the_unet_of_different_ages_forget_whole_training_chunks(unet_network: UNetFlow) -> None:
    """The small network's training chunk is 5 tokens. The second stream is 377 tokens younger."""
    plans = [
        Plan(prompt(1, tokens=8), ids(1, TOKENS), [17, 360, 40, 200]),
        Plan(prompt(2, tokens=11), ids(2, 60), [14, 25], begins=2),
    ]
    # tokens before the chunk: tokens forgotten
    forgotten = [{17: 0, 377: 5, 417: 45, 617: 245}, {0: 0, 14: 0, 39: 0}]
    flow = UNetStreaming(unet_network, NOISE, limits=LIMITS, steps=1)
    for plan, expected, mels in zip(plans, forgotten, rendered(flow, plans), strict=True):
        for (begin, end), mel in list(zip(pairwise([0, *plan.ends]), mels, strict=True))[-3:]:
            reference = unet_reference(unet_network, plan, end, expected[begin])
            torch.testing.assert_close(mel, reference[:, -mel.shape[1] :], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_every_sample_of_a_stream_has_the_source_noise_of_its_own_place(
    dit_network: DiTFlow, vocoder: StreamingVocoder
) -> None:
    """The tape is silent but for a burst, which returns every 10 s of the stream and is heard nowhere else."""
    hift = vocoder._plain.hift
    silence = torch.zeros(SOURCE_NOISE_SECONDS * SAMPLE_RATE, hift.config.harmonics + 1)
    burst, length = 100_000, 960
    noisy = silence.clone()
    noisy[burst : burst + length] = 1
    flow = DiTStreaming(dit_network, NOISE, PromptCaches(VOICES_BYTES), limits=LIMITS, steps=1)
    engines = [Token2Wav(flow, StreamingVocoder(hift, NoiseTape(tape), limits=LIMITS)) for tape in (silence, noisy)]
    quiet, loud = (synthesized(engine, prompt(1), ids(1, TOKENS)) for engine in engines)
    assert len(quiet) == TOKENS * TOKEN_MEL_RATIO * HOP_SAMPLES
    changed = np.flatnonzero(np.abs(loud - quiet) > 1e-3)
    margin = 10 * HOP_SAMPLES  # reach of the vocoder's convolutions
    for begin in range(burst, len(quiet), len(silence)):
        assert ((changed >= begin) & (changed < begin + length)).any()
        changed = changed[(changed < begin - margin) | (changed >= begin + length + margin)]
    assert not len(changed)


def synthesized(engine: Token2Wav, voice: Prompt, tokens: np.ndarray) -> np.ndarray:
    """Audio (N,) of a stream of the DiT."""
    stream = engine.open(voice)
    pieces = dit_pieces(tokens, [15, 30, 60, 100, 100, 100, 100, 100])
    audio = np.concatenate([engine.step([piece.of(engine, stream)])[0] for piece in pieces])
    engine.close(stream)
    return audio
