"""Prometheus metrics, in a separate registry so that two services in one process do not mix."""

from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

# Finest where the first audio of a server that is not full arrives.
_LATENCIES = (0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30)


class Metrics:
    """The metrics of one service."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self._registry), partial(Gauge, registry=self._registry)
        self.requests = counter(
            "speech_requests",
            "Requests by route and status; 'aborted': failed after the first byte, 'gone': the client disconnected",
            ["route", "status"],
        )
        self.errors = counter("speech_errors", "Failed streams, by HTTP status of the error", ["status"])
        self.first_audio = Histogram(
            "speech_first_audio_seconds",
            "Time from a stream's admission to its first audio from Triton",
            buckets=_LATENCIES,
            registry=self._registry,
        )
        self.live = gauge("speech_live_streams", "Live streams")
        self.sessions = gauge("speech_live_sessions", "Open WebSocket sessions")
        by_key = ", by the name of the API key"
        self._usage = {
            "input_tokens": counter(
                "speech_input_tokens", f"Characters of the texts that were spoken{by_key}", ["key"]
            ),
            "output_tokens": counter("speech_output_tokens", f"Generated speech tokens{by_key}", ["key"]),
            "seconds": counter("speech_audio_seconds", f"Generated audio, in seconds{by_key}", ["key"]),
        }
        self.outstanding = gauge("speech_triton_outstanding", "Live streams at each Triton", ["address"])
        self.ready = gauge("speech_triton_ready", "Whether a Triton serves a speech model", ["address"])

    def count(self, key: str, usage: Mapping[str, float]) -> None:
        """Add the usage of one answer to that of a key, "" without keys; only keys that are accepted have a name."""
        for name, counter in self._usage.items():
            counter.labels(key).inc(usage[name])

    def page(self) -> bytes:
        """Return all metrics in the exposition format."""
        return generate_latest(self._registry)
