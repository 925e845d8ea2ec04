from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.checkpoint import load_strict
from common.flow.cache import EncoderCache
from common.flow.encoder import UpsampleConformerEncoder
from tools.parity import flow_unet
from tools.parity.fixture import Fixture

GOLDEN = Path(__file__).parents[1] / "assets" / "golden"


@pytest.fixture(scope="module")
def encoder():
    return flow_unet.build(Fixture(GOLDEN / "item4_cosyvoice2_flow_inference.json")).encoder


def encode_in_chunks(encoder, xs: torch.Tensor, boundaries: list[int]) -> tuple[torch.Tensor, EncoderCache]:
    cache, parts, start = encoder.empty_cache(xs.shape[0]), [], 0
    for stop in boundaries:
        last = stop == xs.shape[1]
        part, cache = encoder.forward_chunk(xs[:, start : stop if last else stop + 3], cache, last)
        parts.append(part)
        start = stop
    return torch.cat(parts, dim=1), cache


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_encoder_chunk_by_chunk_equals_the_whole_under_the_streaming_mask(encoder, chunk):
    weights = encoder.state_dict()
    encoder = UpsampleConformerEncoder(replace(encoder.config, chunk_tokens=chunk))
    load_strict(encoder, weights, "cpu", torch.float32)
    frames = 16
    xs = torch.randn(2, frames + 3, encoder.config.width, generator=torch.Generator().manual_seed(1))
    whole, _ = encoder(xs[:, :frames], torch.full((2,), frames), xs[:, frames:], streaming=True)
    chunked, cache = encode_in_chunks(encoder, xs, [*range(chunk, frames, chunk), frames])
    torch.testing.assert_close(chunked, whole, atol=2e-5, rtol=0)
    assert cache.tokens.frames == frames
    assert cache.frames.frames == frames * encoder.config.ratio


def test_encoder_in_one_chunk_equals_the_whole_without_a_mask(encoder):
    xs = torch.randn(1, 12, encoder.config.width, generator=torch.Generator().manual_seed(2))
    whole, valid = encoder(xs, torch.tensor([12]))
    chunked, _ = encode_in_chunks(encoder, xs, [12])
    assert valid.all()
    torch.testing.assert_close(chunked, whole, atol=2e-5, rtol=0)


def test_encoder_padding_does_not_reach_valid_frames_beyond_the_look_ahead(encoder):
    xs = torch.randn(1, 12, encoder.config.width, generator=torch.Generator().manual_seed(4))
    padded = torch.cat([xs, torch.full((1, 6, xs.shape[2]), 9.0)], dim=1)
    other = torch.cat([xs, torch.full((1, 6, xs.shape[2]), 9.0)], dim=1)
    other[:, 15:] = -9.0  # beyond what the look-ahead of the last valid frame sees
    first, valid = encoder(padded, torch.tensor([12]))
    second, _ = encoder(other, torch.tensor([12]))
    assert valid[0, 0].tolist() == [True] * 24 + [False] * 12
    torch.testing.assert_close(first[:, :24], second[:, :24], atol=1e-5, rtol=0)
