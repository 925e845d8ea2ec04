"""The answer to a request: its parts as they come, their times, and the whole of them."""

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cosyvoice_triton.client.failures import ClientError
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.voice.audio import save_audio

logger = logging.getLogger(__name__)

WAVEFORM, WARNING = "waveform", "warning"  # outputs
TIMELINE, SEGMENTS = "timeline", "segments"  # request parameters and outputs


@dataclass(frozen=True)
class AudioPart:
    """One response: float32 (N,), and what else it says.

    segments: the text and samples of each segment that ends with it, "" for a pause; in order, they are all samples of
    an answer. timeline: the stages (see `cosyvoice_triton.orchestrator.report.OnStage`) that the server has reached,
    in seconds since it received the request. Each is only sent if the request parameter of its name is true.
    """

    waveform: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    segments: list[tuple[str, int]] = field(default_factory=list)
    warning: str = ""
    timeline: list[tuple[str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, result: Any) -> "AudioPart":
        """Return the part that a response of tritonclient has. Its warning is logged, which commands print."""
        waveform, warning = result.as_numpy(WAVEFORM), result.as_numpy(WARNING)
        segments, timeline = result.as_numpy(SEGMENTS), result.as_numpy(TIMELINE)
        if warning is not None:
            logger.warning("%s", warning.item().decode())
        return cls(
            np.zeros(0, np.float32) if waveform is None else waveform.reshape(-1),  # (1, N) -> (N,)
            [] if segments is None else [(text, samples) for text, samples in json.loads(segments.item())],
            "" if warning is None else warning.item().decode(),
            [] if timeline is None else [(stage, at / 1000) for stage, at in json.loads(timeline.item())],
        )

    @classmethod
    def of_pcm(cls, data: bytes) -> "AudioPart":
        """Return the part of 16-bit samples."""
        return cls(np.frombuffer(data, "<i2").astype(np.float32) / 32768)


class Recorder:
    """Collects the chunks of one answer and their arrival times. The clock starts at construction, or at `start`."""

    def __init__(self, start: float | None = None) -> None:
        self._start = time.perf_counter() if start is None else start
        self._chunks: list[np.ndarray] = []
        self.arrivals: list[float] = []  # seconds after the start, one per chunk with audio
        self.timeline: list[tuple[str, float]] = []  # see `AudioPart`

    def add(self, part: AudioPart) -> None:
        """Record one response; without samples it is not a chunk."""
        now = self.elapsed
        self.timeline += part.timeline
        if part.waveform.size:
            self._chunks.append(part.waveform)
            self.arrivals.append(now)

    @property
    def samples(self) -> list[int]:
        """Return the number of samples of each chunk."""
        return [chunk.size for chunk in self._chunks]

    @property
    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self._start

    def finish(self) -> "SpeechResult":
        """Return the complete answer. Raise ClientError if there were no samples, or some are not finite."""
        total = self.elapsed
        if not self._chunks:
            raise ClientError("the server ended the request without audio; see its log for the reason")
        waveform = np.concatenate(self._chunks)
        if not np.isfinite(waveform).all():
            raise ClientError("the server's audio is not finite")
        return SpeechResult(waveform, tuple(self.arrivals), total)


@dataclass(frozen=True)
class SpeechResult:
    """One answered request: float32 (N,) at 24 kHz and its times in seconds since the request was sent."""

    waveform: np.ndarray
    arrivals: tuple[float, ...]
    total: float

    @property
    def seconds(self) -> float:
        return float(self.waveform.size / SAMPLE_RATE)

    def save(self, path: Path) -> None:
        """Write a 16-bit WAV at 24 kHz; ClientError if the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_audio(path, self.waveform, SAMPLE_RATE)
        except (OSError, RuntimeError) as error:
            raise ClientError(f"cannot write {path}: {error}; choose another file") from None

    def summary(self) -> str:
        """Return the measurements of the request, one per line."""
        return "\n".join(
            (
                f"first chunk after  {self.arrivals[0] * 1000:8.0f} ms",
                f"total time         {self.total:8.2f} s",
                f"audio length       {self.seconds:8.2f} s in {len(self.arrivals)} chunk(s)",
                f"real-time factor   {self.total / self.seconds:8.3f}",
            )
        )
