"""Voices that are registered under a name, so that a request needs no recording.

    voices/NAME.safetensors    a Prompt, computed ahead by scripts/add_voice.py
    voices/NAME.wav            a recording, and what it says in NAME.txt (without one it is cloned across languages)
    spk2info.pt                speakers of upstream's format, in voices/ or beside the checkpoint

A name is looked up in this order and files are looked at anew for every request, so that a voice can be added, changed
or taken away while the server runs.
"""

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import safetensors
import torch
from safetensors.numpy import load, save

from common.constants import MAX_REFERENCE_SECONDS, PROMPT_SAMPLE_RATE, TOKEN_MEL_RATIO, TOKEN_RATE
from common.errors import UnavailableError
from common.text import clean_line
from common.voice.audio import load_audio, validate_reference
from common.voice.prompt import Prompt, Recording

SPK2INFO = "spk2info.pt"
MAX_NAME_BYTES = 128
MAX_FILE_BYTES = 64 << 20  # a voice has less than one MB; spk2info.pt holds some hundred of them
MAX_TRANSCRIPT_CHARS = 2000
FILES_KEPT = 64  # read files in memory, each a few MB at most but for spk2info.pt
NAMES_SHOWN = 20

# The tensors of a voice's file are called as those of the vocoder's requests; the transcript is UTF-8.
TOKENS, MEL, EMBEDDING, TRANSCRIPT = (
    "prompt_speech_tokens",
    "prompt_speech_feat",
    "prompt_spk_embedding",
    "reference_text",
)
# Where a speaker of spk2info.pt has them: as upstream's Triton runtime wants it, as CosyVoice2 saves it.
_SPK2INFO_KEYS = {
    TOKENS: ("speech_token", "flow_prompt_speech_token"),
    MEL: ("speech_feat", "prompt_speech_feat"),
    EMBEDDING: ("embedding", "flow_embedding"),
}

Voice = Recording | Prompt
Decode = Callable[[Sequence[int]], str]
ReadT = TypeVar("ReadT")


class VoiceBook:
    """The registered voices. Safe to use from several threads.

    voices_dir: may be missing, then or later. checkpoint_dir: where upstream has its spk2info.pt. decode: text of the
    LLM's token ids, which is how CosyVoice2 saves a transcript.
    """

    def __init__(self, voices_dir: str | Path, checkpoint_dir: str | Path, decode: Decode) -> None:
        self._folder = Path(voices_dir) if voices_dir else None
        folders = [folder for folder in (self._folder, Path(checkpoint_dir)) if folder is not None]
        self._spk2infos = [folder / SPK2INFO for folder in folders]
        self._decode = decode
        self._read: OrderedDict[Path, tuple[tuple[int, ...], Any]] = OrderedDict()
        self._lock = Lock()

    def get(self, name: str) -> Voice:
        """The voice of that name. ValueError naming the known ones where there is none; UnavailableError where its
        file is damaged."""
        with self._lock:
            try:
                voice = self._find(name)
            except (OSError, RuntimeError, ValueError, safetensors.SafetensorError, pickle.UnpicklingError) as error:
                raise UnavailableError(f"speaker {name!r} cannot be used: {error}") from error
            if voice is None:
                raise ValueError(f"unknown speaker {name!r}; known speakers: {_listed(self._names())}")
            return voice

    def names(self) -> list[str]:
        """The known names, sorted. UnavailableError where a spk2info.pt is damaged."""
        with self._lock:
            try:
                return self._names()
            except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
                raise UnavailableError(f"the voices cannot be listed: {error}") from error

    def _find(self, name: str) -> Voice | None:
        if self._folder is not None and is_voice_name(name):
            prompt = self._cached(self._folder / f"{name}.safetensors", read_voice)
            voice = prompt or self._cached(self._folder / f"{name}.wav", read_recording)
            if voice is not None:
                return voice
        for path in self._spk2infos:
            if (entry := (self._cached(path, _read_spk2info) or {}).get(name)) is not None:
                return _spk2info_voice(entry, f"{path.name}, {name!r}", self._decode)
        return None

    def _names(self) -> list[str]:
        """The known names. A file that is no voice is one too: asking for it tells what is wrong with it."""
        found = {name for path in self._spk2infos for name in self._cached(path, _read_spk2info) or ()}
        if self._folder is not None and self._folder.is_dir():
            files = (Path(entry.name) for entry in os.scandir(self._folder))
            found |= {
                file.stem for file in files if file.suffix in (".safetensors", ".wav") and is_voice_name(file.stem)
            }
        return sorted(found)

    def _cached(self, path: Path, read: Callable[[Path], ReadT]) -> ReadT | None:
        """What `read` makes of a file, read again when the file has changed; None where there is none."""
        if not path.is_file():
            self._read.pop(path, None)
            return None
        stamp = _stamp(path) + _stamp(path.with_suffix(".txt"))
        if (known := self._read.get(path)) is None or known[0] != stamp:
            if (size := path.stat().st_size) > MAX_FILE_BYTES:
                raise ValueError(f"{path.name} has {size} bytes, more than the limit of {MAX_FILE_BYTES}")
            self._read[path] = known = (stamp, read(path))
            if len(self._read) > FILES_KEPT:
                self._read.popitem(last=False)
        self._read.move_to_end(path)
        return known[1]


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file does; empty where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def is_voice_name(name: str) -> bool:
    """Whether `name` can be that of a voice's files: one visible, printable file name and no way out of a folder."""
    return (
        0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES
        and name.isprintable()
        and name == name.strip()
        and not name.startswith(".")
        and not set(name) & set("/\\")
    )


def read_voice(path: Path) -> Prompt:
    """A voice that `save_voice` wrote. ValueError or SafetensorError saying what is wrong with it."""
    tensors = load(path.read_bytes())  # not mapped into memory: a file that shrinks would end the process
    if missing := [name for name in (TOKENS, MEL, EMBEDDING, TRANSCRIPT) if name not in tensors]:
        raise ValueError(f"{path.name} has no {', '.join(missing)}: not a file of scripts/add_voice.py")
    transcript = tensors[TRANSCRIPT].tobytes().decode()
    return _prompt(tensors, transcript, path.name)


def save_voice(path: Path, prompt: Prompt) -> None:
    """Write a voice; readers see the file complete or not at all."""
    content = save(
        {
            TOKENS: prompt.tokens.astype(np.int32),
            MEL: np.ascontiguousarray(prompt.mel),
            EMBEDDING: np.ascontiguousarray(prompt.embedding),
            TRANSCRIPT: np.frombuffer(prompt.text.encode(), np.uint8),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        work.write_bytes(content)
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)


def read_recording(path: Path) -> Recording:
    """A recording and the transcript beside it, judged as those of a request are. ValueError naming the file."""
    try:
        wav = validate_reference(load_audio(path, PROMPT_SAMPLE_RATE))
        transcript = path.with_suffix(".txt")
        text = transcript.read_text("utf-8-sig").strip() if transcript.exists() else ""
        if text:
            text = clean_line(text, name=transcript.name, max_chars=MAX_TRANSCRIPT_CHARS)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return Recording(wav, text)


def _read_spk2info(path: Path) -> dict[str, Mapping[str, Any]]:
    """The speakers of a spk2info.pt. Only tensors and plain values are read: nothing in the file can run."""
    content = torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds a {type(content).__name__}, not speakers by name")
    return {str(name): entry for name, entry in content.items()}


def _spk2info_voice(entry: Any, where: str, decode: Decode) -> Prompt:
    """A speaker of spk2info.pt: of upstream's Triton runtime, or as `add_zero_shot_spk` of CosyVoice2 saves it."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is a {type(entry).__name__}, not a speaker")
    found = {
        name: next((entry[key] for key in keys if isinstance(entry.get(key), torch.Tensor)), None)
        for name, keys in _SPK2INFO_KEYS.items()
    }
    if missing := [" or ".join(_SPK2INFO_KEYS[name]) for name, tensor in found.items() if tensor is None]:
        raise ValueError(f"{where} has no {', no '.join(missing)}: CosyVoice2 needs a recording's tokens and mel")
    transcript = entry.get("prompt_text", "")
    if isinstance(transcript, torch.Tensor):
        transcript = decode(transcript.flatten().tolist())
    tensors = {name: tensor.float().numpy() for name, tensor in found.items() if tensor is not None}
    return _prompt(tensors, str(transcript), where)


def _prompt(tensors: Mapping[str, np.ndarray], transcript: str, where: str) -> Prompt:
    """tensors: (P,) or (1, P), (T, 80) or (1, T, 80), (192,) or (1, 192). ValueError naming the file."""
    tokens, mel = tensors[TOKENS].reshape(-1), tensors[MEL]
    frames, limit = mel.size // mel.shape[-1] if mel.size else 0, int(MAX_REFERENCE_SECONDS * TOKEN_RATE)
    if not 0 < len(tokens) <= limit:
        raise ValueError(f"{where} has {len(tokens)} speech tokens, not 1..{limit}")
    # Of one recording they differ by a token at most; more means other rates, those of another model.
    if abs(frames - TOKEN_MEL_RATIO * len(tokens)) > 2 * TOKEN_MEL_RATIO:
        raise ValueError(f"{where} has {frames} mel frames for {len(tokens)} speech tokens: not a voice of CosyVoice2")
    text = clean_line(transcript, name="its transcript", max_chars=MAX_TRANSCRIPT_CHARS) if transcript.strip() else ""
    prompt = Prompt.aligned(tokens, mel.reshape(frames, -1), tensors[EMBEDDING].reshape(-1), text)
    if not (np.isfinite(prompt.mel).all() and np.isfinite(prompt.embedding).all()):
        raise ValueError(f"{where} holds numbers that are not finite")
    return prompt


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more if names else "none"
