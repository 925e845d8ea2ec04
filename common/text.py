"""Text as it comes from a client: whitespace normalised, control tokens taken out, nothing left is an error."""

import re
import unicodedata

# Every control token of the LLM's vocabulary is written <|name|>. Names are short; a bound keeps prose between a
# stray "<|" and a far "|>" from being swallowed.
_CONTROL_TOKEN = re.compile(r"<\|[^<|>]{0,64}\|>")

# Separators and format characters: text of nothing else, such as a zero-width space, is as empty as none.
_UNHEARD = ("Zs", "Zl", "Zp", "Cf")


def strip_control_tokens(text: str) -> str:
    """Replace whatever could be tokenised as control (`<|s_1|>`, `<|eos1|>`, `<|endofprompt|>`) by a space.

    Repeated until nothing matches, since taking out an inner token may join an outer one: `<|s_<|x|>1|>`.
    """
    found = 1
    while found:
        text, found = _CONTROL_TOKEN.subn(" ", text)
    return text


def normalise_text(text: str, *, name: str, max_chars: int) -> str:
    """Return speakable text on one line.

    `name` is the input's name for the messages. Raises ValueError where the text is longer than `max_chars`, or
    where nothing is left of it.
    """
    if len(text) > max_chars:
        raise ValueError(f"{name} has {len(text)} characters, more than the limit of {max_chars}")
    # Unprintable control characters go first: left in, they would survive the split and reach the tokenizer.
    printable = "".join(" " if unicodedata.category(char) == "Cc" else char for char in text)
    spoken = " ".join(strip_control_tokens(printable).split())
    if all(unicodedata.category(char) in _UNHEARD for char in spoken):
        shown = text if len(text) <= 80 else text[:80] + "..."
        raise ValueError(f"{name} has nothing to speak: {shown!r}")
    return spoken
