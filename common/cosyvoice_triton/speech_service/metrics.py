"""Prometheus metrics, in a separate registry so that two services in one process do not mix."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

# Finest where the first audio of a server that is not full arrives.
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
        self._usage = {
            "input_tokens": self._by_key("speech_input_tokens", "Characters of the texts that were spoken"),
            "output_tokens": self._by_key("speech_output_tokens", "Generated speech tokens"),
            "seconds": self._by_key("speech_audio_seconds", "Generated audio, in seconds"),
        }
        self.outstanding = Gauge(
            "speech_triton_outstanding", "Live streams at each Triton", ["address"], registry=self.registry
        )
        self.ready = Gauge(
            "speech_triton_ready", "Whether a Triton serves a speech model", ["address"], registry=self.registry
        )

    def _by_key(self, name: str, what: str) -> Counter:
        return Counter(name, f"{what}, by the name of the API key", ["key"], registry=self.registry)

    def count(self, key: str, usage: Mapping[str, float]) -> None:
        """Add the usage of one answer to that of a key, "" without keys; only keys that are accepted have a name."""
        for name, counter in self._usage.items():
            counter.labels(key).inc(usage[name])

    def page(self) -> bytes:
        """Return all metrics in the exposition format."""
        return generate_latest(self.registry)
