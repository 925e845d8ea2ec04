"""Reports of runs whose figures are known: upstream's keys, tables, counters of the servers."""

import asyncio
from typing import Any

import pytest
from cosyvoice_triton.load.measure import RequestOutcome, Run
from cosyvoice_triton.load.report import closing_lines, disaggregated_table, markdown_tables, rtf_text, statistics_text
from cosyvoice_triton.load.statistics import ModelTimes, between, token2wav_counters, token2wav_figures
from cosyvoice_triton.server.tritonserver import free_port

from tests.support.echo_server import echo_server
from tests.support.http_pages import Page, http_server

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
    assert "p50 20" in closing_lines(figures)[1] and "max 30 ms" in closing_lines(figures)[1]
    assert "| 1 | 3 | 20.00 |" in markdown_tables([figures], "Concurrent Tasks")
    counted = figures | {"vocoder": {"mean_wait_ms": 1.0, "mean_batch": 2.0, "refused": {"capacity": 2, "gaps": 1}}}
    assert "| 30.00 | capacity 2, gaps 1 |" in markdown_tables([counted], "Concurrent Tasks")
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


def test_the_disaggregated_table_has_the_documented_columns() -> None:
    row = figures(concurrent_task_per_instance=3, concurrent_tasks_per_gpu=4.5)
    head, _, line = disaggregated_table([row], gpus=3).splitlines()
    assert head.startswith("| token2wav_num_gpu | concurrent_task_per_instance | concurrent_tasks_per_gpu | avg (ms)")
    assert line.startswith("| 3 | 3 | 4.50 | 149.50 |")


def test_a_late_client_is_reported() -> None:
    assert any("this client was 12 ms late" in line for line in closing_lines(figures(client_lag_p95_ms=12.0)))
    assert not any("late" in line for line in closing_lines(figures(client_lag_p95_ms=2.0)))


def test_requests_before_the_run_are_not_counted() -> None:
    before = [ModelTimes("s:1", "token2wav", requests=10, queue=1.0), ModelTimes("s:1", "idle", requests=2)]
    after = [ModelTimes("s:1", "token2wav", requests=14, queue=1.2), ModelTimes("s:1", "idle", requests=2)]
    (model,) = between(before, after)
    assert (model.name, model.requests) == ("token2wav", 4) and model.queue == pytest.approx(0.2)
    assert "mean queue time 50.00 ms" in statistics_text([model])


def test_the_wait_and_batch_size_of_token2wav_are_means_over_its_instances() -> None:
    page = """
        # TYPE tts_token2wav_chunks_total counter
        tts_token2wav_chunks_total{model="token2wav_dit",instance="0"} 30
        tts_token2wav_chunks_total{model="token2wav_dit",instance="1"} 10
        tts_token2wav_batches_total{model="token2wav_dit",instance="0"} 10
        tts_token2wav_waited_seconds_total{model="token2wav_dit",instance="0"} 0.4
        tts_token2wav_refused_total{instance="0",model="token2wav_dit",reason="capacity"} 7
        tts_token2wav_refused_total{instance="1",model="token2wav_dit",reason="capacity"} 1
        tts_token2wav_refused_total{instance="0",model="token2wav_dit",reason="gaps"} 2
        tts_token2wav_refused_total{reason="rate"} 0
    """

    class Metrics(Page):
        def answer(self) -> None:
            self.reply(200, "\n".join(line.strip() for line in page.splitlines()).encode())

    with http_server(Metrics) as server:
        counters = asyncio.run(token2wav_counters([f"127.0.0.1:{server.server_port}"]))
    refused = {"refused capacity": 8, "refused gaps": 2, "refused rate": 0}
    assert counters == {"chunks": 40, "batches": 10, "waited_seconds": 0.4} | refused
    before = {"chunks": 20.0, "batches": 6.0, "waited_seconds": 0.2, "refused gaps": 2.0}
    figures = token2wav_figures(before, counters)
    assert figures and figures.pop("refused") == {"capacity": 8}
    assert figures == pytest.approx({"mean_wait_ms": 10.0, "mean_batch": 5.0})


def test_an_unreachable_metrics_page_gives_no_counters() -> None:
    assert asyncio.run(token2wav_counters([f"127.0.0.1:{free_port()}"])) == {}
    with echo_server() as port:
        assert asyncio.run(token2wav_counters([f"127.0.0.1:{port}"])) == {}
    assert token2wav_figures({}, {}) is None
