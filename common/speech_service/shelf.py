"""The voices by name: those of the folder that the models read too, see common/voice/book.py.

A recording travels with each request, so that a Triton on another machine needs no such folder; a voice that was
computed ahead is asked for by its name, and so is one that this folder does not have.
"""

import os
from pathlib import Path
from threading import Lock

import numpy as np

from common.constants import MAX_TRANSCRIPT_CHARS, PROMPT_SAMPLE_RATE
from common.speech_service.errors import ApiError, invalid
from common.speech_service.recordings import decode
from common.text import clean_line
from common.voice.audio import save_audio
from common.voice.book import VoiceBook
from common.voice.files import is_voice_name
from common.voice.prompt import Prompt, Recording

MAX_VOICES = 1000


class Shelf:
    """Every method reads or writes files, so none belongs on an event loop. Safe to use from several threads."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        # Only the models need the words of a spk2info.pt, which are token ids of their LLM.
        self._book = VoiceBook(folder, folder, decode=lambda ids: "")
        self._lock = Lock()  # of changes

    def names(self) -> list[str]:
        """The voices of the folder, sorted; UnavailableError where it cannot be read."""
        return self._book.names()

    def get(self, name: str) -> Recording | Prompt | None:
        """None where the folder has no such voice. UnavailableError where its file is damaged."""
        try:
            return self._book.get(name)
        except ValueError:
            return None

    def add(self, name: str, data: bytes, text: str) -> float:
        """Keep a recording, any libsndfile format, that says `text` (empty: unknown); its seconds. ApiError."""
        if not is_voice_name(name):
            raise invalid(
                f"{name!r} cannot be a voice's name: it is that of a file, so no slashes, no leading dot", "name"
            )
        try:
            text = clean_line(text, name="ref_text", max_chars=MAX_TRANSCRIPT_CHARS)
        except ValueError as error:
            raise invalid(error, "ref_text") from None
        try:
            wav = decode(data, self._max_bytes)
        except ValueError as error:
            raise invalid(error, "audio_sample") from None
        with self._lock:
            names = self.names()
            if name in names:
                raise ApiError(409, f"the voice {name!r} exists: delete it first, or choose another name", param="name")
            if len(names) >= MAX_VOICES:
                raise ApiError(409, f"there are {len(names)} voices, as many as the folder may hold: delete some first")
            self._write(name, wav, text)
        return len(wav) / PROMPT_SAMPLE_RATE

    def remove(self, name: str) -> None:
        """Take a voice's files away. ApiError where there are none."""
        with self._lock:
            if name not in self.names():
                raise ApiError(404, f"there is no voice {name!r}", code="voice_not_found", param="name")
            files = [self._folder / f"{name}{ending}" for ending in (".safetensors", ".wav", ".txt")]
            if not is_voice_name(name) or not any(file.exists() for file in files):
                raise invalid(f"the voice {name!r} is one of a spk2info.pt and has no file of its own", "name")
            for file in files:
                file.unlink(missing_ok=True)

    def _write(self, name: str, wav: np.ndarray, text: str) -> None:
        """The words first: whoever finds the recording finds them too. Neither is ever seen half written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        work = self._folder / f".{os.getpid()}.{os.urandom(4).hex()}"
        try:
            words = self._folder / f"{name}.txt"
            words.unlink(missing_ok=True)  # of a recording that somebody removed by hand
            if text:
                work.write_text(text, encoding="utf-8")
                work.replace(words)
            save_audio(work, wav, PROMPT_SAMPLE_RATE)
            work.replace(self._folder / f"{name}.wav")
        finally:
            work.unlink(missing_ok=True)
