"""The folder that a run writes its audio to, which a second run continues.

    <id>.wav         24 kHz; written beside and renamed, so that it is complete or not there
    samples.jsonl    a line for each finished sample: what it was made from, its seconds and its speech tokens
    log.txt          the figures of the last run, as JSON

A sample counts as finished if its line says that it was made from the same text, recording and settings, and its audio
has the size that the line says.
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

from common.constants import SAMPLE_RATE
from common.voice.audio import save_audio
from tools.load.samples import Sample, SampleError

JOURNAL = "samples.jsonl"
LOG = "log.txt"
PARTIAL = ".partial"


class OutputFolder:
    """A folder for as long as it is entered; SampleError where it cannot be used or another run is using it.

    settings: what the audio depends on beside the samples themselves.
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
            raise SampleError(f"another run is writing to {self.path}: wait for it, or name another folder") from None
        except OSError as error:
            self._unlock()
            raise SampleError(f"cannot write to {self.path}: {error}; name another folder") from None
        for left in self.path.glob(f".*{PARTIAL}"):
            left.unlink()
        self._records = _read_journal(self.path / JOURNAL)
        lines = "".join(_line(record) for record in self._records.values())
        write_text(self.path / JOURNAL, lines)  # without what a killed run left of a line
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
        """Whether the sample is finished, made as it would be made now."""
        record = self._records.get(sample.id)
        if record is None or record.get("made_from") != self._made_from(sample):
            return False
        try:
            return self._audio(sample).stat().st_size == record["bytes"]
        except OSError:
            return False

    def replaces(self, sample: Sample) -> bool:
        """Whether there is something of that name that was made otherwise."""
        return sample.id in self._records and not self.holds(sample)

    def discard(self, sample: Sample) -> None:
        """Take away audio of that name that was made otherwise: should the sample fail now, it must not look made."""
        self._audio(sample).unlink(missing_ok=True)

    def save(self, sample: Sample, audio: np.ndarray, tokens: np.ndarray, cut_short: bool) -> None:
        """Audio (N,) float32 and the speech tokens (n,) that it was rendered from."""
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
    """A file that is complete or not there."""
    partial = _partial(path)
    save_audio(partial, audio, SAMPLE_RATE)
    os.replace(partial, path)


def write_text(path: Path, text: str) -> None:
    """A file that is complete or what it was before."""
    partial = _partial(path)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def identity(directory: Path) -> list[tuple[str, int, int]]:
    """What tells a checkpoint from another one in its place: names, sizes and times of its files."""
    stats = ((path.name, path.stat()) for path in sorted(directory.iterdir()) if path.is_file())
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}{PARTIAL}")


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """The last whole line of each sample. One that a killed run left unfinished is passed over: it is made again."""
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
