"""A stream at another speed: its chunks equal the interpolation of the whole mel, for all stacks."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cosyvoice_triton.constants import HOP_SAMPLES
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.stream import Chunk, MelStretch, NotFiniteError, Stream

from tests.support.streams import ids, mel, pieces, prompt, step

SPEEDS = (0.25, 0.7, 1.3, 4.0)
HOPS = [25, 25, 50]


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
