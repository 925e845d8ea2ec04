"""Text as it comes from a client: whitespace normalised, control tokens taken out, nothing left is an error."""

import re
import unicodedata

# Every control token of the LLM's vocabulary is written <|name|>. Names are short; a bound keeps prose between a
# stray "<|" and a far "|>" from being swallowed.
_CONTROL_TOKEN = re.compile(r"<\|[^<|>]{0,64}\|>")

# Letters, numbers and symbols: text without any of them, such as "?!" or a zero-width space, has no sound.
_SPEAKABLE = ("L", "N", "S")


def strip_control_tokens(text: str) -> str:
    """Replace whatever could be tokenised as control (`<|s_1|>`, `<|eos1|>`, `<|endofprompt|>`) by a space.

    Repeated until nothing matches, since taking out an inner token may join an outer one: `<|s_<|x|>1|>`.
    """
    found = 1
    while found:
        text, found = _CONTROL_TOKEN.subn(" ", text)
    return text


def is_speakable(text: str) -> bool:
    """Whether anything in `text` has a sound."""
    return any(unicodedata.category(char)[0] in _SPEAKABLE for char in text)


def clean_text(text: str, *, name: str, max_chars: int) -> str:
    """Return speakable text: lines without blanks at their ends, none of them empty, joined by line feeds.

    `name` is the input's name for the messages. Raises ValueError where the text is longer than `max_chars`, or
    where nothing is left of it.
    """
    if len(text) > max_chars:
        raise ValueError(f"{name} has {len(text)} characters, more than the limit of {max_chars}")
    lines = (" ".join(line.split()) for line in strip_control_tokens(_printable(text)).split("\n"))
    spoken = "\n".join(line for line in lines if line)
    if not is_speakable(spoken):
        shown = text if len(text) <= 80 else text[:80] + "..."
        raise ValueError(f"{name} has nothing to speak: {shown!r}")
    return spoken


def clean_line(text: str, *, name: str, max_chars: int) -> str:
    """`clean_text` of an optional text, as one line. Blank text gives ""; control tokens alone are an error."""
    text = text.strip()
    return clean_text(text, name=name, max_chars=max_chars).replace("\n", " ") if text else ""


def _printable(text: str) -> str:
    """Without control characters, which would survive the split into lines and words and reach the tokenizer."""
    lines = "\n".join(text.splitlines())
    return "".join(" " if char != "\n" and unicodedata.category(char) == "Cc" else char for char in lines)
