"""The file formats of registered voices. Each is read here and nowhere else.

NAME.safetensors   a Prompt, encoded in advance
NAME.wav           a recording, and its transcript in NAME.txt (without one the voice is cloned cross-lingually)
spk2info.pt        upstream's speakers by name
"""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save

from common.constants import MAX_REFERENCE_SECONDS, MAX_TRANSCRIPT_CHARS, TOKEN_MEL_RATIO, TOKEN_RATE
from common.text import clean_line
from common.voice.audio import load_reference
from common.voice.prompt import Prompt, Recording

MAX_NAME_BYTES = 128

# The tensors of a voice file are named like those of a token2wav request; the transcript is UTF-8.
TOKENS, MEL, EMBEDDING, TRANSCRIPT = (
    "prompt_speech_tokens",
    "prompt_speech_feat",
    "prompt_spk_embedding",
    "reference_text",
)
# Their keys in a speaker of spk2info.pt: first those of upstream's Triton runtime, then those that CosyVoice2 saves.
_SPK2INFO_KEYS = {
    TOKENS: ("speech_token", "flow_prompt_speech_token"),
    MEL: ("speech_feat", "prompt_speech_feat"),
    EMBEDDING: ("embedding", "flow_embedding"),
}

Decode = Callable[[Sequence[int]], str]


def is_voice_name(name: str) -> bool:
    """Whether `name` can be the stem of a voice's files: one visible, printable file name that stays in its folder."""
    return (
        0 < len(name.encode(errors="replace")) <= MAX_NAME_BYTES
        and name.isprintable()
        and name == name.strip()
        and not name.startswith(".")
        and not set(name) & set("/\\")
    )


def read_voice(path: Path) -> Prompt:
    """A file written by `save_voice`. ValueError or SafetensorError if it is damaged."""
    tensors = load(path.read_bytes())  # not memory-mapped: a file that shrinks would crash the process
    if missing := [name for name in (TOKENS, MEL, EMBEDDING, TRANSCRIPT) if name not in tensors]:
        raise ValueError(f"{path.name} has no {', '.join(missing)}: not a voice file (see docs/voices.md)")
    transcript = tensors[TRANSCRIPT].tobytes().decode()
    return _prompt(tensors, transcript, path.name)


def save_voice(path: Path, prompt: Prompt) -> None:
    """Write a voice; readers see the complete file or none."""
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
    """A recording and the transcript next to it, validated like those of a request. ValueError naming the file."""
    try:
        wav = load_reference(path)
        transcript = path.with_suffix(".txt")
        text = transcript.read_text("utf-8-sig") if transcript.exists() else ""
        text = clean_line(text, name=transcript.name, max_chars=MAX_TRANSCRIPT_CHARS)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return Recording(wav, text)


def read_spk2info(path: Path) -> dict[str, Mapping[str, Any]]:
    """The speakers of a spk2info.pt. Only tensors and plain values are unpickled, so nothing in the file can run."""
    content = torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds a {type(content).__name__}, not speakers by name")
    return {str(name): entry for name, entry in content.items()}


def spk2info_prompt(entry: Any, where: str, decode: Decode) -> Prompt:
    """A speaker of spk2info.pt, as upstream's Triton runtime or CosyVoice2's `add_zero_shot_spk` writes it.

    decode: text of the LLM's token ids; CosyVoice2 saves transcripts as ids. ValueError starting with `where`.
    """
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
    # For one recording they differ by a token at most; a larger difference means the rates of another model.
    if abs(frames - TOKEN_MEL_RATIO * len(tokens)) > 2 * TOKEN_MEL_RATIO:
        raise ValueError(f"{where} has {frames} mel frames for {len(tokens)} speech tokens: not a voice of CosyVoice2")
    text = clean_line(transcript, name="its transcript", max_chars=MAX_TRANSCRIPT_CHARS)
    prompt = Prompt.aligned(tokens, mel.reshape(frames, -1), tensors[EMBEDDING].reshape(-1), text)
    if not (np.isfinite(prompt.mel).all() and np.isfinite(prompt.embedding).all()):
        raise ValueError(f"{where} contains values that are not finite")
    return prompt
