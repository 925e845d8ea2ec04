"""What a response of the orchestrator carries: audio, warnings, segments and the stages that were reached."""

import json
import time
from collections.abc import Sequence

import numpy as np

from cosyvoice_triton.monitoring.tracing import OFF, Span


class Timeline:
    """When each stage of a request was reached, in milliseconds since its processing started. Those up to the first
    response become events of `span`."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._started = time.perf_counter()
        self._stages: list[tuple[str, float]] = []

    def add(self, stage: str) -> None:
        self._span.event(stage)
        self._stages.append((stage, round(1e3 * (time.perf_counter() - self._started), 3)))

    def take(self) -> list[tuple[str, float]]:
        """Return the stages added since the last call."""
        self._span = OFF
        stages, self._stages = self._stages, []
        return stages


def outputs(
    waveform: np.ndarray,
    warnings: list[str],
    segments: list[tuple[str, int]],
    stages: Sequence[tuple[str, float]] = (),
) -> dict[str, np.ndarray]:
    """Return the outputs of one response: waveform (N,) as (1, N), and if there are any, warnings, stages, segments.

    Stages and segments are JSON. A segment is the text and the samples of one that ends here, "" for a pause.

    `warnings` and `segments` are emptied, so each is sent once. They are outputs because Triton 2.51's python backend
    cannot set parameters of a response.
    """
    tensors = {"waveform": waveform[None]}
    if stages:
        tensors["timeline"] = np.array([[json.dumps(stages)]], np.object_)
    if segments:
        tensors["segments"] = np.array([[json.dumps(segments)]], np.object_)
        segments.clear()
    if warnings:
        tensors["warning"] = np.array([["; ".join(warnings)]], np.object_)
        warnings.clear()
    return tensors
