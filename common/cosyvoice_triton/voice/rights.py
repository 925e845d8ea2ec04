"""Who registered a voice, when, and with whose consent: in the header of NAME.safetensors, so always with the voice."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MAX_CONSENT_CHARS = 4000
ANYONE = "anyone"  # who added a voice to a service without API keys
MAX_HEADER_BYTES = 64 << 10  # of the file; ours have a few hundred
_LENGTH_BYTES = 8  # the first ones of the file: the header's length


@dataclass(frozen=True)
class Rights:
    """`consent`: a text, or where it is kept. `created_by`: the name of an API key, or ANYONE; empty: the operator, who
    has placed the file, or unknown. `created_at`: seconds since 1970, 0 if unknown. ValueError if the consent cannot be
    stored."""

    consent: str = ""
    created_by: str = ""
    created_at: int = 0

    def __post_init__(self) -> None:
        if len(self.consent) > MAX_CONSENT_CHARS:
            raise ValueError(f"consent has {len(self.consent)} characters, more than the limit of {MAX_CONSENT_CHARS}")
        try:
            self.consent.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"consent: character {error.start + 1} is half of a surrogate pair") from None

    @classmethod
    def now(cls, consent: str = "", created_by: str = "") -> "Rights":
        """Return those of a voice that is registered now."""
        return cls(consent, created_by, int(time.time()))

    @classmethod
    def read(cls, path: Path) -> "Rights":
        """Return those in a voice's file; empty ones if it has none or cannot be read."""
        try:
            with path.open("rb") as file:
                length = header_bytes(file.read(_LENGTH_BYTES))
                found = json.loads(file.read(length)).get("__metadata__", {}) if length <= MAX_HEADER_BYTES else {}
            return cls(str(found["consent"]), str(found["created_by"]), int(found["created_at"]))
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            return cls()

    @property
    def metadata(self) -> dict[str, str]:
        """Return what the header of a file of safetensors holds."""
        return {"consent": self.consent, "created_by": self.created_by, "created_at": str(self.created_at)}

    @property
    def known(self) -> dict[str, Any]:
        """Return the values that are known, for lists."""
        return {name: value for name, value in vars(self).items() if value}

    def shown_to(self, key: str) -> "Rights":
        """Return what a caller with that API key may know: the consent is for the voice's owner alone. Without a key
        nobody can prove to be that, so only the operator, who has the files, reads it."""
        return self if key and key == self.created_by else replace(self, consent="")


def header_bytes(file: bytes) -> int:
    """Return the length of the header of a voice's file, of which its first bytes are needed."""
    return int.from_bytes(file[:_LENGTH_BYTES], "little")


UNKNOWN = Rights()
