"""What is written for the eye and not for the voice: Markdown, HTML and emoji."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import regex

_MARKED_UP = re.compile(r"[\\`*_#<>&~|\[\]+-]|^\d+[.)]", re.MULTILINE)
_SOUND_TAG = re.compile(r"</?(?:strong|laughter)>")  # of the LLM's vocabulary
# What the parser leaves, because it is no Markdown: "** bold **", or half of a pair whose other half is elsewhere. A
# star between numbers is a sign, and so is a number sign before one.
_LEFT = re.compile(
    r"\*{2,}|_{2,}|~{2,}|`+|(?<!\S)[*_](?=[^\s*_])|(?<=[^\s*_])[*_](?!\S)|(?<!\d )(?<!\S)\*(?!\S)|(?<!\w)#+(?=[^\W\d])"
    r"|(?<=[\u4e00-\u9fff])#(?!\d)"
)
_STAR_KEY = re.compile(r"\b([Pp]ress|[Dd]ial) \*(?=[\s\d.,]|$)")
_FOOTNOTE = re.compile(r"\[\^[\w-]{1,32}\]|(?<=[^\s\[\]])(?:\[\d{1,3}\])+")
_TASK = re.compile(r"^(\s*[-*+] )\[[ xX]\] ", re.MULTILINE)
_BLANKS = re.compile(r"[^\S\n]{2,}")
# Rows of one sign are drawn, as lines and borders are: read, they are seconds of invention or of "equals equals". Of
# marks one is left, which is a pause.
_ROW = regex.compile(r"([\p{P}\p{S}])\1{3,}")
_PAUSES = frozenset(".,;:!?…-–—。，、；：！？")

_SYMBOLS_OF_TEXT = "©®™‼⁉〰〽㊗㊙"  # are emoji in Unicode's tables only
_EMOJI = regex.compile(
    rf"(?:[[\p{{Extended_Pictographic}}\p{{Emoji_Presentation}}]--[{_SYMBOLS_OF_TEXT}]]"
    r"|\p{Regional_Indicator}|\p{Emoji_Modifier}|[\u200D\u20E3\uFE0F])+",
    regex.V1,
)
_MARKS = frozenset(".,!?;:…")
_BLANK = "".join(char for char in map(chr, range(0x3001)) if char.isspace() and char != "\n")


def without_emoji(text: str) -> str:
    """Return `text` with blanks in place of emoji, none before a mark; a digit in a key cap stays. Linear time."""
    if text.isascii():
        return text
    kept, end = [], 0
    for found in _EMOJI.finditer(text):
        before, end = text[end : found.start()], found.end()
        kept += [before.rstrip(_BLANK)] if text[end : end + 1] in _MARKS else [before, " "]
    return "".join(kept) + text[end:]


def spoken(text: str) -> str:
    """Return `text` without markup and rows of signs: the words of links, code and tables stay, and the numbers of
    lists."""
    text = _STAR_KEY.sub(r"\1 star ", _FOOTNOTE.sub("", without_emoji(text)))
    if _MARKED_UP.search(text):
        text = _LEFT.sub("", "".join(_rendered(_TASK.sub(r"\1", text))).replace(", \n", "\n"))
    text = _ROW.sub(lambda row: row[1] if row[1] in _PAUSES else " ", text)
    return _BLANKS.sub(" ", text).strip()


def _rendered(text: str) -> Iterator[str]:
    """Yield the words of each block, each block as a line."""
    for token in _parser().parse(text):
        if token.type == "list_item_open" and token.info:
            yield f"{token.info}{token.markup} "
        elif token.type == "inline":
            yield "".join(map(_words, token.children))
        elif token.type == "fence":
            yield token.content
        if token.type in ("th_close", "td_close"):
            yield ", "
        elif token.type in ("paragraph_close", "heading_close", "tr_close"):
            yield "\n"


def _words(token: Any) -> str:
    if token.type in ("softbreak", "hardbreak"):
        return "\n"
    if token.type == "html_inline":
        return str(token.content) if _SOUND_TAG.fullmatch(token.content) else ""
    return str(token.content)  # an image's is its description


@cache
def _parser() -> Any:
    """Return the parser. It is imported here, because most models of the server process no text."""
    from markdown_it import MarkdownIt

    # HTML inside lines only, because empty lines, which end blocks, are removed before. No definitions of links:
    # "[laughter]: yes" is speech.
    rules = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return rules.disable(["html_block", "code", "reference"])
