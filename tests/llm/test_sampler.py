import numpy as np
import pytest
from cosyvoice_triton.llm.engines.sampler import TokenSampler
from cosyvoice_triton.llm.interface import LengthRatios, LLMPrompt, Sampling

from tests.support.sampling_reference import CASES, WINDOWS, deviation, ras_probabilities

CANDIDATES = np.arange(10, 16)
LOGITS = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], np.float32)


def make_sampler(*, prompt_ids=(), end_ids=(), **sampling):
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "seed": 0} | sampling
    return TokenSampler(Sampling(**sampling), CANDIDATES, prompt_ids=prompt_ids, end_ids=end_ids)


def samples(sampler, n=2000):
    return np.array([sampler.sample(LOGITS) for _ in range(n)])


def test_frequencies_follow_the_softmax_over_the_candidates():
    expected = np.exp(LOGITS) / np.exp(LOGITS).sum()
    found = np.bincount(samples(make_sampler(), 20_000), minlength=16)[10:] / 20_000
    np.testing.assert_allclose(found, expected, atol=0.015)


def test_temperature_zero_takes_the_most_probable_token():
    assert set(samples(make_sampler(temperature=0), 5)) == {15}


def test_a_high_temperature_flattens_the_distribution():
    assert np.bincount(samples(make_sampler(temperature=10.0)), minlength=16)[10] > 150


def test_top_k_keeps_the_k_most_probable_tokens():
    assert set(samples(make_sampler(top_k=2, temperature=5.0))) == {14, 15}


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, {15}), (0.7, {14, 15}), (0.95, {13, 14, 15}), (1e-6, {15})])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    assert set(samples(make_sampler(top_p=top_p))) == kept  # softmax: .63 .23 .09 .03 ...


def test_repetition_penalty_counts_prompt_and_sampled_tokens():
    assert make_sampler(temperature=0, repetition_penalty=2.0, prompt_ids=[15]).sample(LOGITS) == 14
    assert list(samples(make_sampler(temperature=0, repetition_penalty=2.0), 4)) == [15, 14, 13, 15]


def test_repetition_penalty_lowers_negative_logits_too():
    sampler = make_sampler(temperature=0, repetition_penalty=2.0, prompt_ids=[15])
    assert sampler.sample(LOGITS - 60) == 14


def test_end_tokens_are_excluded_below_min_tokens():
    assert list(samples(make_sampler(temperature=0, end_ids=[15], min_tokens=2), 4)) == [14, 14, 15, 15]


def test_the_seed_determines_the_samples():
    assert (samples(make_sampler(seed=3), 50) == samples(make_sampler(seed=3), 50)).all()
    assert (samples(make_sampler(seed=3), 50) != samples(make_sampler(seed=4), 50)).any()


def test_rounding_of_near_equal_logits_does_not_change_the_sample():
    rng = np.random.default_rng(0)
    near = LOGITS * 0
    first, second = make_sampler(seed=1), make_sampler(seed=1)
    for _ in range(200):
        assert first.sample(near + rng.normal(0, 1e-7, 6)) == second.sample(near + rng.normal(0, 1e-7, 6))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tau", [0.1, 0.2])
def test_repetition_aware_sampling_has_upstreams_probabilities(case, tau):
    ras = {"top_p": 0.8, "top_k": 25}
    sampler = TokenSampler(
        Sampling(seed=3, temperature=1.0, repetition_penalty=1.0, ras_window=10, ras_tau=tau, **ras),
        np.arange(40),
        prompt_ids=(),
        end_ids=(),
    )
    expected, sampled = [], []
    for _ in range(1500):
        expected.append(ras_probabilities(CASES[case], sampled, window=10, tau=tau, **ras))
        sampled.append(sampler.sample(CASES[case]))
    assert deviation(expected, sampled) < 4.5


def test_a_token_of_nine_tenths_is_hardly_repeated():
    """Sampling the replacement from all tokens, the repeated one included, would repeat it 81 % of the time."""
    sampler = make_sampler(top_p=0.8, ras_window=10)
    logits = np.log([0.9, *[0.02] * 5])
    sampled = [sampler.sample(logits) for _ in range(1100)]
    assert np.flatnonzero(np.array(sampled) == 10).tolist() == list(range(0, 1100, 11))


@pytest.mark.parametrize(("window", "tau", "positions"), WINDOWS)
def test_the_window_ends_after_its_last_token(window, tau, positions):
    sampler = make_sampler(top_k=1, ras_window=window, ras_tau=tau)
    sampled = samples(sampler, positions[-1] + 1)
    assert np.flatnonzero(sampled == 15).tolist() == positions


def test_the_replacement_is_found_even_if_it_is_a_trillion_times_less_probable():
    sampler = make_sampler(top_k=1, ras_window=10)
    logits = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 2000.0])
    assert [sampler.sample(logits) == 15 for _ in range(3)] == [True, False, False]


def test_excluded_end_tokens_are_not_chosen_by_the_second_sample_either():
    sampler = make_sampler(top_p=0.5, ras_window=10, end_ids=[14], min_tokens=200)
    assert 14 not in samples(sampler, 200)
    assert 14 in samples(sampler, 200)


@pytest.mark.parametrize(
    ("text_tokens", "generated", "bounds"),
    [
        (1, 0, (2, 20)),
        (10, 0, (20, 200)),
        (100, 0, (200, 750)),
        (100, 150, (50, 750)),
        (100, 1900, (0, 100)),
        (100, 2000, (0, 1)),
        (500, 0, (750, 750)),
    ],
)
def test_the_length_of_the_text_limits_the_length_of_the_speech(text_tokens, generated, bounds):
    bounded = LengthRatios().bound(Sampling(), LLMPrompt("Hi", generated=[7] * generated), text_tokens)
    assert (bounded.min_tokens, bounded.max_tokens) == bounds


def test_a_text_of_few_tokens_may_last_twice_its_expected_duration():
    motorway = LLMPrompt("高速公路")  # 0.8 s, one token of Qwen2's vocabulary
    assert LengthRatios().bound(Sampling(), motorway, 1).max_tokens == 40
    assert LengthRatios(max=10).bound(Sampling(), motorway, 1).max_tokens == 20


@pytest.mark.parametrize("ratios", [(-1, 2), (3, 2), (0, 0), (0, float("inf")), (float("nan"), 2)])
def test_invalid_ratios_are_an_error(ratios):
    with pytest.raises(ValueError, match="token ratios"):
        LengthRatios(min=ratios[0], max=ratios[1])


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
        {"min_tokens": 751},
        {"ras_window": -1},
        {"ras_window": 65},
        {"ras_tau": 0.0},
        {"seed": -1},
        {"seed": 2**31},
    ],
)
def test_sampling_out_of_range_is_an_error_with_name_and_value(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"{name} {value!r} is out of range: "):
        Sampling(**bad)
