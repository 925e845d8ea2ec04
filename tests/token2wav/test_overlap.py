"""Joints: HiFT's audio in chunks equals that of the whole mel, for the trained voice and for both stacks' hops;
at another speed they equal the interpolation of the whole mel."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import HOP_SAMPLES, OVERLAP_FRAMES, OVERLAP_SAMPLES, TOKEN_MEL_RATIO
from cosyvoice_triton.demo_checkpoint import TRAINED, VOICES_DIR
from cosyvoice_triton.networks.hift import HiFTConfig, HiFTGenerator, load_hift
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import source_noise
from cosyvoice_triton.token2wav.stream import Chunk, MelStretch, NotFiniteError, Stream
from cosyvoice_triton.token2wav.vocoder.hift_vocoder import StreamingVocoder, falling_half
from cosyvoice_triton.voice.encoders import reference_mel
from cosyvoice_triton.voice.recordings import parse_recording
from torch import Tensor

from tests.support.checkpoints import UNET_DIR
from tests.support.streams import ids, mel, pieces, prompt, step, vocoded

# Limits of the difference from the whole's audio, relative to its RMS. Outside of cross-fades only the ends of HiFT's
# receptive field reach a chunk's edge. Within them the chunk that ends lacks the next frames: its pitch is inexact.
OUTSIDE, FADING = 1e-3, 0.07
SPEEDS = (0.25, 0.7, 1.3, 4.0)
HOPS = [25, 25, 50]


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
    return torch.from_numpy(reference_mel(parse_recording((TRAINED / VOICES_DIR / "nezumi.wav").read_bytes()))).T


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
    for part in mels["unet"].split(SCHEDULES["unet"], dim=1)[:2]:
        vocoder.begin([Chunk(cancelled, np.zeros(0, np.int64), False, 0, 0, 0)], [part])()
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


def interpolated(whole: torch.Tensor, speed: float) -> torch.Tensor:
    """As whole utterances are, but by exactly the speed: they are cut to whole frames before."""
    return F.interpolate(whole[None], scale_factor=1 / speed, mode="linear")[0]


def assert_equal(result: torch.Tensor, expected: torch.Tensor) -> None:
    """But for a last frame that rounding of the length takes away."""
    assert abs(result.shape[1] - expected.shape[1]) <= 1
    torch.testing.assert_close(result[:, : expected.shape[1]], expected[:, : result.shape[1]], atol=1e-3, rtol=0)


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("hops", [[], [1, 2, 3, 50], [7] * 14])
def test_chunks_are_interpolated_as_the_whole_mel_is(speed: float, hops: list[int]) -> None:
    whole, stretch, begin, made = torch.randn(80, 117), MelStretch(speed), 0, []
    for chunk in whole.split([*hops, 117 - sum(hops)], dim=1):
        final = begin + chunk.shape[1] == 117
        stretch.stretched(torch.full_like(chunk, torch.nan), begin, final)  # may be rendered again
        made.append(stretch.stretched(chunk.clone(), begin, final))
        stretch.keep()
        begin += chunk.shape[1]
    result = torch.cat(made, dim=1)
    assert result.shape[1] == int(117 / speed)
    assert_equal(result, interpolated(whole, speed))


@pytest.fixture(params=["dit", "unet", "cosyvoice3"])
def engine(request: pytest.FixtureRequest) -> Token2Wav:
    return request.getfixturevalue(request.param)


def at_speed(engine: Token2Wav, speed: float) -> np.ndarray:
    stream = engine.open(prompt(4, 25), speed)
    audio = np.concatenate([step(engine, stream, piece) for piece in pieces(engine, ids(4, 120), HOPS)])
    engine.close(stream)
    return audio


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_stream_is_vocoded_from_the_stretched_mel(engine: Token2Wav, speed: float, monkeypatch) -> None:
    """At 0.25 a chunk is longer than the vocoder's largest class, and is vocoded in parts."""
    flow, vocoded = engine._flow, []
    begin = engine._vocoder.begin

    def noting(chunks: list[Chunk], mels: list[torch.Tensor]):
        vocoded.extend(each.clone() for each in mels)
        return begin(chunks, mels)

    monkeypatch.setattr(engine._vocoder, "begin", noting)
    audio = at_speed(engine, speed)
    expected = interpolated(mel(flow, prompt(4, 25), ids(4, 120), HOPS), speed)
    assert audio.size == int(240 / speed) * HOP_SAMPLES
    assert max(each.shape[1] for each in vocoded) <= engine._vocoder.longest
    assert_equal(torch.cat(vocoded, dim=1), expected)


def test_speed_1_gives_the_same_samples_beside_stretched_streams(engine: Token2Wav) -> None:
    alone = at_speed(engine, 1.0)
    streams = [engine.open(prompt(4, 25), speed) for speed in (1.0, 0.25, 2.0)]
    assert streams[0].stretch is None
    beside: list[np.ndarray] = []
    for piece in pieces(engine, ids(4, 120), HOPS):
        beside.append(engine.step([piece.of(engine, stream) for stream in streams])[0])
    for stream in streams:
        engine.close(stream)
    np.testing.assert_allclose(np.concatenate(beside), alone, atol=1e-3, rtol=0)


@pytest.mark.parametrize("call", [1, 4])
def test_a_chunk_that_is_not_finite_is_rendered_again_unless_a_part_of_it_was_vocoded(dit, monkeypatch, call) -> None:
    """At 0.25 the chunk of 50 tokens is the first one with several parts."""
    expected, begin, calls = at_speed(dit, 0.25), dit._vocoder.begin, []

    def spoiled(chunks: list[Chunk[Stream]], mels: list[torch.Tensor]):
        calls.append(1)
        return (lambda: [NotFiniteError("a test")]) if len(calls) == call else begin(chunks, mels)

    monkeypatch.setattr(dit._vocoder, "begin", spoiled)
    if call == 1:
        np.testing.assert_array_equal(at_speed(dit, 0.25), expected)
    else:
        with pytest.raises(RuntimeError, match="a test"):
            at_speed(dit, 0.25)
