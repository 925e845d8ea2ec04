"""serve.py as the main process of a container: health page, metrics, traces, a stop that loses no stream, and a model
that dies beside another one."""

import asyncio
import base64
import gzip
import os
import re
import secrets
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from cosyvoice_triton import stacks
from cosyvoice_triton.monitoring import tracing
from cosyvoice_triton.monitoring.health import FAILING
from cosyvoice_triton.monitoring.metrics import ENDED, LIVE, STREAMS, sum_of
from cosyvoice_triton.server.tritonserver import free_port
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.gateway import wait_for
from tests.support.http_servers import Page, http_server
from tests.support.serve_process import ServeProcess, StreamResult, get, rendered, serve_process, speak_at_once
from tests.support.server_requests import TEXT, VOICE, VOICE_TEXT

pytestmark = pytest.mark.server

LONG = "word " * 120  # about 7 s of audio
CALLER = "00f067aa0ba902b7"


Traces = dict[str, list[Any]]  # spans by trace


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[str, Traces]]:
    """OTLP over HTTP: its URL, and what it has got."""
    traces: Traces = defaultdict(list)

    class Spans(Page):
        def answer(self) -> None:
            zipped, body = self.headers["Content-Encoding"] == "gzip", self.body()
            sent = ExportTraceServiceRequest.FromString(gzip.decompress(body) if zipped else body)
            for span in (span for each in sent.resource_spans for scope in each.scope_spans for span in scope.spans):
                traces[span.trace_id.hex()].append(span)
            self.reply()

    with http_server(Spans) as server:
        yield server.url, traces


@pytest.fixture(scope="module")
def repository(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rendered(demo_models, tmp_path_factory.mktemp("serve") / "repository")


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """The test of SIGTERM, its last one, ends it. The limit is for the streams that are running then."""
    options = ("--notice-seconds", "1", "--drain-seconds", "200")
    with serve_process(repository, tmp_path_factory.mktemp("log") / "log", *options) as running:
        yield running


def speak(server: ServeProcess, text: str) -> StreamResult:
    return asyncio.run(speak_at_once(f"127.0.0.1:{server.grpc}", 1, text))[0]


def while_two_speak(server: ServeProcess, meanwhile: Callable[[], object]) -> list[str | None]:
    """The errors of two long streams that are counted as live when `meanwhile` is called."""

    def once_counted() -> None:
        wait_for(lambda: sum_of(server.page(), LIVE.name) == 2)  # the page is up to a quarter of a second old
        meanwhile()

    results = asyncio.run(speak_at_once(f"127.0.0.1:{server.grpc}", 2, LONG, once_counted))
    return [result.error for result in results]


def test_the_metrics_page_counts_requests_and_audio(server: ServeProcess) -> None:
    assert server.readiness() == (200, "ready")
    assert speak(server, TEXT).error is None and speak(server, " ").error is not None
    # The models publish their numbers four times a second, each in its own time.
    wait_for(lambda: sum_of(page := server.page(), ENDED.name) == 2 and sum_of(page, "tts_token2wav_streams_live") == 0)
    page = server.page()
    lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith("tts_")]
    counted = {name: float(value) for name, _, value in lines}
    labels = 'model="cosyvoice2_dit",model_instance="cosyvoice2_dit_0_0"'
    assert counted[f'tts_requests_total{{{labels},outcome="ok"}}'] == 1, page
    assert counted[f'tts_requests_total{{{labels},outcome="invalid"}}'] == 1
    assert sum_of(page, ENDED.name) == 2 and sum_of(page, LIVE.name) == 0
    assert counted[f"tts_audio_seconds_total{{{labels}}}"] > 0.1
    assert counted[f"tts_first_chunk_seconds_count{{{labels}}}"] == 1
    assert sum_of(page, "tts_token2wav_chunks_total") >= sum_of(page, "tts_token2wav_batches_total") > 0
    assert sum_of(page, "tts_token2wav_streams_live") == 0 and sum_of(page, "tts_token2wav_cache_bytes") > 0
    assert get(f"http://127.0.0.1:{server.health}/live") == (200, "live")
    assert get(f"http://127.0.0.1:{server.health}/other")[0] == 404
    for method, status, length in (("HEAD", 200, "5"), ("OPTIONS", 204, None)):
        answer = httpx.request(method, f"http://127.0.0.1:{server.health}/live")
        assert (answer.status_code, answer.headers.get("content-length"), answer.content) == (status, length, b"")


def test_after_sigterm_requests_are_refused_and_running_ones_end(server) -> None:
    """The health page reports the stop at once. How long new ones are accepted then: tests/process/test_health.py."""
    late: list[StreamResult] = []

    def stop() -> None:
        server.terminate()
        wait_for(lambda: server.readiness() == (503, "stopping"))
        while not late or late[-1].error is None:
            late.append(speak(server, TEXT))

    assert while_two_speak(server, stop) == [None, None]
    assert "is shutting down" in str(late[-1].error) and late[-1].samples == 0
    assert server.process.wait(60) == 0
    assert "all requests ended" in (server.process.stderr.read() if server.process.stderr else "")


@pytest.fixture(scope="module")
def traced(repository: Path, collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """The test of the limit ends it."""
    options = ("--drain-seconds", "1", "--speech-port", str(free_port()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector[0])
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with serve_process(repository, tmp_path_factory.mktemp("traced") / "log", *options) as running:
            yield running


def test_the_callers_trace_goes_on_to_the_first_chunk(traced: ServeProcess, collector: tuple[str, Traces]) -> None:
    traces, sampled, unsampled = collector[1], secrets.token_hex(16), secrets.token_hex(16)
    (page,) = re.findall(r" page (\S+)", traced.printed)
    voice = {"ref_audio": base64.b64encode(VOICE.read_bytes()).decode(), "ref_text": VOICE_TEXT}
    for trace, flag in ((unsampled, "00"), (sampled, "01")):
        headers = {tracing.TRACEPARENT: f"00-{trace}-{CALLER}-{flag}"}
        answer = httpx.post(f"{page}v1/audio/speech", json={"input": TEXT, **voice}, headers=headers, timeout=60)
        assert answer.status_code == 200 and answer.content
    wait_for(lambda: "speech service" in {span.name for span in traces[sampled]})
    spans = traces[sampled]
    names = {span.span_id.hex(): span.name for span in spans} | {CALLER: "caller"}
    family = sorted((names[span.parent_span_id.hex()], span.name) for span in spans)
    assert family == [
        ("caller", "speech service"),
        ("llm", "tensorrt_llm"),
        ("orchestrator", "llm"),
        *[("orchestrator", "token2wav_dit")] * 3,  # a place, the voice, the first chunk; later chunks add nothing
        ("speech service", "orchestrator"),
    ]
    (orchestrator,) = (span for span in spans if span.name == "orchestrator")
    assert [event.name for event in orchestrator.events][-2:] == ["tokens", "audio"]
    assert unsampled not in traces


def test_streams_that_exceed_the_drain_limit_end_with_an_error(traced: ServeProcess) -> None:
    assert all(while_two_speak(traced, traced.terminate))
    assert traced.process.wait(60) == 0
    stacks = traced.log.read_text()  # of what keeps them
    assert "(most recent call first)" in stacks and "common/cosyvoice_triton/triton_io/requests.py" in stacks
    assert "common/cosyvoice_triton/token2wav/serving/service.py" in stacks


FIRST, SECOND = stacks.DIT.token2wav, f"{stacks.DIT.token2wav}_1"


def test_a_replica_that_dies_takes_only_its_own_streams_and_the_last_one_the_server(demo_models, tmp_path: Path):
    """Streams are spread over two token2wav models."""
    repository = rendered(demo_models, tmp_path / "repository", token2wav_gpus="0 1", max_streams="4")
    with serve_process(repository, tmp_path / "log") as server:
        address = f"127.0.0.1:{server.grpc}"
        assert server.readiness() == (200, "ready")

        def values(name: str) -> list[float]:
            found = re.findall(rf'^{name}{{model="({FIRST}|{SECOND})",.* (\S+)$', server.page(), re.MULTILINE)
            return [float(value) for _, value in sorted(found)]

        def spread() -> None:
            wait_for(lambda: values(STREAMS.name) == [2, 2])
            os.kill(server.process_of(SECOND), signal.SIGKILL)

        results = asyncio.run(speak_at_once(address, 4, LONG, spread))
        errors = [result.error for result in results if result.error]
        assert len(errors) == 2 and all(SECOND in error for error in errors), errors
        lost = f"the process of model {SECOND} has died"
        wait_for(lambda: server.readiness() == (200, f"ready\n{lost}"))
        wait_for(lambda: values(FAILING.name) == [0, 1])
        assert [result.error for result in asyncio.run(speak_at_once(address, 3, TEXT))] == [None] * 3
        os.kill(server.process_of(FIRST), signal.SIGKILL)
        assert server.process.wait(60) == 1 and server.process.stderr is not None
        said = server.process.stderr.read()
        assert f"the process of model {FIRST} has died; tritonserver has to be restarted" in said
