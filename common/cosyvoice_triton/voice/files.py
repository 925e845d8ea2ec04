"""The file formats of registered voices. Each is read here and nowhere else.

NAME.safetensors   a Prompt, encoded in advance, or an uploaded recording with its transcript
NAME.wav           a recording (also .flac, .mp3, .m4a, ...), and its transcript in NAME.txt (without one the voice is
                   cloned cross-lingually)
spk2info.pt        upstream's speakers by name: with a recording's tokens and mel, or an x-vector alone
                   The transcript of any of these may begin with an instruction and <|endofprompt|>.
NAME.pronunciation.txt, pronunciation.txt   the dictionaries of a voice of any of these, and of all voices
"""

import contextlib
import io
import json
import logging
import os
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from cosyvoice_triton.constants import (
    MAX_REFERENCE_SECONDS,
    MAX_TRANSCRIPT_CHARS,
    MEL_BINS,
    PROMPT_SAMPLE_RATE,
    TOKEN_MEL_RATIO,
    TOKEN_RATE,
)
from cosyvoice_triton.text.cleaning import clean_transcript, stored_transcript
from cosyvoice_triton.voice.prompt import Prompt, Recording, validate_loudness, validate_reference
from cosyvoice_triton.voice.recordings import ENDINGS, parse_recording
from cosyvoice_triton.voice.rights import MAX_HEADER_BYTES, UNKNOWN, Rights, header_bytes

logger = logging.getLogger(__name__)

MAX_NAME_BYTES = 128
RECORDINGS = tuple(case for each in ENDINGS for case in (each, each.upper()))

PRONUNCIATION = "pronunciation"  # no voice's name, because files are called so
VOICE_FILES = (".safetensors", *RECORDINGS, ".txt", f".{PRONUNCIATION}.txt")  # endings of what belongs to a voice

# The tensors of a voice file are named like those of a token2wav request; the transcript is UTF-8.
TOKENS, MEL, EMBEDDING = "prompt_speech_tokens", "prompt_speech_feat", "prompt_spk_embedding"
TRANSCRIPT = "reference_text"
WAV = "reference_wav"  # of an uploaded recording, in place of the first three
RATE = "reference_sample_rate"  # of the recording, or of that from which the prompt was made; files before 0.2 lack it
LOUDNESS = "loudness"  # LUFS of its answers, if the voice has any
# Their keys in a speaker of spk2info.pt: first those of upstream's Triton runtime, then those that CosyVoice2 saves.
_SPK2INFO_KEYS = {
    TOKENS: ("speech_token", "flow_prompt_speech_token"),
    MEL: ("speech_feat", "prompt_speech_feat"),
    EMBEDDING: ("embedding", "flow_embedding"),
}

Decode = Callable[[Sequence[int]], str]


def is_voice_name(name: str) -> bool:
    """Return whether `name` can be the stem of a voice's files: one visible, printable file name that stays in its
    folder."""
    return (
        0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES
        and name.isprintable()
        and not set(normalized(name)) & set("/\\")
        and not normalized(name).startswith(".")
        and name == name.strip()
        and name.rpartition(".")[2] != PRONUNCIATION
    )


def normalized(name: str) -> str:
    """Return a voice's name in Unicode's form NFKC, in which names that look alike are the same, and what looks like
    the characters of a path is one; a longer text, whose normalization would take long, as it is."""
    return unicodedata.normalize("NFKC", name) if len(name) <= MAX_NAME_BYTES else name


def read_voice(path: Path, full_band: bool = False) -> Prompt | Recording:
    """Return the voice in a file written by `save_voice` or `register_voice`. ValueError naming the file if it is
    damaged.

    full_band: the stack's mel has bands above those of a 16 kHz recording.
    """
    return parse_voice(path.read_bytes(), path.name, full_band)


def parse_voice(data: bytes, where: str, full_band: bool = False) -> Prompt | Recording:
    """Return the voice in the content of such a file. ValueError starting with `where`."""
    if (size := header_bytes(data)) > MAX_HEADER_BYTES:
        raise ValueError(f"{where} has a header of {size} bytes, more than the limit of {MAX_HEADER_BYTES}")
    tensors = _parsed(data, where, load)
    needed = (WAV, TRANSCRIPT) if WAV in tensors else (TOKENS, MEL, EMBEDDING, TRANSCRIPT)
    if missing := [name for name in needed if name not in tensors]:
        raise ValueError(f"{where} has no {', '.join(missing)}: not a voice file (see docs/voices.md)")

    def transcript() -> str:
        return str(tensors[TRANSCRIPT].tobytes(), "utf-8")

    if full_band and RATE not in tensors:
        logger.warning(
            "%s was registered when recordings were kept at 16 kHz: register it again for its upper bands", where
        )
    if WAV not in tensors:
        return _prompt(tensors, transcript, where)
    try:
        rate = _rate(tensors) or PROMPT_SAMPLE_RATE
        wav = validate_reference(tensors[WAV], rate=rate)
        instruction, text = clean_transcript(transcript(), name="its transcript", max_chars=MAX_TRANSCRIPT_CHARS)
        return Recording(wav, text, rate, instruction, _loudness(tensors))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def save_voice(path: Path, voice: Recording | Prompt, rights: Rights = UNKNOWN) -> None:
    """Write a voice with its transcript, in place of an older one; readers see a complete file or none."""
    with _new_file(path, _content(voice, rights)) as work:
        work.replace(path)


def register_voice(
    folder: Path, name: str, voice: Recording | Prompt, words: Mapping[str, str], rights: Rights
) -> None:
    """Write a new voice and its dictionary, or nothing. FileExistsError if there is such a file; of several processes
    that share the folder, one creates it."""
    path = folder / f"{name}.safetensors"
    with _new_file(path, _content(voice, rights)) as work:
        os.link(work, path)
    try:
        save_pronunciation(folder, name, words)
    except BaseException:
        path.unlink()
        raise


def save_pronunciation(folder: Path, name: str, words: Mapping[str, str]) -> None:
    """Write a voice's dictionary, in place of an older one; without words it gets none."""
    path = folder / f"{name}.{PRONUNCIATION}.txt"
    if not words:
        path.unlink(missing_ok=True)
        return
    with _new_file(path, json.dumps(words, ensure_ascii=False, indent=1).encode()) as work:
        work.replace(path)


def delete_voice(folder: Path, name: str) -> None:
    """Delete the files of a voice. ValueError if it has none."""
    files = [folder / f"{name}{ending}" for ending in VOICE_FILES] if is_voice_name(name) else []
    if not (files := [path for path in files if path.exists()]):
        raise ValueError(f"{folder} has no voice {name!r}; cosyvoice-triton voice list names them")
    for path in files:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _new_file(path: Path, content: bytes) -> Iterator[Path]:
    """Keep a complete file next to `path` while the block runs, under a name of its own that is no voice's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{os.urandom(8).hex()}")
    try:
        work.write_bytes(content)
        yield work
    finally:
        work.unlink(missing_ok=True)


def _content(voice: Recording | Prompt, rights: Rights) -> bytes:
    """Return the content of a voice's file."""
    tensors = {TRANSCRIPT: np.frombuffer(stored_transcript(voice.instruction, voice.text).encode(), np.uint8)}
    if voice.rate:
        tensors[RATE] = np.array([voice.rate], np.int32)
    if voice.loudness is not None:
        tensors[LOUDNESS] = np.array([voice.loudness], np.float32)
    if isinstance(voice, Recording):
        tensors[WAV] = voice.wav
    else:
        tensors[TOKENS] = voice.tokens.astype(np.int32)
        tensors |= {MEL: np.ascontiguousarray(voice.mel), EMBEDDING: np.ascontiguousarray(voice.embedding)}
    return save(tensors, rights.metadata)


def read_recording(path: Path) -> Recording:
    """Return a recording and the transcript next to it, validated like those of a request. ValueError naming the
    file."""
    try:
        recording = parse_recording(path.read_bytes())
        transcript = path.with_suffix(".txt")
        text = transcript.read_text("utf-8-sig") if transcript.exists() else ""
        instruction, text = clean_transcript(text, name=transcript.name, max_chars=MAX_TRANSCRIPT_CHARS)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return replace(recording, text=text, instruction=instruction)


def read_spk2info(path: Path) -> dict[str, Any]:
    """Return the speakers of a spk2info.pt. Only tensors and plain values are unpickled, so nothing in the file can
    run.

    ValueError naming the file if it is damaged.
    """
    from cosyvoice_triton.checkpoint import load_plain  # here: torch takes a second, and few folders have such a file

    data = path.read_bytes()  # not memory-mapped: a file that shrinks would crash the process
    content = _parsed(data, path.name, lambda data: load_plain(io.BytesIO(data)))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds a {type(content).__name__}, not speakers by name")
    return {str(name): entry for name, entry in content.items()}


def spk2info_prompt(entry: Any, where: str, decode: Decode) -> Prompt:
    """Return a speaker of spk2info.pt, as upstream's Triton runtime or CosyVoice2's `add_zero_shot_spk` writes it.

    One with an x-vector alone, as upstream's SFT models have, is a prompt without tokens, mel and transcript.
    decode: text of the LLM's token ids; CosyVoice2 saves transcripts as ids. ValueError starting with `where`.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is a {type(entry).__name__}, not a speaker")
    from torch import Tensor

    found = {
        name: next((entry[key].float().numpy() for key in keys if isinstance(entry.get(key), Tensor)), None)
        for name, keys in _SPK2INFO_KEYS.items()
    }
    tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
    transcript = entry.get("prompt_text", "")
    if tensors.keys() == {EMBEDDING}:
        tensors |= {TOKENS: np.zeros(0), MEL: np.zeros((0, MEL_BINS))}
    if missing := [" or ".join(keys) for name, keys in _SPK2INFO_KEYS.items() if name not in tensors]:
        raise ValueError(f"{where} has no {', no '.join(missing)}: a speaker has all three, or an x-vector alone")
    if isinstance(transcript, Tensor):
        ids = transcript.flatten().tolist()
        if any(each < 0 for each in ids):
            raise ValueError(f"{where}: its transcript has the token id {min(ids)}")
        return _prompt(tensors, lambda: decode(ids), where)
    return _prompt(tensors, lambda: str(transcript or ""), where)


def write_spk2info(path: Path, name: str, prompt: Prompt, text_ids: Sequence[int]) -> None:
    """Add a speaker to a spk2info.pt, or write a new one, as upstream's `add_zero_shot_spk` and `save_spkinfo`.

    text_ids: of what precedes the target text in a prompt of the LLM, (n,). ValueError if the file is damaged.
    """
    import torch

    def sized(key: str, values: np.ndarray, kind: torch.dtype = torch.int32) -> dict[str, torch.Tensor]:
        return {
            key: torch.from_numpy(values[None]).to(kind),
            f"{key}_len": torch.tensor([len(values)], dtype=torch.int32),
        }

    x_vector = torch.from_numpy(prompt.embedding[None])
    entry = {
        **sized("prompt_text", np.array(text_ids, np.int64)),
        **sized("llm_prompt_speech_token", prompt.tokens),
        **sized("flow_prompt_speech_token", prompt.tokens),
        **sized("prompt_speech_feat", prompt.mel, torch.float32),
        **{key: x_vector for key in ("llm_embedding", "flow_embedding")},
    }
    speakers, content = read_spk2info(path) if path.exists() else {}, io.BytesIO()
    torch.save({**speakers, name: entry}, content)
    with _new_file(path, content.getvalue()) as work:
        work.replace(path)


def _parsed(data: bytes, where: str, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(data)
    except Exception as error:  # damaged files make these parsers raise errors of many types, EOFError among them
        raise ValueError(f"{where} cannot be read: {str(error) or type(error).__name__}") from error


def _prompt(tensors: Mapping[str, np.ndarray], transcript: Callable[[], str], where: str) -> Prompt:
    """Return a prompt; each tensor may have a batch dimension of 1. ValueError starting with `where`."""
    try:
        tokens, embedding = tensors[TOKENS].reshape(-1).astype(np.int64), tensors[EMBEDDING].reshape(-1)
        mel = tensors[MEL].reshape(-1, tensors[MEL].shape[-1])
        instruction, text = clean_transcript(transcript(), name="its transcript", max_chars=MAX_TRANSCRIPT_CHARS)
        if tokens.size and tokens.min() < 0:
            raise ValueError(f"it has the speech token {tokens.min()}")
        _check_lengths(len(tokens), len(mel), text)
        prompt = Prompt.aligned(tokens, mel, embedding, text, instruction)
        prompt = replace(prompt, rate=_rate(tensors), loudness=_loudness(tensors))
    except (IndexError, RuntimeError, TypeError, ValueError) as error:  # of numpy, for unusable shapes
        raise ValueError(f"{where}: {error}") from error
    return prompt


def _rate(tensors: Mapping[str, np.ndarray]) -> int | None:
    return int(tensors[RATE].item()) if RATE in tensors else None


def _loudness(tensors: Mapping[str, np.ndarray]) -> float | None:
    return validate_loudness(round(float(tensors[LOUDNESS].item()), 3)) if LOUDNESS in tensors else None


def _check_lengths(tokens: int, frames: int, text: str) -> None:
    limit = int(MAX_REFERENCE_SECONDS * TOKEN_RATE)
    if tokens > limit:
        raise ValueError(f"{tokens} speech tokens, more than {limit}")
    # For one recording they differ by a token at most; a larger difference means the rates of another model.
    if abs(frames - TOKEN_MEL_RATIO * tokens) > 2 * TOKEN_MEL_RATIO or bool(frames) != bool(tokens):
        raise ValueError(f"{frames} mel frames for {tokens} speech tokens: not a voice of CosyVoice2")
    if text and not tokens:
        raise ValueError(f"the transcript {text[:40]!r} without speech tokens: the LLM would speak it")
