"""What a pipeline reports while it makes the audio of a request, and the outputs that tell a client of Triton."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cosyvoice_triton.monitoring import tracing

OnWarning = Callable[[str], object]  # called with what the caller should know although there is audio

# Called with the name of each stage when it is reached: "voice" when the LLM's part of the prompt is ready; then, for
# each segment, "llm" ("source" of a conversion) at its first tokens and "prompt_cache" when token2wav has prefilled the
# prompt; for each chunk, or whole segment if nothing is streamed, "tokens" when it has all tokens that it needs, and
# "audio". The names are part of the output `timeline`.
OnStage = Callable[[str], object]

# Called before the last waveform of each segment with the text that the LLM got, the segment's samples and its speech
# tokens, and before each pause with "", the pause's samples and no tokens: in order, they are all samples of an answer.
OnSegment = Callable[[str, int, Sequence[int]], object]


def ignore(*reported: object) -> None:
    """Do nothing. This is the default callback: warnings are logged anyway."""


class Events(NamedTuple):
    """What is called while a request is answered."""

    warning: OnWarning = ignore
    stage: OnStage = ignore
    segment: OnSegment = ignore


UNHEARD = Events()


@dataclass(eq=False)
class Report:
    """What the next response says beside its audio: each warning, segment and stage is sent once.

    They are outputs because Triton 2.51's python backend cannot set parameters of a response. Stages are in
    milliseconds from when it is made; those up to the first response become events of `span`.
    """

    span: tracing.Span
    warnings: list[str] = field(default_factory=list)
    _started: float = field(default_factory=time.perf_counter)
    _stages: list[tuple[str, float]] = field(default_factory=list)
    _segments: list[tuple[str, int]] = field(default_factory=list)

    def stage(self, name: str) -> None:
        """Note that a stage has been reached, see `OnStage`."""
        self.span.event(name)
        self._stages.append((name, round(1e3 * (time.perf_counter() - self._started), 3)))

    def segment(self, text: str, samples: int, tokens: Sequence[int]) -> None:
        """Note that a segment's last waveform or a pause comes next, see `OnSegment`."""
        self._segments.append((text, samples))

    def outputs(self, waveform: np.ndarray, *, timeline: bool, segments: bool) -> dict[str, np.ndarray]:
        """Return the outputs of one response: waveform (N,) as (1, N), and if there are any, warnings, and stages and
        segments, both as JSON, if the request asks for them. A segment is the text and the samples of one that ends
        here, "" for a pause."""
        tensors = {"waveform": waveform[None]}
        if self._stages and timeline:
            tensors["timeline"] = np.array([[json.dumps(self._stages)]], np.object_)
        if self._segments and segments:
            tensors["segments"] = np.array([[json.dumps(self._segments)]], np.object_)
        if self.warnings:
            tensors["warning"] = np.array([["; ".join(self.warnings)]], np.object_)
        for sent in (self._stages, self._segments, self.warnings):
            sent.clear()
        self.span = tracing.OFF
        return tensors
