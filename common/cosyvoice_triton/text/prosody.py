"""The length that SSML gives a whole text."""

import re

_PROSODY = re.compile(
    r"""\s*(<speak\b[^>]*>)\s*<prosody\s+duration\s*=\s*(["'])([^"']*)\2\s*>(.*)</prosody>\s*</speak>\s*""", re.DOTALL
)
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


def without_duration(text: str) -> tuple[str, float | None]:
    """Return a document without the `<prosody duration="2.5s">` around all of its content, and the seconds; any other
    text as it is. ValueError for another form of the seconds."""
    if (found := _PROSODY.fullmatch(text)) is None:
        return text, None
    if (seconds := _SECONDS.fullmatch(found[3].strip())) is None:
        raise ValueError(f"the duration {found[3][:80]!r} of <prosody>: write it like 2.5s or 500ms")
    return f"{found[1]}{found[4]}</speak>", float(seconds[1]) / (1000 if seconds[2] == "ms" else 1)
