"""The voice book: registered voices by name, so that a request needs no recording.

A name is looked up as NAME.safetensors, then NAME.wav, both in the voices' folder, then in the spk2info.pt there and in
that next to the checkpoint (see `files`). One that is in none of them may be a mix of such names (see `mix`). Files are
checked for changes on every request, so voices can be added, changed or removed while the server runs.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn, TypeVar

from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.text.pronunciation import combined, read_pronunciations
from cosyvoice_triton.voice.files import (
    PRONUNCIATION,
    RECORDINGS,
    VOICE_FILES,
    Decode,
    is_voice_name,
    read_recording,
    read_spk2info,
    read_voice,
    spk2info_prompt,
)
from cosyvoice_triton.voice.mix import Mix, mixed_voices
from cosyvoice_triton.voice.prompt import Prompt, Recording
from cosyvoice_triton.voice.rights import UNKNOWN, Rights

logger = logging.getLogger(__name__)

SPK2INFO = "spk2info.pt"
UPSTREAM_DEFAULT = "001"  # the speaker of a spk2info.pt that upstream's server uses for a request without a voice
MAX_FILE_BYTES = 64 << 20  # a voice takes less than 2 MB; spk2info.pt holds some hundred of them
CACHED_FILES = 64  # contents kept in memory, a few MB each at most except for spk2info.pt
NAMES_SHOWN = 20

Voice = Recording | Prompt
ContentT = TypeVar("ContentT")


class _Files:
    """The contents of files, which one thread at a time may read."""

    def __init__(self) -> None:
        self._cache: OrderedDict[Path, tuple[tuple[int, ...], Any]] = OrderedDict()  # path -> its stamp, its content
        self._lock = Lock()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let the block `read`, after what was read from files that are gone, also of voices that nobody names anymore,
        is dropped."""
        with self._lock:
            for path in [path for path in self._cache if not path.is_file()]:
                del self._cache[path]
            yield

    def read(self, path: Path, read: Callable[[Path], ContentT]) -> ContentT | None:
        """Return the content of a file, read again after the file has changed; None if there is no such file."""
        if not path.is_file():
            return None
        stamp = _stamp(path) + _stamp(path.with_suffix(".txt"))
        if (known := self._cache.get(path)) is None or known[0] != stamp:
            if (size := path.stat().st_size) > MAX_FILE_BYTES:
                raise ValueError(f"{path.name} has {size} bytes, more than the limit of {MAX_FILE_BYTES}")
            self._cache[path] = known = (stamp, read(path))
            if len(self._cache) > CACHED_FILES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(path)
        return known[1]


class VoiceBook:
    """The registered voices. Safe to use from several threads.

    voices_dir: may be missing, also later. checkpoint_dir: where upstream has its spk2info.pt. decode: text of the
    LLM's token ids, which is how CosyVoice2 saves transcripts. default: name of the default voice.
    full_band: see `read_voice`.
    """

    def __init__(
        self,
        voices_dir: str | Path,
        checkpoint_dir: str | Path,
        decode: Decode,
        default: str = "",
        full_band: bool = False,
    ) -> None:
        self._folder = Path(voices_dir) if voices_dir else None
        folders = [folder for folder in (self._folder, Path(checkpoint_dir)) if folder is not None]
        self._spk2infos = [folder / SPK2INFO for folder in folders]
        self._decode = decode
        self._read_voice = partial(read_voice, full_band=full_band)
        self._default = default
        self._voices = _Files()
        self._rights: dict[str, tuple[tuple[int, ...], Rights]] = {}  # by name, with the stamp of the file
        self._words = _Files()  # apart: whoever asks for words must not wait for a large file of voices

    def get(self, name: str | None = None) -> Voice | Mix:
        """Return the voice of that name, or the default voice: that of `default`, else speaker UPSTREAM_DEFAULT of a
        spk2info.pt, else the only voice there is. ValueError with the known names if there is none, or naming what is
        wrong with a mix; UnavailableError if its file is damaged."""
        with self._voices.current():
            voice = None
            if name is None:
                name, voice = self._default_voice()
                if not name:
                    raise ValueError(
                        "no voice: the request has neither a reference_wav nor a speaker, and there is no default "
                        f"voice (docs/voices.md); known speakers: {_listed(self._names())}"
                    )
            if (voice := voice or self._read(name)) is not None:
                return voice
            if not (parts := mixed_voices(name)):
                self._unknown(name)
            where = f" in {name!r}, whose voices must be registered with the models (docs/voices.md)"
            return Mix([(self._read(part) or self._unknown(part, where), weight) for part, weight in parts])

    def pronunciation(self, voice: Recording | str | None) -> dict[str, str]:
        """Return the words of the voice of that name (None: the default voice), and those of all voices.
        UnavailableError naming what is wrong with a file."""
        name = voice if isinstance(voice, str) else ""
        if voice is None:
            with self._voices.current():
                name = self._default_voice()[0]
        files = [f"{name}.{PRONUNCIATION}.txt"] if name and is_voice_name(name) else []
        if self._folder is None:
            return {}
        with self._words.current():
            paths = [self._folder / file for file in (*files, f"{PRONUNCIATION}.txt")]
            try:
                known = [self._words.read(path, read_pronunciations) for path in paths]
            except (OSError, ValueError) as error:
                raise UnavailableError(f"the pronunciations cannot be used: {error}") from error
        return combined(*(each for each in known if each))

    def rights(self, name: str) -> Rights:
        """Return who registered a voice, when and with which consent, as far as its file says so."""
        stamp = _stamp(path := self._folder / f"{name}.safetensors") if self._folder is not None else ()
        if not stamp:
            self._rights.pop(name, None)
            return UNKNOWN
        if (known := self._rights.get(name)) is None or known[0] != stamp:
            self._rights[name] = known = (stamp, Rights.read(path))
        return known[1]

    def size(self, name: str) -> int:
        """Return the bytes of a voice's files."""
        paths = [] if self._folder is None else [self._folder / f"{name}{ending}" for ending in VOICE_FILES]
        return sum(stamp[1] for path in paths if (stamp := _stamp(path)))

    def names(self) -> list[str]:
        """Return the known names, sorted. UnavailableError if they cannot be read."""
        with self._voices.current():
            try:
                return self._names()
            except OSError as error:
                raise UnavailableError(f"the voices cannot be listed: {error}") from error

    def _default_voice(self) -> tuple[str, Voice | None]:
        """Return the name of the default voice, "" if there is none, and the voice itself if it is upstream's.
        UnavailableError if that is damaged."""
        if not self._default and (voice := self._read(UPSTREAM_DEFAULT, in_files=False)) is not None:
            return UPSTREAM_DEFAULT, voice
        names = [self._default] if self._default else self._names()
        if len(names) > 1:  # those that a service's callers have added change nothing for the others
            names = list(islice((name for name in names if not self.rights(name).created_by), 2))
        return (names[0] if len(names) == 1 else ""), None

    def _read(self, name: str, in_files: bool = True) -> Voice | None:
        voice: Voice | None
        try:
            voice = None
            if in_files and self._folder is not None and is_voice_name(name):
                voice = self._voices.read(self._folder / f"{name}.safetensors", self._read_voice)
                for ending in RECORDINGS:
                    voice = voice or self._voices.read(self._folder / f"{name}{ending}", read_recording)
            return voice or self._of_spk2info(name)
        except (OSError, RuntimeError, ValueError) as error:
            raise UnavailableError(f"speaker {name!r} cannot be used: {error}") from error

    def _unknown(self, name: str, where: str = "") -> NoReturn:
        raise ValueError(f"unknown speaker {name!r}{where}; known speakers: {_listed(self._names())}")

    def _of_spk2info(self, name: str) -> Prompt | None:
        for path in self._spk2infos:
            if (entry := (self._voices.read(path, read_spk2info) or {}).get(name)) is not None:
                return spk2info_prompt(entry, f"{path.name}, {name!r}", self._decode)
        return None

    def _names(self) -> list[str]:
        """Return the known names. Damaged files are included: requesting such a voice says what is wrong with it."""
        found: set[str] = set()
        for path in self._spk2infos:
            try:
                found.update(self._voices.read(path, read_spk2info) or ())
            except ValueError as error:  # it holds nobody that could be listed, and the others can be used
                logger.warning("the speakers of %s are not listed: %s", path, error)
        if self._folder is not None and self._folder.is_dir():
            files = (Path(entry.name) for entry in os.scandir(self._folder))
            found |= {
                file.stem for file in files if file.suffix in (".safetensors", *RECORDINGS) and is_voice_name(file.stem)
            }
        return sorted(found)


def _stamp(path: Path) -> tuple[int, ...]:
    """Return modification time, size and inode, which differ once a file has changed; empty without such a file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more if names else "none"
