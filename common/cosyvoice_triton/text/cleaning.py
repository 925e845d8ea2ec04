"""Clean a client's text: normalize whitespace, remove control tokens; text with nothing to speak is an error."""

import re
import unicodedata

import regex

from cosyvoice_triton.constants import SYSTEM_WORDS
from cosyvoice_triton.text.markdown import without_emoji

# Every control token of the LLM's vocabulary is written <|name|>. The length limit keeps the prose between a stray "<|"
# and a distant "|>"; names are short.
_CONTROL_TOKEN = re.compile(r"<\|[^<|>]{0,64}\|>")

# Clients of upstream put an instruction, or CosyVoice3's system words, and this before a text or a transcript.
END_OF_PROMPT = "<|endofprompt|>"

# Letters, numbers and symbols but emoji. Text without any of them, such as "?!" or a zero-width space, is silent.
_SPEAKABLE = ("L", "N", "S")
# Tags and selectors, which hide a text in another one, and accents in heaps.
_HIDDEN = regex.compile(r"[\U000e0000-\U000e01ef]+|\p{M}{9,}")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # Unicode's category Cc without line feeds
_FILLERS = "\u115f\u1160\u3164\uffa0"  # invisible letters


def strip_control_tokens(text: str) -> str:
    """Replace everything that could be tokenized as a control token (`<|s_1|>`, `<|endofprompt|>`) with a space.

    Repeated until nothing matches, because removing an inner token can complete an outer one: `<|s_<|x|>1|>`.
    """
    found = 1
    while found:
        text, found = _CONTROL_TOKEN.subn(" ", text)
    return text


def split_instruction(text: str) -> tuple[str, str]:
    """Return the words before the last `<|endofprompt|>`, without CosyVoice3's system words and control tokens, and the
    text after it. Without that token: "" and the text."""
    before, _, after = text.rpartition(END_OF_PROMPT)
    words = " ".join(strip_control_tokens(_printable(before)).split())
    return words.removeprefix(SYSTEM_WORDS).strip(), after


def is_speakable(text: str) -> bool:
    """Return whether `text` contains anything that can be spoken."""
    return any(unicodedata.category(char)[0] in _SPEAKABLE for char in without_emoji(text))


def has_words(text: str) -> bool:
    """Return whether `text` has a letter or a digit. Symbols with names are words by now, and for others alone, such as
    an arrow, the LLM invents speech."""
    return any(char.isalnum() and char not in _FILLERS for char in text)


def clean_text(text: str, *, name: str, max_chars: int) -> str:
    """Return the text without control tokens, surplus whitespace and empty lines; lines are separated by line feeds.
    What is before `<|endofprompt|>` is left out: it is never to be spoken.

    `name`: the input's name in messages. ValueError if the text is longer than `max_chars` or has nothing to speak.
    """
    if len(text) > max_chars:
        raise ValueError(f"{name} has {len(text)} characters, more than the limit of {max_chars}")
    words = strip_control_tokens(_printable(split_instruction(text)[1]))
    lines = (" ".join(line.split()) for line in words.split("\n"))
    spoken = "\n".join(line for line in lines if line)
    if not is_speakable(spoken):
        shown = text if len(text) <= 80 else text[:80] + "..."
        raise ValueError(f"{name} has nothing to speak: {shown!r}")
    return spoken


def clean_line(text: str, *, name: str, max_chars: int) -> str:
    """Return `clean_text` of an optional text, as one line. Blank text gives ""; control tokens alone are an error."""
    text = text.strip()
    return clean_text(text, name=name, max_chars=max_chars).replace("\n", " ") if text else ""


def _printable(text: str) -> str:
    """Return the text without control characters, which splitting into lines and words would leave to the tokenizer,
    and without signs that nobody sees or that cover others, for which the LLM invents speech."""
    return _CONTROL.sub(" ", _HIDDEN.sub("", "\n".join(text.splitlines())))
