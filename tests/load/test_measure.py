"""Figures of runs with fixed outcomes, so that every expected figure is known."""

import numpy as np
import pytest
from cosyvoice_triton.audible import leading_silence
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load.measure import RequestOutcome, Run, distribution
from cosyvoice_triton.playback import PLAYER_SECONDS


def outcome(
    arrivals: tuple[float, ...],
    seconds: tuple[float, ...],
    error: str = "",
    timeline: tuple[tuple[str, float], ...] = (),
    total: float | None = None,
    silence: float | None = None,
) -> RequestOutcome:
    samples = tuple(int(length * SAMPLE_RATE) for length in seconds)
    total = total if total is not None else arrivals[-1] if arrivals else 0.0
    return RequestOutcome("a", "s:1", 0.0, arrivals, samples, total, error, timeline, silence)


@pytest.mark.parametrize(
    ("arrivals", "gap", "slack"),
    [
        ((0.1, 0.6, 1.2), 0.0, PLAYER_SECONDS - 0.1),
        ((0.1, 1.0, 1.2), 0.4 - PLAYER_SECONDS, PLAYER_SECONDS - 0.4),  # as long as the chunk's delay
        ((0.0, 1.0, 1.75), 0.25, -0.25),  # gaps do not add up: each delays what follows
        ((3.0,), 0.0, np.inf),  # a single chunk
    ],
)
def test_a_late_chunk_makes_a_gap(arrivals: tuple[float, ...], gap: float, slack: float) -> None:
    assert outcome(arrivals, (0.5,) * len(arrivals)).played() == (pytest.approx(gap), pytest.approx(slack))


def test_without_a_buffer_every_late_chunk_is_a_gap() -> None:
    answer = outcome((0.1, 0.7, 0.9), (0.5, 0.5, 0.5))
    assert answer.played()[0] == 0 and answer.played(buffer=0.0)[0] == pytest.approx(0.1)
    figures = Run(outcomes=[answer], elapsed=1.0).figures()
    assert (figures["share_without_gap"], figures["unbuffered_share_without_gap"]) == (1.0, 0.0)
    assert figures["unbuffered_worst_gap_ms"] == pytest.approx(100)


def test_leading_silence_counts_until_the_first_audible_sample_is_played() -> None:
    assert outcome((0.1, 0.4), (0.5, 0.5), silence=0.2).audible() == pytest.approx(0.3)
    assert outcome((0.1, 0.4), (0.5, 0.5), silence=0.7).audible() == pytest.approx(0.8)
    assert outcome((0.1, 0.9), (0.5, 0.5), silence=0.7).audible() == pytest.approx(1.1), "after a gap of 0.3 s"
    silent = outcome((0.1,), (0.5,), silence=None)
    assert silent.audible() is None
    figures = Run(outcomes=[silent, outcome((0.1,), (0.5,), silence=0.0)], elapsed=1.0).figures()
    assert figures["inaudible"] == 1 and figures["audible_ms"]["mean"] == pytest.approx(100)
    assert figures["silence_ms"]["mean"] == 0


@pytest.mark.parametrize(("level", "begins"), [(0.0, None), (0.0007, None), (0.0009, 0.5)])
def test_audible_is_what_is_at_most_45_db_below_speech_for_two_windows(level: float, begins: float | None) -> None:
    """A sine of amplitude 0.0008 has a level of -65 dBFS, whatever its mean is."""
    waveform = np.full(SAMPLE_RATE, 0.1, np.float32)
    waveform[SAMPLE_RATE // 2 :] += level * np.sin(np.arange(SAMPLE_RATE // 2) * 0.1, dtype=np.float32)
    silence = leading_silence(waveform)
    assert silence == begins if begins is None else silence == pytest.approx(begins, abs=0.011)


def test_the_stages_sum_to_the_latency_of_the_first_chunk() -> None:
    stages = ("voice", "prompt_cache", "llm", "tokens", "audio", "audio")
    timeline = tuple(zip(stages, (0.02, 0.05, 0.04, 0.1, 0.14, 0.5), strict=True))
    shares = outcome((0.15, 0.6), (0.5, 0.5), timeline=timeline).stages()
    assert list(shares) == ["voice", "llm", "prompt_cache", "tokens", "audio", "transport"]
    assert sum(shares.values()) == pytest.approx(0.15)
    assert shares["llm"] == pytest.approx(0.02) and shares["transport"] == pytest.approx(0.01)


def test_figures_cover_answered_requests_and_count_the_others() -> None:
    good = [outcome((0.1, 0.3, 0.4), (1, 1, 1)), outcome((0.2, 0.6), (1, 1))]
    bad = outcome((9.0,), (1,), error="the server answered with an error: no")
    run = Run(outcomes=[*good, bad], elapsed=2.0, unsent=3)
    figures = run.figures()
    assert not run.complete
    assert (figures["requests"], figures["errors"], figures["unsent"]) == (3, 1, 3)
    assert figures["rtf"] == pytest.approx(2.0 / 5) and figures["requests_per_second"] == 1.0
    assert figures["first_chunk_ms"]["mean"] == pytest.approx(150) and figures["first_chunk_ms"]["max"] == 200
    assert figures["second_chunk_ms"]["p50"] == pytest.approx(300)
    assert figures["later_chunk_ms"]["mean"] == pytest.approx(100)
    assert figures["share_without_gap"] == 1.0


def test_percentiles_and_variance_equal_those_of_numpy_in_milliseconds() -> None:
    values = np.random.default_rng(0).exponential(0.1, 1000)
    result = distribution(iter(values.tolist()))
    assert result is not None
    assert result["p95"] == pytest.approx(1000 * np.percentile(values, 95))
    assert result["variance"] == pytest.approx(1e6 * values.var())
