"""Numbers of a model on Triton's metrics page."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from common.metrics import Metric, Values

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 0.25


class Published:
    """Brings what `read` returns to the page, every PERIOD_SECONDS, from a thread of its own.

    A thread, because each number is a call into tritonserver that waits for its answer; streams must not.
    """

    def __init__(self, read: Callable[[], Values], args: dict[str, str]) -> None:
        """`args`: Triton's own, of `initialize`; they name the model and its instance."""
        self._read = read
        self._labels = {"model": args["model_name"], "model_instance": args["model_instance_name"]}
        self._families: dict[str, Any] = {}
        self._metrics: dict[Metric, Any] = {}
        self._sums: dict[Metric, float] = {}
        self._ended = threading.Event()
        self._update()  # so that every line is there before the first request
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Bring the last numbers to the page and end the thread."""
        self._ended.set()
        self._thread.join()
        self._metrics.clear()  # before their families, or Triton complains
        self._families.clear()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_SECONDS):
            try:
                self._update()
            except Exception:  # figures are no reason to end a model
                logger.exception("the metrics could not be brought up to date")

    def _update(self) -> None:
        for metric, value in self._read().items():
            published = self._metrics.get(metric) or self._open(metric)
            if isinstance(value, Sequence):
                for observation in value:
                    published.observe(observation)
            elif metric.kind == "counter":
                published.increment(value - self._sums.get(metric, 0.0))
                self._sums[metric] = value
            else:
                published.set(value)

    def _open(self, metric: Metric) -> Any:
        if metric.name not in self._families:
            kind = getattr(pb_utils.MetricFamily, metric.kind.upper())
            self._families[metric.name] = pb_utils.MetricFamily(name=metric.name, description=metric.help, kind=kind)
        options: dict[str, Any] = {"buckets": list(metric.buckets)} if metric.buckets else {}
        labels = self._labels | dict(metric.labels)
        self._metrics[metric] = self._families[metric.name].Metric(labels=labels, **options)
        return self._metrics[metric]
