"""serve.py as the main process of a container: health page, metrics, and a stop that loses no stream."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import async_timeout
import pytest
import tritonclient.grpc.aio as triton

from common.process.metrics import ENDED, LIVE, sum_of
from common.server.serving import cache_option
from tests.support.serve_process import ServeProcess, StreamResult, get, rendered, serve_process, synthesize

pytestmark = pytest.mark.server

LONG = "word " * 90
SHORT = "A short sentence."


@pytest.fixture(scope="module")
def repository(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rendered(demo_models, tmp_path_factory.mktemp("serve") / "repository")


@pytest.fixture
def server(repository: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    with serve_process(repository, tmp_path / "log", *getattr(request, "param", ())) as running:
        yield running


async def synthesize_while_it_stops(server: ServeProcess, streams: int) -> tuple[list[StreamResult], StreamResult]:
    """Long streams, SIGTERM once all have begun, then a late stream: their results and that of the late one."""
    async with triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as connection:
        outcomes = [StreamResult() for _ in range(streams)]
        speaking = [asyncio.create_task(synthesize(connection, LONG, outcome)) for outcome in outcomes]
        await asyncio.gather(*(outcome.begun.wait() for outcome in outcomes))
        assert sum_of(server.page(), LIVE.name) >= streams - 1  # the page is a quarter of a second old
        server.terminate()
        await asyncio.sleep(0.5)
        assert server.readiness() == (503, "stopping")
        late = await synthesize(connection, SHORT, StreamResult())
        await asyncio.gather(*speaking)
    return outcomes, late


def test_sigterm_refuses_new_streams_and_lets_running_ones_end(server: ServeProcess) -> None:
    assert server.readiness() == (200, "ready")
    outcomes, late = asyncio.run(synthesize_while_it_stops(server, 3))
    assert late.error is not None and "is shutting down" in late.error and late.samples == 0
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert server.process.wait(20) == 0
    assert "all requests ended" in (server.process.stderr.read() if server.process.stderr else "")


@pytest.mark.parametrize("server", [("--drain-seconds", "1")], indirect=True)
def test_streams_that_exceed_the_drain_limit_end_with_an_error(server: ServeProcess) -> None:
    begun = time.monotonic()
    outcomes, _ = asyncio.run(synthesize_while_it_stops(server, 3))
    assert all(outcome.error is not None for outcome in outcomes)
    assert server.process.wait(20) == 0
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("server", [("--notice-seconds", "5")], indirect=True)
def test_the_health_page_reports_the_stop_before_any_request_is_refused(server: ServeProcess) -> None:
    async def run() -> StreamResult:
        async with triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as connection:
            server.terminate()
            async with async_timeout.timeout(60):
                while server.readiness() != (503, "stopping"):
                    await asyncio.sleep(0.05)
            return await synthesize(connection, SHORT, StreamResult())

    assert asyncio.run(run()).error is None
    assert server.process.wait(20) == 0


def test_the_metrics_page_counts_requests_and_audio(server: ServeProcess) -> None:
    async def run() -> None:
        async with triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as connection:
            assert (await synthesize(connection, SHORT, StreamResult())).error is None
            assert (await synthesize(connection, " ", StreamResult())).error is not None

    asyncio.run(run())
    time.sleep(1)
    page = server.page()
    counted = {line.split(" ")[0]: float(line.split(" ")[1]) for line in page.splitlines() if line.startswith("tts_")}
    labels = 'model="cosyvoice2_dit",model_instance="cosyvoice2_dit_0_0"'
    assert counted[f'tts_requests_total{{{labels},outcome="ok"}}'] == 1, page
    assert counted[f'tts_requests_total{{{labels},outcome="invalid"}}'] == 1
    assert sum_of(page, ENDED.name) == 2 and sum_of(page, LIVE.name) == 0
    assert counted[f"tts_audio_seconds_total{{{labels}}}"] > 0.1
    assert counted[f"tts_first_chunk_seconds_count{{{labels}}}"] == 1
    assert sum_of(page, "tts_vocoder_chunks_total") >= sum_of(page, "tts_vocoder_batches_total") > 0
    assert sum_of(page, "tts_vocoder_streams_live") == 0 and sum_of(page, "tts_vocoder_cache_bytes") > 0
    assert get(f"http://127.0.0.1:{server.health}/live") == (200, "live")
    assert get(f"http://127.0.0.1:{server.health}/other")[0] == 404
    for method, status, length in (("HEAD", 200, "5"), ("OPTIONS", 204, None)):
        with urlopen(Request(f"http://127.0.0.1:{server.health}/live", method=method), timeout=10) as answer:
            assert (answer.status, answer.headers["content-length"], answer.read()) == (status, length, b"")


def test_the_response_cache_is_in_memory_or_in_redis() -> None:
    assert cache_option("", 64) == "local,size=67108864"
    assert cache_option("cache", 64) == "redis,host=cache,port=6379"
    assert cache_option("cache:7000", 64) == "redis,host=cache,port=7000"
    with pytest.raises(ValueError, match="':1' is not HOST"):
        cache_option(":1", 64)
