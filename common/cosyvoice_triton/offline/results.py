"""The output folder of a run, which a second run can continue.

    <id>.wav         24 kHz
    samples.jsonl    one line per finished sample: hash of its inputs, seconds and speech tokens
    log.txt          the figures of the last run, as JSON

A sample is finished if the last of its lines has the hash of the same text, recording and settings.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load.samples import Sample, SampleError
from cosyvoice_triton.voice.audio import save_audio

JOURNAL = "samples.jsonl"
LOG = "log.txt"


class OutputFolder:
    """SampleError if the folder cannot be made. settings: everything besides the samples that the audio depends on."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._settings = json.dumps(settings, sort_keys=True, default=str)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SampleError(f"cannot write to {path}: {error}; choose another folder") from None
        self._finished = _read_journal(path / JOURNAL)

    def holds(self, sample: Sample) -> bool:
        """Return whether the sample is finished, with the same inputs and settings."""
        return self._finished.get(sample.id) == self._made_from(sample) and self._audio(sample).exists()

    def discard(self, sample: Sample) -> None:
        """Remove older audio of this id, so that a sample that fails now does not look finished."""
        self._audio(sample).unlink(missing_ok=True)

    def save(self, sample: Sample, audio: np.ndarray, tokens: np.ndarray, cut_short: bool) -> None:
        """Write (N,) float32 audio that was rendered from the speech tokens (n,)."""
        save_audio(self._audio(sample), audio, SAMPLE_RATE)
        record = {
            "id": sample.id,
            "made_from": self._made_from(sample),
            "seconds": len(audio) / SAMPLE_RATE,
            "cut_short": cut_short,
            "target_text": sample.target_text,
            "target_audio_cosy2_tokens": tokens.tolist(),
        }
        with (self.path / JOURNAL).open("a", encoding="utf-8") as journal:
            # A run that was killed may have left a line without its end.
            journal.write("\n" * (journal.tell() > 0) + json.dumps(record, ensure_ascii=False))

    def log(self, figures: Mapping[str, Any]) -> Path:
        """Write the figures of the run; return the file."""
        path = self.path / LOG
        path.write_text(json.dumps(figures, indent=4, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        return path

    def _audio(self, sample: Sample) -> Path:
        return self.path / f"{sample.id}.wav"

    def _made_from(self, sample: Sample) -> str:
        digest = hashlib.sha256(self._settings.encode())
        digest.update(json.dumps([sample.target_text, sample.prompt_text]).encode())
        if sample.prompt_audio is not None:
            digest.update(sample.prompt_audio.digest)
        return digest.hexdigest()


def identity(directory: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and modification times of a checkpoint's files."""
    stats = ((path.name, path.stat()) for path in sorted(directory.iterdir()) if path.is_file())
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _read_journal(path: Path) -> dict[str, str]:
    """Return the hash in the last complete line of each sample."""
    finished = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            finished[str(record["id"])] = str(record["made_from"])
        except (ValueError, KeyError, TypeError):
            continue
    return finished
