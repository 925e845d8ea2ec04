"""A voice as one file, to keep it or to take it elsewhere: a zip of voice.json, and recording.wav or, of a voice that
was encoded ahead, voice.safetensors.

Reading one unpacks nothing: two members of known names are read into memory, each up to its limit.
"""

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cosyvoice_triton.constants import MAX_REFERENCE_RATE, MAX_REFERENCE_SECONDS, MAX_TRANSCRIPT_CHARS
from cosyvoice_triton.errors import json_kind
from cosyvoice_triton.text.cleaning import clean_transcript, stored_transcript
from cosyvoice_triton.text.pronunciation import pronunciations, read_pronunciations
from cosyvoice_triton.voice.book import VoiceBook
from cosyvoice_triton.voice.files import PRONUNCIATION, is_voice_name, parse_voice
from cosyvoice_triton.voice.prompt import Prompt, Recording, validate_loudness
from cosyvoice_triton.voice.recordings import parse_recording
from cosyvoice_triton.voice.rights import MAX_CONSENT_CHARS, UNKNOWN

_ABOUT, _WAV, _ENCODED = "voice.json", "recording.wav", "voice.safetensors"
_SOUND_BYTES = int(MAX_REFERENCE_SECONDS * MAX_REFERENCE_RATE * 4) + (64 << 10)  # floats, and a header
_LIMITS = {_ABOUT: 2 << 20, _WAV: _SOUND_BYTES, _ENCODED: _SOUND_BYTES}  # a dictionary takes a megabyte
_CONTENTS = [_WAV, _ABOUT], [_ABOUT, _ENCODED]
_END, _END_BYTES = b"PK\5\6", 22  # the last record of a zip without a comment
_END_64, _END_64_BYTES = b"PK\6\7", 20  # the record before it in a large one, whose values zipfile prefers
_MAX_DIRECTORY_BYTES = 4096  # zipfile makes an object for each entry


@dataclass(frozen=True)
class Bundle:
    """What is in the file, checked."""

    name: str
    voice: Recording | Prompt
    words: dict[str, str]
    consent: str


def export_voice(folder: Path, book: VoiceBook, name: str, consent: bool = True) -> bytes:
    """Return a registered voice as one file, with its consent or without. ValueError if it has no file of its own;
    UnavailableError if that is damaged."""
    voice, encoded, words = book.get(name), folder / f"{name}.safetensors", folder / f"{name}.{PRONUNCIATION}.txt"
    rights = book.rights(name) if consent else UNKNOWN
    about: dict[str, Any] = {"name": name, "consent": rights.consent, **rights.known}
    about["pronunciation"] = read_pronunciations(words) if words.exists() else {}
    if isinstance(voice, Recording):
        import soundfile as sf

        sound = io.BytesIO()
        sf.write(sound, voice.wav, voice.rate, format="WAV", subtype="FLOAT")
        about["text"], content = stored_transcript(voice.instruction, voice.text), {_WAV: sound.getvalue()}
        if voice.loudness is not None:
            about["loudness"] = voice.loudness
    elif is_voice_name(name) and encoded.exists():
        content = {_ENCODED: encoded.read_bytes()}
    else:
        raise ValueError(f"the voice {name!r} has no file of its own: it is a mix, or part of a spk2info.pt")
    content[_ABOUT] = json.dumps(about, ensure_ascii=False, indent=1).encode()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as written:
        for member, data in content.items():
            written.writestr(member, data)
    return file.getvalue()


def read_bundle(data: bytes, parse: Callable[[bytes], Recording] = parse_recording) -> Bundle:
    """Return the content of a file that `export_voice` made. parse: of its recording. ValueError saying what is wrong
    with it."""
    members = _members(data)
    try:
        about = json.loads(members[_ABOUT])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_ABOUT} is not JSON: {error}") from None
    if not isinstance(about, dict):
        raise ValueError(f"{_ABOUT} is {json_kind(about)}, not a JSON object")
    texts = {name: about.get(name, "") for name in ("name", "text", "consent")}
    for name, text in texts.items():
        if not isinstance(text, str) or len(text) > MAX_CONSENT_CHARS or any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError(f"{name} in {_ABOUT} is not a text of up to {MAX_CONSENT_CHARS} characters")
    words = pronunciations(about.get("pronunciation") or {})
    if (encoded := members.get(_ENCODED)) is not None:
        return Bundle(texts["name"], parse_voice(encoded, _ENCODED), words, texts["consent"])
    try:
        recording = parse(members[_WAV])
    except ValueError as error:
        raise ValueError(f"{_WAV}: {error}") from None
    if not isinstance(loudness := about.get("loudness"), (int, float, type(None))):
        raise ValueError(f"loudness in {_ABOUT} is not a number")
    instruction, text = clean_transcript(texts["text"], name="text", max_chars=MAX_TRANSCRIPT_CHARS)
    recording = replace(recording, text=text, instruction=instruction, loudness=validate_loudness(loudness))
    return Bundle(texts["name"], recording, words, texts["consent"])


def _members(data: bytes) -> dict[str, bytes]:
    end = data[-_END_BYTES:]
    large = data[-_END_BYTES - _END_64_BYTES :][:4] == _END_64
    if end[:4] != _END or large or int.from_bytes(end[12:16], "little") > _MAX_DIRECTORY_BYTES:
        raise ValueError("the file is not a zip of an exported voice")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            entries = sorted(file.infolist(), key=lambda entry: entry.filename)
            if [entry.filename for entry in entries] not in map(sorted, _CONTENTS):
                raise ValueError(f"the file has other members than {_ABOUT} and {_WAV}, or {_ABOUT} and {_ENCODED}")
            return {entry.filename: _read(file, entry) for entry in entries}
    except Exception as error:  # damaged files make zipfile raise errors of many types
        raise ValueError(f"the file cannot be used: {error}") from None


def _read(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{entry.filename} is compressed in another way than by deflate")
    limit = _LIMITS[entry.filename]
    with file.open(entry) as member:  # whatever its header says of its size, no more than this is unpacked
        content = member.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{entry.filename} has more than {limit} bytes")
    return content
