"""A request's trace, from the speech service to the models, as a collector gets it."""

import base64
import gzip
import json
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cosyvoice_triton.monitoring import tracing
from cosyvoice_triton.server.tritonserver import free_port
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.http_pages import Page, PageServer, http_server
from tests.support.serve_process import rendered, serve_process
from tests.support.server_requests import TEXT, VOICE, VOICE_TEXT
from tests.support.speech_fixtures import until

CALLER = "00f067aa0ba902b7"


class Collector(PageServer):
    """OTLP over HTTP; keeps the spans by trace."""

    traces: dict[str, list[Any]]


class _Spans(Page):
    server: Collector

    def answer(self) -> None:
        body = self.body()
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.server.traces.setdefault(span.trace_id.hex(), []).append(span)
        self.reply()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with http_server(_Spans, kind=Collector) as server:
        assert isinstance(server, Collector)
        server.traces = {}
        yield server


def speak(port: int, traceparent: str) -> None:
    voice = {"ref_audio": base64.b64encode(VOICE.read_bytes()).decode(), "ref_text": VOICE_TEXT}
    body = json.dumps({"input": TEXT, **voice}).encode()
    headers = {"Content-Type": "application/json", tracing.TRACEPARENT: traceparent}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/audio/speech", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.read()


@pytest.mark.server
def test_the_callers_trace_goes_on_to_the_first_chunk(
    demo_models: Path, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    repository = rendered(demo_models, tmp_path / "repository")
    port, sampled, unsampled = free_port(), secrets.token_hex(16), secrets.token_hex(16)
    with serve_process(repository, tmp_path / "log", "--speech-port", str(port)):
        speak(port, f"00-{unsampled}-{CALLER}-00")
        speak(port, f"00-{sampled}-{CALLER}-01")
        until(lambda: "speech service" in {span.name for span in collector.traces.get(sampled, [])})
    spans = collector.traces[sampled]
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
    assert unsampled not in collector.traces


def test_without_a_collector_nothing_is_imported() -> None:
    code = """
import sys
from cosyvoice_triton.monitoring import tracing
with tracing.span("a"), tracing.child("b", {"traceparent": "00"}) as b:
    b.event("c")
    assert tracing.carried() == {} and not tracing.is_on()
tracing.flush()
assert not any(name.startswith("opentelemetry") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"OTEL_SDK_DISABLED": "true", "PATH": ""})
