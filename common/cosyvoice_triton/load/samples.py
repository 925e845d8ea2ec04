"""Samples to synthesize: rows of a JSONL manifest, a seed-tts `.lst` file or a HuggingFace data set, validated.

The columns are those of upstream's data sets `yuekai/seed_tts` and `yuekai/seed_tts_cosy2`:

    id                           names the audio file; unique
    target_text                  text to synthesize
    prompt_audio                 a recording of the voice; in a manifest a path, relative to the manifest
    prompt_text                  its transcript; "" for cross-lingual cloning
    speaker                      a registered voice, instead of the two above
    target_audio_cosy2_tokens    optional: precomputed speech tokens of the answer

All rows are read before the first request, so that bad rows are reported at once and file access slows no measurement.
"""

import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from cosyvoice_triton.client.utterance import Parameters, Utterance, of_recording
from cosyvoice_triton.constants import SPEECH_VOCAB
from cosyvoice_triton.errors import json_kind
from cosyvoice_triton.voice.audio import load_recording
from cosyvoice_triton.voice.prompt import Recording

TOKENS = "target_audio_cosy2_tokens"
LST_COLUMNS = ("id", "prompt_text", "prompt_audio", "target_text")


@dataclass(frozen=True)
class Sample:
    """One text to synthesize, and its voice.

    prompt_audio: its recording, without the transcript; None if `speaker` is given. Tokens: int64 (n,), ids of the
    speech tokenizer (0 to 6560), None if the row has none.
    """

    id: str
    target_text: str
    prompt_audio: Recording | None = None
    prompt_text: str = ""
    speaker: str = ""
    target_audio_cosy2_tokens: np.ndarray | None = None

    def utterance(self, parameters: Parameters) -> Utterance:
        """Return the request for it; without a transcript the voice is cloned cross-lingually."""
        return Utterance(
            self.target_text,
            **of_recording(self.prompt_audio),
            reference_text=self.prompt_text or None,
            speaker=self.speaker or None,
            parameters=parameters,
        )


def read_manifest(path: Path, *, limit: int | None = None) -> list[Sample]:
    """Read a manifest: JSON lines, or lines of `id|prompt_text|prompt_audio|target_text` in a `.lst` file.

    limit: number of rows to read.
    ValueError names the line and the column.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the manifest {path}: {error}; see --help for its format") from None
    parse = _lst_row if path.suffix == ".lst" else _json_row
    numbered = [(f"{path} line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    rows = ((where, parse(where, line)) for where, line in numbered[:limit])
    opened: dict[Path, Recording] = {}  # rows often share a recording

    def recording(where: str, value: Any) -> Recording:
        if not isinstance(value, str) or not value:
            raise ValueError(f"{where}: prompt_audio is {value!r}, not the path of a recording")
        file = path.parent / value  # keeps an absolute path
        if file not in opened:
            opened[file] = _decoded(where, file, str(file))
        return opened[file]

    return _samples(rows, len(numbered[:limit]), recording, str(path))


def read_dataset(name: str, split: str, *, limit: int | None = None) -> list[Sample]:
    """Read the samples of a HuggingFace data set, or of a directory that `datasets` can load; parameters as above.

    ValueError if `datasets` is not installed, the data set cannot be loaded or has other columns.
    """
    try:
        import datasets  # an optional dependency of hundreds of megabytes
    except ImportError as error:
        raise ValueError(
            f"the data set {name} needs the package datasets ({error}): run `pip install -e '.[datasets]'`, "
            "or give a manifest with --manifest-path"
        ) from None
    try:
        table = datasets.load_dataset(name, split=split)
    except Exception as error:  # the library passes on the errors of its loaders and its HTTP client
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"cannot load the split {split} of the data set {name} ({reason}): check both names and the network, "
            "or give a manifest with --manifest-path"
        ) from None
    if isinstance(table.features.get("prompt_audio"), datasets.Audio):
        # Decoding in the library would need torchcodec and ffmpeg; soundfile reads the formats of speech data sets.
        table = table.cast_column("prompt_audio", datasets.Audio(decode=False))
    count = len(table) if limit is None else min(limit, len(table))
    rows = ((f"{name} {split} row {index}", table[index]) for index in range(count))
    return _samples(rows, count, _embedded_recording, f"{name} {split}")


def _samples(
    rows: Iterable[tuple[str, Mapping[str, Any]]], count: int, recording: Callable[[str, Any], Recording], source: str
) -> list[Sample]:
    samples: dict[str, Sample] = {}
    for where, row in tqdm(rows, total=count, desc="reading samples", unit="row", leave=False, delay=1.0):
        sample = _checked(where, row, recording)
        if sample.id in samples:
            raise ValueError(f"{where}: the id {sample.id!r} appears twice; audio files are named by it")
        samples[sample.id] = sample
    if not samples:
        raise ValueError(f"{source} has no rows")
    return list(samples.values())


def _checked(where: str, row: Mapping[str, Any], recording: Callable[[str, Any], Recording]) -> Sample:
    speaker = _text(where, row, "speaker") if row.get("speaker") else ""
    needed = ["id", "target_text", *([] if speaker else ["prompt_audio", "prompt_text"])]
    if missing := [column for column in needed if row.get(column) is None]:
        present = ", ".join(sorted(column for column, value in row.items() if value is not None))
        raise ValueError(f"{where} has no {' and no '.join(missing)}; it has {present or 'nothing'}")
    name, target_text = str(row["id"]), _text(where, row, "target_text")
    if not name.strip() or {"/", "\\", "\0"} & set(name) or name in (".", ".."):
        raise ValueError(f"{where}: id is {name!r}; it must be a file name")
    if not target_text.strip():
        raise ValueError(f"{where}: target_text is {target_text!r}, it has no words")
    return Sample(
        id=name,
        target_text=target_text,
        prompt_audio=None if speaker else recording(where, row["prompt_audio"]),
        prompt_text="" if speaker else _text(where, row, "prompt_text"),
        speaker=speaker,
        target_audio_cosy2_tokens=_tokens(where, row),
    )


def _text(where: str, row: Mapping[str, Any], column: str) -> str:
    if not isinstance(row[column], str):
        raise ValueError(f"{where}: {column} is {row[column]!r}, not a text")
    return str(row[column])


def _tokens(where: str, row: Mapping[str, Any]) -> np.ndarray | None:
    """Return speech token ids (n,); None if the row has none."""
    if (value := row.get(TOKENS)) is None:
        return None
    try:
        tokens = np.asarray(value)
    except ValueError:  # lists of unequal length
        tokens = np.empty((0, 0))
    if tokens.ndim != 1 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"{where}: {TOKENS} is not a list of integers")
    if tokens.min() < 0 or tokens.max() >= SPEECH_VOCAB:
        bad = tokens[(tokens < 0) | (tokens >= SPEECH_VOCAB)][0]
        raise ValueError(f"{where}: {TOKENS} holds {bad}; speech tokens are 0 to {SPEECH_VOCAB - 1}")
    return tokens.astype(np.int64)


def _embedded_recording(where: str, value: Any) -> Recording:
    """Decodes a cell of an audio column: {"bytes": ..., "path": ...}."""
    if not isinstance(value, Mapping) or not (value.get("bytes") or value.get("path")):
        raise ValueError(f"{where}: prompt_audio is {type(value).__name__}, not a column of type Audio")
    source = io.BytesIO(value["bytes"]) if value.get("bytes") else Path(value["path"])
    return _decoded(where, source, str(value.get("path") or "embedded audio"))


def _decoded(where: str, source: Path | BinaryIO, shown: str) -> Recording:
    try:
        return load_recording(source)
    except (OSError, RuntimeError, ValueError) as error:  # soundfile's own errors are RuntimeErrors
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: cannot read prompt_audio {shown}: {reason}") from None


def _json_row(where: str, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}): a manifest has one JSON object per line") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {json_kind(row)}: a manifest has one JSON object per line")
    return row


def _lst_row(where: str, line: str) -> Mapping[str, Any]:
    cells = line.strip().split("|")
    if len(cells) != len(LST_COLUMNS):
        raise ValueError(f"{where} has {len(cells)} cells; expected {'|'.join(LST_COLUMNS)}")
    row = dict(zip(LST_COLUMNS, cells, strict=True))
    return {**row, "id": Path(row["id"]).stem}  # seed-tts writes some ids with their suffix
