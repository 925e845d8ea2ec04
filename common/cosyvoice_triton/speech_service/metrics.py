"""Prometheus metrics, in a separate registry so that two services in one process do not mix."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_LATENCIES = (0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30)


class Metrics:
    """The metrics of one service."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "speech_requests",
            "Requests by route and status; 'aborted': failed after the first byte, 'gone': the client disconnected",
            ["route", "status"],
            registry=self.registry,
        )
        self.errors = Counter(
            "speech_errors", "Failed streams, by HTTP status of the error", ["status"], registry=self.registry
        )
        self.first_audio = Histogram(
            "speech_first_audio_seconds",
            "Time from a stream's admission to its first audio from Triton",
            buckets=_LATENCIES,
            registry=self.registry,
        )
        self.live = Gauge("speech_live_streams", "Live streams", registry=self.registry)
        self.sessions = Gauge("speech_live_sessions", "Open WebSocket sessions", registry=self.registry)
        self.audio = Counter("speech_audio_seconds", "Generated audio, in seconds", registry=self.registry)
        self.outstanding = Gauge(
            "speech_triton_outstanding", "Live streams at each Triton", ["address"], registry=self.registry
        )
        self.ready = Gauge(
            "speech_triton_ready", "Whether a Triton serves a speech model", ["address"], registry=self.registry
        )

    def page(self) -> bytes:
        """Return all metrics in the exposition format."""
        return generate_latest(self.registry)
