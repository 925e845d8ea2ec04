"""The output folder of a run, which a second run can continue.

    <id>.wav         24 kHz; written to a temporary file and renamed, so that it is complete or absent
    samples.jsonl    one line per finished sample: hash of its inputs, seconds and speech tokens
    log.txt          the figures of the last run, as JSON

A sample is finished if its line has the hash of the same text, recording and settings, and its audio has the recorded
size.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load.samples import Sample, SampleError
from cosyvoice_triton.voice.audio import save_audio

JOURNAL = "samples.jsonl"
LOG = "log.txt"
PARTIAL = ".partial"


class OutputFolder:
    """A context manager that locks the folder; SampleError if it cannot be used or another run is using it.

    settings: everything besides the samples that the audio depends on.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._settings = json.dumps(settings, sort_keys=True, default=str)
        self._lock: TextIO | None = None
        self._records: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "OutputFolder":
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._unlock()
            raise SampleError(f"another run is writing to {self.path}: wait for it, or choose another folder") from None
        except OSError as error:
            self._unlock()
            raise SampleError(f"cannot write to {self.path}: {error}; choose another folder") from None
        for left in self.path.glob(f".*{PARTIAL}"):
            left.unlink()
        self._records = _read_journal(self.path / JOURNAL)
        lines = "".join(_line(record) for record in self._records.values())
        write_text(self.path / JOURNAL, lines)  # without an incomplete line of a killed run
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def holds(self, sample: Sample) -> bool:
        """Whether the sample is finished, with the same inputs and settings."""
        record = self._records.get(sample.id)
        if record is None or record.get("made_from") != self._made_from(sample):
            return False
        try:
            return self._audio(sample).stat().st_size == record["bytes"]
        except OSError:
            return False

    def replaces(self, sample: Sample) -> bool:
        """Whether a sample of this id was made from other inputs or settings."""
        return sample.id in self._records and not self.holds(sample)

    def discard(self, sample: Sample) -> None:
        """Remove older audio of this id, so that a sample that fails now does not look finished."""
        self._audio(sample).unlink(missing_ok=True)

    def save(self, sample: Sample, audio: np.ndarray, tokens: np.ndarray, cut_short: bool) -> None:
        """audio: (N,) float32, rendered from the speech tokens (n,)."""
        save_wav(self._audio(sample), audio)
        record = {
            "id": sample.id,
            "made_from": self._made_from(sample),
            "bytes": self._audio(sample).stat().st_size,
            "seconds": len(audio) / SAMPLE_RATE,
            "cut_short": cut_short,
            "target_text": sample.target_text,
            "target_audio_cosy2_tokens": tokens.tolist(),
        }
        with (self.path / JOURNAL).open("a", encoding="utf-8") as journal:
            journal.write(_line(record))
        self._records[sample.id] = record

    def log(self, figures: Mapping[str, Any]) -> Path:
        """Write the figures of the run."""
        path = self.path / LOG
        write_text(path, json.dumps(figures, indent=4, ensure_ascii=False, default=str) + "\n")
        return path

    def _audio(self, sample: Sample) -> Path:
        return self.path / f"{sample.id}.wav"

    def _made_from(self, sample: Sample) -> str:
        digest = hashlib.sha256(self._settings.encode())
        digest.update(json.dumps([sample.target_text, sample.prompt_text]).encode())
        if sample.prompt_audio is not None:
            digest.update(sample.prompt_audio.tobytes())
        return digest.hexdigest()


def save_wav(path: Path, audio: np.ndarray) -> None:
    """Written atomically."""
    partial = _partial(path)
    save_audio(partial, audio, SAMPLE_RATE)
    os.replace(partial, path)


def write_text(path: Path, text: str) -> None:
    """Written atomically."""
    partial = _partial(path)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def identity(directory: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and modification times of a checkpoint's files."""
    stats = ((path.name, path.stat()) for path in sorted(directory.iterdir()) if path.is_file())
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}{PARTIAL}")


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """The last complete line of each sample. Incomplete lines of a killed run are skipped: the sample is made again."""
    if not path.exists():
        return {}
    records = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            records[str(record["id"])] = record
        except (ValueError, KeyError, TypeError):
            continue
    return records
