"""OpenTelemetry traces: where the time of a request goes, across the speech service and the models.

Off unless OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT names a collector (OTLP over HTTP); nothing
of OpenTelemetry is imported then. Its other variables mean what they mean everywhere: OTEL_TRACES_SAMPLER chooses which
requests are traced. A request names its caller's span by the header or Triton parameter `traceparent` (W3C).
"""

import functools
import logging
import os
from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Any

logger = logging.getLogger(__name__)

TRACEPARENT = "traceparent"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

# The traceparent of the span that this task works for, "" for none: what its requests to others carry.
current: ContextVar[str] = ContextVar(TRACEPARENT, default="")


class Span:
    """A part of a trace; without `recorded`, while traces are off, nothing.

    `with span("llm") as part:` makes it the `current` one of the block. Not in an async generator, whose parts may run
    in several contexts.
    """

    def __init__(self, recorded: Any = None, traceparent: str = "") -> None:
        self._recorded = recorded
        self._traceparent = traceparent
        self._before: Token[str] | None = None

    def event(self, name: str) -> None:
        """Add a moment of this name: now."""
        if self._recorded is not None:
            self._recorded.add_event(name)

    def end(self, error: BaseException | None = None) -> None:
        """End it, as failed if there is an error. The end of a `with` block does that too."""
        if self._recorded is None:
            return
        if error is not None:
            self._recorded.record_exception(error)
        self._recorded.end()

    def __enter__(self) -> "Span":
        if self._recorded is not None:
            self._before = current.set(self._traceparent)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._before is not None:
            current.reset(self._before)
        self.end(error)


OFF = Span()


def span(name: str, parent: str | None = None) -> Span:
    """Begin a span. parent: the traceparent of the span that it is part of, by default the `current` one; "" or an
    invalid one begins a trace."""
    if (tracer := _tracer()) is None:
        return OFF
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers, written = TraceContextTextMapPropagator(), dict[str, str]()
    context = headers.extract({TRACEPARENT: current.get() if parent is None else parent})
    recorded = tracer.start_span(name, context=context)
    headers.inject(written, context=set_span_in_context(recorded))
    return Span(recorded, written.get(TRACEPARENT, ""))


def child(name: str, parameters: Mapping[str, Any]) -> Span:
    """Begin a span of a request with these parameters, if they name its caller's."""
    return span(name, str(parameters[TRACEPARENT])) if TRACEPARENT in parameters else OFF


def carried() -> dict[str, str]:
    """Return what a request to others carries, as parameters or headers; nothing outside of a span."""
    return {TRACEPARENT: value} if (value := current.get()) else {}


def is_on() -> bool:
    """Return whether requests are traced."""
    return _tracer() is not None


def flush() -> None:
    """Send the last spans, before the process ends."""
    if is_on():
        _provider().shutdown()


@functools.cache
def _tracer() -> Any:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not any(map(os.environ.get, _ENDPOINTS)):
        return None
    try:
        return _provider().get_tracer("cosyvoice_triton")
    except ImportError as error:
        logger.warning("%s is set, but %s: pip install 'cosyvoice-triton[traces]'", _ENDPOINTS[0], error)
        return None


@functools.cache
def _provider() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    os.environ.setdefault("OTEL_SERVICE_NAME", "cosyvoice-triton")
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
