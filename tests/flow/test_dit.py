import itertools
from pathlib import Path

import pytest
import torch

from tests.parity import flow_dit
from tests.parity.fixture import Fixture
from tests.parity.reference.dit_flow import DiTFlowCache, inference, inference_chunk, prefill

GOLDEN = Path(__file__).parents[1] / "assets" / "golden"
MEL = 80
PROMPT = 6  # tokens


@pytest.fixture(scope="module")
def flow():
    return flow_dit.build(Fixture(GOLDEN / "item6d_stepaudio2_flow_streaming.json"))


@pytest.fixture
def voice(flow):
    random = torch.Generator().manual_seed(7)
    return {
        "prompt_token": torch.randint(flow.config.vocab, (2, PROMPT), generator=random),
        "prompt_feat": torch.randn(2, 2 * PROMPT, MEL, generator=random),
        "embedding": torch.randn(2, flow.config.speaker_dim, generator=random),
    }


@pytest.fixture
def token(flow):
    return torch.randint(flow.config.vocab, (2, 50), generator=torch.Generator().manual_seed(8))


@pytest.fixture
def noise():
    return torch.randn(1, MEL, 200, generator=torch.Generator().manual_seed(9))


def row(tensors: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    return {name: tensor[index : index + 1] for name, tensor in tensors.items()}


def stream(
    flow, cache: DiTFlowCache, token: torch.Tensor, noise: torch.Tensor, hops: list[int], tail: int | None = None
) -> tuple[torch.Tensor, DiTFlowCache]:
    """The whole mel of a stream with chunks of these sizes; with `tail`, the cache is trimmed after each chunk."""
    mels, start = [], 0
    for index, hop in enumerate(hops):
        final = index == len(hops) - 1
        chunk = token[:, start : start + hop + (0 if final else 3)]
        mel, cache = inference_chunk(
            flow, chunk, cache, final=final, noise=noise[:, :, cache.frames : cache.frames + 2 * hop]
        )
        cache = cache if tail is None else cache.trimmed(tail)
        mels.append(mel)
        start += hop
    return torch.cat(mels, dim=2), cache


def test_a_stream_is_the_same_alone_and_in_a_batch(flow, voice, token, noise):
    batch, _ = stream(flow, prefill(flow, **voice, noise=noise), token, noise, [15, 25, 10])
    for index in range(2):
        cache = prefill(flow, **row(voice, index), noise=noise)
        alone, _ = stream(flow, cache, token[index : index + 1], noise, [15, 25, 10])
        torch.testing.assert_close(alone, batch[index : index + 1], atol=2e-5, rtol=0)


def test_streams_of_one_voice_share_a_prompt_cache_and_leave_it_unchanged(flow, voice, token, noise):
    prompt = prefill(flow, **voice, noise=noise)
    first, _ = stream(flow, prompt, token, noise, [15, 35])
    stream(flow, prompt, token.flip(1), noise, [10, 20, 20])
    again, _ = stream(flow, prompt, token, noise, [15, 35])
    assert torch.equal(first, again)
    assert prompt.frames == prompt.prompt_frames == prompt.estimator.attention.frames == 2 * PROMPT


def test_cache_counts_frames(flow, voice, token, noise):
    prompt = prefill(flow, **voice, noise=noise, steps=4)
    _, cache = stream(flow, prompt, token, noise, [15, 25, 1])
    assert cache.frames == cache.estimator.attention.frames == 2 * (PROMPT + 41)
    assert cache.encoder.frames.frames == 2 * (PROMPT + 41)
    assert cache.encoder.tokens.frames == PROMPT + 41
    assert cache.estimator.conv.shape[0] == 4
    attention = cache.estimator.attention
    assert attention.nbytes == 2 * attention.keys.numel() * 4


def test_a_later_chunk_does_not_change_the_frames_before_it(flow, voice, token, noise):
    prompt = prefill(flow, **voice, noise=noise)
    other = token.clone()
    other[:, 18:] = (other[:, 18:] + 1) % flow.config.vocab  # after the first chunk and its look-ahead
    mel, _ = stream(flow, prompt, token, noise, [15, 35])
    changed, _ = stream(flow, prompt, other, noise, [15, 35])
    assert torch.equal(mel[:, :, :30], changed[:, :, :30])
    assert not torch.equal(mel[:, :, 30:], changed[:, :, 30:])


def test_trimmed_cache_keeps_the_prompt_and_the_most_recent_frames_in_time_order(flow, voice, token, noise):
    _, cache = stream(flow, prefill(flow, **voice, noise=noise), token, noise, [15, 25, 10])
    trimmed = cache.trimmed(20)
    for kept, full in (
        (trimmed.estimator.attention.keys, cache.estimator.attention.keys),
        (trimmed.estimator.attention.values, cache.estimator.attention.values),
    ):
        assert torch.equal(kept[..., : 2 * PROMPT, :], full[..., : 2 * PROMPT, :])
        assert torch.equal(kept[..., 2 * PROMPT :, :], full[..., -20:, :])
    assert trimmed.frames == cache.frames
    assert trimmed.encoder is cache.encoder
    assert trimmed.trimmed(20).estimator.attention.frames == 2 * PROMPT + 20


def test_cached_frames_are_in_time_order(flow, voice, token, noise):
    prompt = prefill(flow, **voice, noise=noise)
    _, one = stream(flow, prompt, token, noise, [15])
    start = prompt.estimator.attention.frames
    assert torch.equal(one.estimator.attention.keys[..., :start, :], prompt.estimator.attention.keys)


def test_a_tail_longer_than_the_stream_changes_nothing(flow, voice, token, noise):
    prompt = prefill(flow, **voice, noise=noise)
    untrimmed, _ = stream(flow, prompt, token, noise, [15, 25, 10])
    trimmed, _ = stream(flow, prompt, token, noise, [15, 25, 10], tail=100)
    assert torch.equal(trimmed, untrimmed)


def test_a_trimmed_stream_stays_close_to_the_untrimmed_one(flow, voice, token, noise):
    prompt = prefill(flow, **voice, noise=noise)
    untrimmed, _ = stream(flow, prompt, token, noise, [15, 15, 20])
    trimmed, cache = stream(flow, prompt, token, noise, [15, 15, 20], tail=40)
    assert cache.estimator.attention.frames == 2 * PROMPT + 40
    # The first two chunks attend to every frame; only the third lacks the 20 that were trimmed.
    assert torch.equal(trimmed[:, :, :60], untrimmed[:, :, :60])
    difference = (trimmed - untrimmed)[:, :, 60:].abs().max()
    # Noise from the wrong frame, or a lost prompt, would change the mel by its own magnitude.
    assert 1e-4 < difference < 0.25 * untrimmed.abs().max()


def test_a_single_new_token_continues_a_stream(flow, voice, token, noise):
    prompt = prefill(flow, **voice, noise=noise)
    mel, cache = stream(flow, prompt, token, noise, [5, 1, 1, 4])
    assert mel.shape == (2, MEL, 22)
    assert mel.isfinite().all()
    assert cache.encoder.lookahead.shape == prompt.encoder.lookahead.shape


def estimator_inputs() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(10)
    x, mu, condition = (torch.randn(2, MEL, 14, generator=random) for _ in range(3))
    speaker = torch.randn(2, MEL, generator=random)
    return {"x": x, "t": torch.tensor([0.3, 0.6]), "mu": mu, "speaker": speaker, "condition": condition}


def frames_of(inputs: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    return {name: tensor[..., start:stop] if tensor.ndim == 3 else tensor for name, tensor in inputs.items()}


def test_estimator_in_one_chunk_equals_the_whole(flow):
    estimator, inputs = flow.decoder.estimator, estimator_inputs()
    cache = estimator.empty_cache(steps=1, rows=2)[0].with_room(14)
    whole = estimator(**inputs, valid=torch.ones(2, 1, 14, dtype=torch.bool))
    torch.testing.assert_close(estimator.forward_chunk(**inputs, cache=cache), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("boundaries", [[0, 5, 14], [0, 1, 2, 14], [0, 12, 13, 14]])
def test_first_layer_keys_do_not_depend_on_how_a_stream_is_divided(flow, boundaries):
    estimator, inputs = flow.decoder.estimator, estimator_inputs()
    whole = estimator.empty_cache(steps=1, rows=2)[0].with_room(14)
    estimator.forward_chunk(**inputs, cache=whole)
    cache = estimator.empty_cache(steps=1, rows=2)[0]
    for start, stop in itertools.pairwise(boundaries):
        cache = cache.with_room(stop - start)
        estimator.forward_chunk(**frames_of(inputs, start, stop), cache=cache)
    torch.testing.assert_close(cache.attention[0].keys, whole.attention[0].keys, atol=1e-5, rtol=0)
    torch.testing.assert_close(cache.attention[0].values, whole.attention[0].values, atol=1e-5, rtol=0)


def test_padding_does_not_reach_the_valid_frames_of_the_estimator(flow):
    estimator, inputs = flow.decoder.estimator, estimator_inputs()
    valid = (torch.arange(14) < 9).expand(2, 1, 14)
    changed = {name: tensor.clone() for name, tensor in inputs.items()}
    for name in ("x", "mu", "condition"):
        changed[name][..., 9:] = 5.0
    first, second = (estimator(**tensors, valid=valid)[..., :9] for tensors in (inputs, changed))
    torch.testing.assert_close(first, second, atol=1e-5, rtol=0)


def test_offline_rows_of_a_batch_equal_the_same_rows_alone(flow, voice, token, noise):
    whole = torch.cat([voice["prompt_token"], token], dim=1)
    inputs = {
        "token": whole,
        "token_len": torch.full((2,), whole.shape[1]),
        "prompt_feat": voice["prompt_feat"],
        "prompt_feat_len": torch.tensor([2 * PROMPT, 2 * PROMPT - 4]),
        "embedding": voice["embedding"],
    }
    frames = 2 * whole.shape[1]
    batch = inference(flow, **inputs, noise=noise[:, :, :frames])
    assert batch.shape == (2, MEL, frames)
    for index in range(2):
        alone = inference(flow, **row(inputs, index), noise=noise[:, :, :frames])
        torch.testing.assert_close(alone, batch[index : index + 1], atol=2e-5, rtol=0)
