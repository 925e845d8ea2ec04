"""The DiT's estimator in chunks and over padding. tests/token2wav/test_chunks_equal_whole.py has the whole flow."""

from pathlib import Path

import pytest
import torch

from tests.parity import flow_dit
from tests.parity.fixture import Fixture

GOLDEN = Path(__file__).parents[1] / "assets" / "golden"
MEL = 80


@pytest.fixture(scope="module")
def flow():
    return flow_dit.build(Fixture(GOLDEN / "item6d_stepaudio2_flow_streaming.json"))


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


def test_padding_does_not_reach_the_valid_frames_of_the_estimator(flow):
    estimator, inputs = flow.decoder.estimator, estimator_inputs()
    valid = (torch.arange(14) < 9).expand(2, 1, 14)
    changed = {name: tensor.clone() for name, tensor in inputs.items()}
    for name in ("x", "mu", "condition"):
        changed[name][..., 9:] = 5.0
    first, second = (estimator(**tensors, valid=valid)[..., :9] for tensors in (inputs, changed))
    torch.testing.assert_close(first, second, atol=1e-5, rtol=0)


def test_a_chunk_leaves_the_cache_that_it_continues_as_it_was(flow):
    """Streams share the cache of their prompt."""
    estimator, inputs = flow.decoder.estimator, estimator_inputs()
    prompt = estimator.empty_cache(steps=1, rows=2)[0].with_room(5)
    estimator.forward_chunk(**frames_of(inputs, 0, 5), cache=prompt)
    keys, conv = prompt.attention.keys.clone(), prompt.conv.clone()
    estimator.forward_chunk(**frames_of(inputs, 5, 14), cache=prompt.with_room(9))
    assert torch.equal(prompt.attention.keys, keys) and torch.equal(prompt.conv, conv)
