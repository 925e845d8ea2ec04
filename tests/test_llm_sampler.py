import numpy as np
import pytest

from common.llm.base import Sampling
from common.llm.sampler import TokenSampler

CANDIDATES = np.arange(10, 16)
LOGITS = np.full(20, 50.0, np.float32)  # what is no candidate is far likelier
LOGITS[10:16] = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def make_sampler(*, prompt_ids=(), end_ids=(), min_tokens=0, **sampling):
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "seed": 0} | sampling
    return TokenSampler(Sampling(**sampling), CANDIDATES, prompt_ids=prompt_ids, end_ids=end_ids, min_tokens=min_tokens)


def drawn(sampler, n=2000):
    return np.array([sampler.sample(LOGITS) for _ in range(n)])


def test_frequencies_follow_the_softmax_over_the_candidates():
    expected = np.exp(LOGITS[10:16]) / np.exp(LOGITS[10:16]).sum()
    found = np.bincount(drawn(make_sampler(), 20_000), minlength=16)[10:] / 20_000
    np.testing.assert_allclose(found, expected, atol=0.015)


def test_temperature_zero_takes_the_likeliest():
    assert set(drawn(make_sampler(temperature=0), 5)) == {15}


def test_a_high_temperature_flattens():
    assert np.bincount(drawn(make_sampler(temperature=10.0)), minlength=16)[10] > 150


def test_top_k_keeps_the_k_likeliest():
    assert set(drawn(make_sampler(top_k=2, temperature=5.0))) == {14, 15}


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, {15}), (0.7, {14, 15}), (0.95, {13, 14, 15}), (1e-6, {15})])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    assert set(drawn(make_sampler(top_p=top_p))) == kept  # softmax: .63 .23 .09 .03 ...


def test_repetition_penalty_counts_prompt_and_drawn_tokens():
    assert make_sampler(temperature=0, repetition_penalty=2.0, prompt_ids=[15]).sample(LOGITS) == 14
    assert list(drawn(make_sampler(temperature=0, repetition_penalty=2.0), 4)) == [15, 14, 13, 15]


def test_repetition_penalty_lowers_negative_logits_too():
    sampler = make_sampler(temperature=0, repetition_penalty=2.0, prompt_ids=[15])
    assert sampler.sample(LOGITS - 60) == 14


def test_end_tokens_wait_for_the_minimum():
    assert list(drawn(make_sampler(temperature=0, end_ids=[15], min_tokens=2), 4)) == [14, 14, 15, 15]


def test_the_seed_alone_decides_the_draws():
    assert (drawn(make_sampler(seed=3), 50) == drawn(make_sampler(seed=3), 50)).all()
    assert (drawn(make_sampler(seed=3), 50) != drawn(make_sampler(seed=4), 50)).any()


def test_rounding_of_near_equal_logits_does_not_change_the_draw():
    rng = np.random.default_rng(0)
    near = LOGITS * 0
    first, second = make_sampler(seed=1), make_sampler(seed=1)
    for _ in range(200):
        assert first.sample(near + rng.normal(0, 1e-7, 20)) == second.sample(near + rng.normal(0, 1e-7, 20))


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 2**31},
        {"repetition_penalty": 0.0},
        {"max_tokens": 0},
        {"max_tokens": 10**12},
        {"seed": -1},
        {"seed": 2**31},
    ],
)
def test_sampling_out_of_range_is_refused_by_name_and_value(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"{name} {value!r} is out of range: "):
        Sampling(**bad)
