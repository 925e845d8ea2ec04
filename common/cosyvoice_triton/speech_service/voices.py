"""Registered voices, in the folder that the models read too, see voice/book.py.

A voice's recording is sent with each request, so that a Triton on another machine needs no such folder. A precomputed
voice is requested by name, and so is one that this folder lacks.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from cosyvoice_triton.constants import LOUDEST, MAX_TRANSCRIPT_CHARS, QUIETEST
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.speech_service.audio.recordings import decode, decode_apart
from cosyvoice_triton.speech_service.errors import ApiError, invalid, naming
from cosyvoice_triton.speech_service.limits import MAX_FIELDS, Finite, Text, Words
from cosyvoice_triton.text.cleaning import clean_transcript, stored_transcript
from cosyvoice_triton.voice.book import VoiceBook
from cosyvoice_triton.voice.bundle import export_voice, read_bundle
from cosyvoice_triton.voice.files import MAX_NAME_BYTES, delete_voice, is_voice_name, normalized, register_voice
from cosyvoice_triton.voice.judgement import Judgement, judge
from cosyvoice_triton.voice.mix import is_mix, mixed_voices
from cosyvoice_triton.voice.prompt import Prompt, Recording
from cosyvoice_triton.voice.rights import ANYONE, MAX_CONSENT_CHARS, Rights

MAX_VOICES = 1000  # of a folder, whose files are listed again for each list of voices and each new one
VOICE_BYTES = 2 << 20  # of a voice on average: 10 s at 48 kHz


class NewVoice(BaseModel):
    """A voice to be registered. Unknown fields are warnings."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"maxProperties": MAX_FIELDS})

    name: Annotated[Text, Field(max_length=MAX_NAME_BYTES)]
    ref_text: Annotated[Text, Field(max_length=MAX_TRANSCRIPT_CHARS)] = Field("", description="of the recording")
    instructions: Annotated[Text, Field(max_length=MAX_TRANSCRIPT_CHARS)] = Field(
        "", description="how the voice speaks, unless a request says how"
    )
    loudness: Finite | None = Field(
        None, ge=QUIETEST, le=LOUDEST, description="LUFS of its answers, unless a request says another"
    )
    trim_reference: bool = Field(False, description="cut the silence at its ends to 0.2 s, and mend its end")
    pronunciation: Words = Field({}, description="words, and what is spoken for each, one a line")
    consent: Annotated[Text, Field(max_length=MAX_CONSENT_CHARS)] = Field(
        "", description="the speaker's agreement, or where it is kept"
    )


class VoiceFolder(VoiceBook):
    """The voices of a service. All methods access files, so do not call them on an event loop. Threads and several
    services may share it."""

    def __init__(
        self, folder: Path, max_bytes: int, aliases: Iterable[str] = (), max_per_key: int = MAX_VOICES
    ) -> None:
        """Open a folder. aliases: as in `Settings.voice_aliases`. max_per_key: voices that one API key may register."""
        # Transcripts in a spk2info.pt are token ids of the LLM; only the models need them.
        super().__init__(folder, folder, decode=lambda ids: "")
        self.folder = folder
        self._max_bytes = max_bytes
        self._max_per_key = max_per_key
        self._changing = Lock()  # one after another, so that the limits hold
        self._aliases = {alias: voice for alias, _, voice in (each.partition("=") for each in aliases)}

    def aliases(self) -> dict[str, str]:
        """Return the voice that each alias stands for: of those that are spread, one of the operator's, so that no
        caller changes them for the others. A registered voice of the same name wins."""
        names = self.names()
        spread = itertools.cycle([name for name in names if not self.rights(name).created_by])
        voices = {alias: voice or next(spread, "") for alias, voice in self._aliases.items()}
        return {alias: voice for alias, voice in voices.items() if voice in names and alias not in names}

    def resolve(self, name: str) -> str:
        """Return the name of the voice that `name`, perhaps an alias or a mix of aliases, stands for."""
        if not name.isascii() and name not in self.names():
            name = normalized(name)
        try:
            parts = mixed_voices(name)
        except ValueError:  # the lookup says what is wrong with it
            return name
        if not self._aliases.keys() & {name, *(part for part, _ in parts)} or name in self.names():
            return name
        known = self.aliases()
        return "+".join(f"{known.get(part, part)}({weight})" for part, weight in parts) or known.get(name, name)

    def transcript(self, name: str) -> str:
        """Return the transcript of a voice; "" if it is unknown."""
        try:
            return self.get(name).text if name else ""
        except (UnavailableError, ValueError):
            return ""

    def add(self, new: NewVoice, data: bytes, key: str = "") -> Judgement:
        """Register a recording for an API key; return what is to be said of it. ApiError."""
        name, text = self._new(new.name), new.ref_text
        with naming("ref_text"):
            text = stored_transcript(new.instructions, text) if new.instructions.strip() else text
            instruction, text = clean_transcript(text, name="ref_text", max_chars=MAX_TRANSCRIPT_CHARS)
        with naming("audio_sample"):
            recording = decode(data, self._max_bytes)
        recording = replace(recording, text=text, instruction=instruction, loudness=new.loudness)
        judged = judge(recording)
        if new.trim_reference:
            judged = judge(recording := judged.mended(recording))
        self._save(name, recording, new.pronunciation, Rights.now(new.consent, key or ANYONE))
        return judged

    def export(self, name: str, key: str) -> bytes:
        """Return a voice as one file, to the key that registered it. ApiError."""
        name = self._owned(name, key)
        with naming("name"):
            return export_voice(self.folder, self, name, consent=bool(key))

    def load(self, data: bytes, name: str, key: str) -> str:
        """Register an exported voice under `name`, "" for its own; return the name. ApiError."""
        with naming("file"):
            found = read_bundle(data, decode_apart)
            rights = Rights.now(found.consent, key or ANYONE)
        name = self._new(name or found.name)
        self._save(name, found.voice, found.words, rights)
        return name

    def _new(self, name: str) -> str:
        """Return a name as a new voice has it. ApiError for one that no voice of a caller may have."""
        if not name:
            raise invalid("name is missing: give the voice a name", "name")
        if not is_voice_name(name := normalized(name)):
            raise invalid(f"{name!r} is not a valid name: no slashes, no leading dot, not `pronunciation`", "name")
        if name in self._aliases or is_mix(name):
            raise invalid(f"the name {name!r} is reserved: it is an alias, or of the form of a mixed voice", "name")
        return name

    def _require_room(self, names: Collection[str], key: str) -> None:
        """Raise ApiError if a key has as many voices as it may have, or as many bytes of them; or all have together."""
        limits = {"": MAX_VOICES} | ({} if key == ANYONE else {key: self._max_per_key})
        for whose, limit in limits.items():
            own = [name for name in names if not whose or self.rights(name).created_by == whose]
            size = sum(map(self.size, own))
            if len(own) >= limit or size >= limit * VOICE_BYTES:
                of = " of one API key" if whose else ""
                raise ApiError(
                    409,
                    f"the limit of {limit} voices{of}, or of {limit * VOICE_BYTES >> 20} MiB of them, is reached: "
                    f"there are {len(own)} of {size >> 20} MiB, delete some first",
                )

    def _save(self, name: str, voice: Recording | Prompt, words: Mapping[str, str], rights: Rights) -> None:
        with self._changing:
            names = self.names()
            self._require_room(names, rights.created_by)
            try:
                if name in names:
                    raise FileExistsError
                register_voice(self.folder, name, voice, words, rights)
            except FileExistsError:
                message = f"the voice {name!r} already exists: delete it first, or choose another name"
                raise ApiError(409, message, code="voice_exists", param="name") from None
            except OSError as error:
                raise ApiError(507, f"the voice cannot be stored: {error.strerror}") from error

    def _known(self, name: str) -> str:
        names = self.names()
        name = name if name in names else normalized(name)
        if name not in names:
            other = self.aliases().get(name)
            what = f"{name!r} is an alias of the voice {other!r}" if other else f"there is no voice {name!r}"
            raise ApiError(404, what, code="voice_not_found", param="name")
        return name

    def _owned(self, name: str, key: str) -> str:
        """Return the name of a voice that `key` may export and delete: its own, or any if the service has no keys.
        ApiError."""
        name = self._known(name)
        owner = self.rights(name).created_by
        if key and owner != key:
            keyless = owner in ("", ANYONE)
            whose = "was not added with an API key" if keyless else f"belongs to the API key {owner}"
            hint = "only the key that added a voice may export or delete it, or `cosyvoice-triton voice` on the server"
            raise ApiError(403, f"the voice {name!r} {whose}: {hint}", code="not_your_voice", param="name")
        return name

    def remove(self, name: str, key: str = "") -> None:
        """Delete a voice's files, for the key that registered it, and what this process keeps of them. ApiError."""
        with self._changing:  # nobody registers another one of this name in between
            name = self._owned(name, key)
            try:
                delete_voice(self.folder, name)
            except ValueError:
                message = f"the voice {name!r} is part of a spk2info.pt and has no file of its own"
                raise invalid(message, "name") from None
        self.names()  # forgets what it has read of them
        self.rights(name)
