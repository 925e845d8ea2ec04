"""Joints: HiFT's audio in chunks equals that of the whole mel, for the trained voice and for both stacks' hops."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import HOP_SAMPLES, OVERLAP_FRAMES, OVERLAP_SAMPLES, TOKEN_MEL_RATIO
from cosyvoice_triton.demo_checkpoint import TRAINED, VOICES_DIR
from cosyvoice_triton.networks.hift import HiFTConfig, HiFTGenerator, load_hift
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import source_noise
from cosyvoice_triton.token2wav.stream import Chunk, Stream
from cosyvoice_triton.token2wav.vocoder.hift_vocoder import StreamingVocoder, falling_half
from cosyvoice_triton.voice.encoders import reference_mel
from cosyvoice_triton.voice.recordings import parse_recording
from torch import Tensor

from tests.support.checkpoints import UNET_DIR
from tests.support.streams import vocoded

# Limits of the difference from the whole's audio, relative to its RMS. Outside of cross-fades only the ends of HiFT's
# receptive field reach a chunk's edge. Within them the chunk that ends lacks the next frames: its pitch is inexact.
OUTSIDE, FADING = 1e-3, 0.04


def hops_of(stack: stacks.Stack, tokens: int, prompt_tokens: int) -> Iterator[int]:
    """Mel frames of the stack's chunks."""
    schedule = HopRules(boundary=stack.chunk_boundary).schedule(prompt_tokens)
    while hop := schedule.next_hop(tokens, ended=True):
        yield TOKEN_MEL_RATIO * hop.length


# Frames of the chunks of streams of different lengths. The second chunk of `short` has less history than pitch depends
# on, and all of its later ones but the final one are shorter than the overlap.
SCHEDULES = {
    "dit": [*hops_of(stacks.DIT, 52, 80)],
    "unet": [*hops_of(stacks.UNET, 46, 83)],
    "short": [10, 1, 2, 3, 5, 4, 7, 2, 14],
}


@pytest.fixture(scope="module")
def vocoder() -> StreamingVocoder:
    hift = load_hift(TRAINED / UNET_DIR / "hift.pt")
    return StreamingVocoder(hift, source_noise(hift.config.harmonics + 1), limits=BatchLimits(max_streams=4))


@pytest.fixture(scope="module")
def speech() -> Tensor:
    """Mel (80, T) of a recording of the demo's voice."""
    return torch.from_numpy(reference_mel(parse_recording((TRAINED / VOICES_DIR / "slt.wav").read_bytes()))).T


@pytest.fixture(scope="module")
def mels(speech: Tensor) -> dict[str, Tensor]:
    return {name: speech[:, 20 * index :][:, : sum(hops)] for index, (name, hops) in enumerate(SCHEDULES.items())}


@pytest.fixture(scope="module")
def batched(vocoder: StreamingVocoder, mels: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    return dict(zip(mels, vocoded(vocoder, list(mels.values()), list(SCHEDULES.values())), strict=True))


@pytest.fixture(scope="module")
def wholes(vocoder: StreamingVocoder, mels: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: vocoder.whole([mel])[0] for name, mel in mels.items()}


def fading(audio: Sequence[Tensor]) -> Tensor:
    """Which samples (N,) are cross-faded."""
    inside = torch.zeros(sum(map(len, audio)), dtype=torch.bool)
    for joint in accumulate(len(part) for part in audio[:-1]):
        inside[joint : joint + OVERLAP_SAMPLES] = True
    return inside


@pytest.mark.parametrize("name", SCHEDULES)
def test_streamed_audio_equals_the_whole_at_joints(batched, wholes, name) -> None:
    """Samples in a chunk and up to both ends of its cross-fade, then those within cross-fades."""
    audio, whole = batched[name], wholes[name]
    difference = (torch.cat(audio) - whole) / whole.square().mean().sqrt()
    inside = fading(audio)
    assert inside.any()
    assert difference[~inside].abs().max() < OUTSIDE
    assert difference[inside].square().mean().sqrt() < FADING
    for joint in accumulate(len(part) for part in audio[:-1] if name != "short"):
        for edge in (joint, joint + OVERLAP_SAMPLES):
            assert difference[edge - 24 : edge + 24].abs().max() < OUTSIDE  # 2 ms


def test_all_passes_of_a_batch_are_launched_before_one_is_waited_for(vocoder, monkeypatch) -> None:
    """Chunks of two length classes: the GPU need not wait for the host between their passes."""
    waits: list[int] = []
    monkeypatch.setattr("cosyvoice_triton.token2wav.vocoder.base.copied", lambda *of: lambda: waits.append(1) or of)
    chunks = [Chunk(Stream(vocoder=vocoder.open()), np.zeros(0, np.int64), True, 0, 0, 0) for _ in range(2)]
    finish = vocoder.begin(chunks, [torch.zeros(80, frames) for frames in (20, 40)])
    assert waits == []
    assert [len(audio) for audio in finish()] == [20 * HOP_SAMPLES, 40 * HOP_SAMPLES] and len(waits) == 2
    for chunk in chunks:
        vocoder.close(chunk.stream.vocoder)


def test_a_stream_inherits_nothing_from_a_cancelled_one(vocoder, mels, batched) -> None:
    cancelled = Stream(vocoder=vocoder.open())
    for mel in mels["unet"].split(SCHEDULES["unet"], dim=1)[:2]:
        vocoder.begin([Chunk(cancelled, np.zeros(0, np.int64), False, 0, 0, 0)], [mel])()
    vocoder.close(cancelled.vocoder)
    (alone,) = vocoded(vocoder, [mels["short"]], [SCHEDULES["short"]])
    torch.testing.assert_close(torch.cat(alone), torch.cat(batched["short"]), atol=1e-4, rtol=0)


def test_a_stream_equals_the_whole_after_half_a_minute() -> None:
    """Neither phase nor noise drifts. Random weights, with a pitch that moves within 150 to 250 Hz."""
    torch.manual_seed(0)
    hift = HiFTGenerator(HiFTConfig(channels=8, f0_channels=8)).eval().requires_grad_(False)
    hift.f0_predictor.classifier.bias.fill_(200.0)
    hift.f0_predictor.classifier.weight.mul_(1500)
    vocoder = StreamingVocoder(hift, source_noise(hift.config.harmonics + 1), limits=BatchLimits(max_streams=1))
    mel = torch.randn(80, 1500)
    assert 20 < hift.f0_predictor(mel[None]).std() < 60
    (audio,) = vocoded(vocoder, [mel], [[30, 70, *[200] * 7]])
    (whole,) = vocoder.whole([mel])
    last = slice(-150 * HOP_SAMPLES, None)
    difference = torch.cat(audio)[last] - whole[last]
    assert difference.square().mean().sqrt() < 1e-3 * (whole[last] - whole[last].mean()).square().mean().sqrt()


def test_both_halves_of_the_window_sum_to_one_and_begin_and_end_without_a_step() -> None:
    falling = falling_half(OVERLAP_SAMPLES)
    torch.testing.assert_close(falling + falling.flip(0), torch.ones(OVERLAP_SAMPLES))
    assert (falling.diff() < 0).all()
    assert 1 - falling[0] < 1e-6 and falling[-1] < 1e-6


def test_a_chunk_is_rendered_once_it_has_more_than_the_overlap(vocoder: StreamingVocoder, speech: Tensor) -> None:
    mel = speech[:, : OVERLAP_FRAMES + 4]
    (audio,) = vocoded(vocoder, [mel], [[OVERLAP_FRAMES, 1, 3]])
    assert [len(part) for part in audio] == [0, HOP_SAMPLES, (OVERLAP_FRAMES + 3) * HOP_SAMPLES]
    assert all(np.isfinite(part).all() for part in audio)


def test_what_a_last_chunk_without_frames_releases_is_not_changed_by_the_next_stream(vocoder, speech) -> None:
    mel = speech[:, :20]
    ((_, audio),) = vocoded(vocoder, [mel], [[20, 0]])
    before = audio.clone()
    vocoded(vocoder, [-mel], [[20]])
    assert len(audio) == OVERLAP_SAMPLES and torch.equal(audio, before)
