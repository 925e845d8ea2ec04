"""Text before it reaches the LLM: cleaned, normalized, and split into segments that are synthesized one after another.

cleaning.py        what nobody speaks: control tokens, Markdown, HTML, emoji, invisible signs
markup.py          pauses, changes of the voice, and the part of SSML that is supported
pronunciation.py   a request's dictionary of words and readings
language.py        the language of a text and of its sentences
*_reading.py       the rules of a language; numbers.py has the words of numbers
kana.py            Japanese kanji as kana, by an optional package
chinese.py         marks and blanks of Chinese text that are not spoken
segments.py        sentences, also of a text that arrives in pieces, the seconds that a text takes, segments
preview.py         what will be spoken, for people
frontend.py        numbers and signs as words; all of this: a text -> its segments
"""

from cosyvoice_triton.text.cleaning import (
    clean_line,
    clean_text,
    clean_transcript,
    is_speakable,
    split_instruction,
    stored_transcript,
    strip_control_tokens,
)
from cosyvoice_triton.text.frontend import TextFrontend

__all__ = [
    "TextFrontend",
    "clean_line",
    "clean_text",
    "clean_transcript",
    "is_speakable",
    "split_instruction",
    "stored_transcript",
    "strip_control_tokens",
]
