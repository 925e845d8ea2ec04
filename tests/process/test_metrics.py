"""The numbers that a model counts, and the page over all models."""

import asyncio
import os

import pytest
from cosyvoice_triton.errors import OverloadedError, UnavailableError
from cosyvoice_triton.monitoring import metrics
from cosyvoice_triton.monitoring.metrics import MetricsPublisher, RequestStats
from cosyvoice_triton.monitoring.metrics_file import MetricsFile, read


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (ValueError("a bad value"), "invalid"),
        (UnavailableError("full"), "unavailable"),
        (OverloadedError("9 listeners", 1.0), "refused"),
        (asyncio.CancelledError(), "cancelled"),
        (RuntimeError("a bug"), "error"),
    ],
)
def test_a_request_is_counted_by_its_outcome(error: BaseException | None, outcome: str) -> None:
    stats = RequestStats()
    try:
        with stats.request() as live:
            assert stats.values()[metrics.LIVE] == 1
            live.sent(1.0, 0.0)
            if error:
                raise error
    except BaseException as raised:
        assert raised is error
    values = stats.values()
    assert values[metrics.LIVE] == 0 and values[metrics.AUDIO] == 1
    assert {line.labels[0][1]: value for line, value in values.items() if line.name == metrics.ENDED.name} == {
        name: int(name == outcome) for name in metrics.OUTCOMES
    }


def test_histogram_buckets_are_cumulative() -> None:
    stats = RequestStats()
    for seconds in (0.01, 0.2, 99.0):
        with stats.request() as live:
            live.first_chunk = seconds
    values = stats.values()
    of_chunks = (line for line in values if line.name == metrics.FIRST_CHUNK.name and line.suffix == "_bucket")
    buckets = {line.labels[0][1]: values[line] for line in of_chunks}
    assert (buckets["0.05"], buckets["0.15"], buckets["0.2"], buckets["10.0"], buckets["+Inf"]) == (1, 1, 2, 2, 3)
    assert values[metrics.FIRST_CHUNK.sample("_count")] == 3
    assert values[metrics.FIRST_CHUNK.sample("_sum")] == pytest.approx(99.21)


def test_leading_silence_counts_until_the_first_audible_sample() -> None:
    stats = RequestStats()
    with stats.request() as live:
        live.sent(1.0, None)
        live.sent(2.0, 1.0)
        assert live.first_chunk is not None and live.first_audible == pytest.approx(live.first_chunk + 2, abs=0.02)
        live.sent(1.0, 0.0)
    values = stats.values()
    assert values[metrics.FIRST_AUDIBLE.sample("_count")] == 1
    assert values[metrics.FIRST_AUDIBLE.sample("_bucket", le="1.5")] == 0


def test_the_page_has_each_family_once_with_a_sample_per_instance(published) -> None:
    for name in ("m_0", "m_1"):
        instance = {"model_name": "m", "model_instance_name": name}
        MetricsPublisher(lambda: {metrics.QUEUED: 3, metrics.CHUNKS: 7}, instance).close()
    page = metrics.page(published)
    assert page.count("# TYPE tts_token2wav_chunks_queued gauge\n") == 1
    assert 'tts_token2wav_chunks_total{model="m",model_instance="m_1"} 7\n' in page
    assert metrics.sum_of(page, metrics.QUEUED.name) == 6 and metrics.sum_of(page, "tts_other") == 0


def test_a_writer_that_ends_in_the_middle_leaves_what_it_wrote_before(tmp_path, monkeypatch) -> None:
    path, write = tmp_path / "m", os.pwrite
    file = MetricsFile(path, b"first")
    file.write(b"second")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda descriptor, data, at: write(descriptor, data[:-1], at))
        file.write(b"third!")
    file.close()
    assert read(path) == (2, b"second")
    MetricsFile(path, b"of the next process").close()
    assert read(path) == (3, b"of the next process")
