"""Figures of runs with fixed outcomes, and their reports: upstream's keys, tables, counters of the servers."""

from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.audible import PLAYER_SECONDS, leading_silence
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load.measure import ModelTimes, RequestOutcome, Run, between
from cosyvoice_triton.load.report import closing_lines, markdown_tables, rtf_text, statistics_text

TIMELINE = (("voice", 0.01), ("llm", 0.02), ("prompt_cache", 0.03), ("tokens", 0.04), ("audio", 0.09))


def figures(mode: str = "streaming", label: int = 4, **changes: Any) -> dict[str, Any]:
    outcomes = [
        RequestOutcome(f"row-{n}", "s:1", 0.0, (0.1 + n / 1000, 0.3, 0.5), (12_000,) * 3, 0.6, timeline=TIMELINE)
        for n in range(100)
    ]
    return {"mode": mode, "label": label, **Run(outcomes, elapsed=30.0).figures(), **changes}


def values_of(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


def test_the_text_file_of_a_streaming_run_has_the_keys_and_units_of_upstream() -> None:
    values = values_of(rtf_text(figures()))
    assert values["Mode"] == "streaming" and values["RTF"] == "0.2000" and values["total_duration"] == "150.000 seconds"
    assert values["processing time"] == "30.000 seconds (0.01 hours)"
    assert values["average_first_chunk_latency_ms"] == "149.50"
    for name in ("total_request_latency", "first_chunk_latency", "second_chunk_latency"):
        assert {f"{name}_{share}_percentile_ms" for share in (50, 90, 95, 99)} <= values.keys()
        assert f"{name}_variance" in values


def test_the_text_file_of_an_offline_run_has_the_keys_of_upstream() -> None:
    values = values_of(rtf_text(figures("offline")))
    assert values["average_latency_ms"] == "600.00" and values["latency_99_percentile_ms"] == "600.00"
    assert not any("chunk" in key for key in values)


def test_the_report_of_a_run_without_answers_has_no_figures() -> None:
    nothing = {"mode": "streaming", "label": 1, **Run([], elapsed=0.0, unsent=3).figures()}
    assert "No first chunk latency data collected." in rtf_text(nothing)
    assert closing_lines(nothing) == ["0 requests answered, 0 failed, 3 not sent"]
    assert "| 1 | 0 | 0 | 0 | 3 |" in markdown_tables([nothing], "Concurrent Tasks")


def test_refusals_are_no_errors_and_their_time_is_reported() -> None:
    message = "unavailable: overloaded, retry after 3 s: token2wav_dit: listeners: 9, 2 end each second"
    outcomes = [RequestOutcome(str(n), "s", 0.0, (), (), 0.01 * n, message) for n in range(1, 4)]
    figures = {"mode": "streaming", "label": 1, **Run(outcomes, elapsed=1.0).figures()}
    assert (figures["requests"], figures["errors"], figures["refused"]) == (3, 0, 3)
    assert "| 1 | 3 | 20.00 | 29.00 | 30.00 |" in markdown_tables([figures], "Concurrent Tasks")
    assert Run(outcomes, elapsed=1.0).complete


def test_the_tables_equal_those_of_the_upstream_document() -> None:
    text = markdown_tables([figures(label=1), figures(label=8)], "Concurrent Tasks")
    percentiles = (
        "| Average (ms) | 50th Percentile (ms) | 90th Percentile (ms) | 95th Percentile (ms) | 99th Percentile"
    )
    assert f"| Concurrent Tasks | RTF {percentiles}" in text and f"| Concurrent Tasks {percentiles}" in text
    assert "| 8 | 0.2000 | 600.00 |" in text and "| 8 | 149.50 | 149.50 |" in text
    assert "| 1 | 100 | 0 | 0 | 0 | 100.0 % | 0 |" in text
    assert "| 10.0 / 10.0 | 10.0 / 10.0 | 10.0 / 10.0 | 10.0 / 10.0 | 50.0 / 50.0 |" in text


def test_a_late_client_is_reported() -> None:
    assert any("this client was 12 ms late" in line for line in closing_lines(figures(client_lag_p95_ms=12.0)))
    assert not any("late" in line for line in closing_lines(figures(client_lag_p95_ms=2.0)))


def test_requests_before_the_run_are_not_counted() -> None:
    before = [ModelTimes("s:1", "token2wav", requests=10, queue=1.0), ModelTimes("s:1", "idle", requests=2)]
    after = [ModelTimes("s:1", "token2wav", requests=14, queue=1.2), ModelTimes("s:1", "idle", requests=2)]
    (model,) = between(before, after)
    assert (model.name, model.requests) == ("token2wav", 4) and model.queue == pytest.approx(0.2)
    assert "mean queue time 50.00 ms" in statistics_text([model])


def outcome(
    arrivals: tuple[float, ...],
    seconds: tuple[float, ...],
    error: str = "",
    timeline: tuple[tuple[str, float], ...] = (),
    silence: float | None = None,
) -> RequestOutcome:
    samples = tuple(int(length * SAMPLE_RATE) for length in seconds)
    return RequestOutcome("a", "s:1", 0.0, arrivals, samples, arrivals[-1], error, timeline, silence)


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
    first = {"mean": 150, "p50": 150, "p90": 190, "p95": 195, "p99": 199, "max": 200, "variance": 50**2}
    assert figures["first_chunk_ms"] == pytest.approx(first)
    assert figures["second_chunk_ms"]["p50"] == pytest.approx(300)
    assert figures["later_chunk_ms"]["mean"] == pytest.approx(100)
    assert figures["share_without_gap"] == 1.0
