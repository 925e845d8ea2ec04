"""What nobody speaks is removed from a client's text: what it was written as, such as HTML, LaTeX, subtitles or the
thoughts of an LLM; control tokens, Markdown, emoji, and invisible signs. Text with nothing to speak is an error.
"""

import html
import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from urllib.parse import unquote

import regex

from cosyvoice_triton.constants import SYSTEM_WORDS
from cosyvoice_triton.text.tables import Words

OnLeftOut = Callable[[str, str], object]  # is told what is left out, and the reason

_WORDS = Words("markup", {})
_BLOCK, _INLINE, _SILENT = (_WORDS.pattern(f"«{name}»") for name in ("block", "inline", "silent"))  # names of elements
_TAG = re.compile(_WORDS.pattern("«tag»").pattern, re.DOTALL | re.IGNORECASE)
_ROW_END = re.compile(r", *\n\s*")
_SPOKEN_TAG = re.compile(r"</?(?:strong|laughter)>")  # of the LLM's vocabulary
_ENTITY = re.compile(r"&(?:[A-Za-z][A-Za-z0-9]{1,30}|#\d{1,7}|#[xX][0-9A-Fa-f]{1,6});")
_RAISED, _LOWERED = (str.maketrans("0123456789-+", signs) for signs in ("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "₀₁₂₃₄₅₆₇₈₉₋₊"))
_CUE = _WORDS.pattern("«cue»")
_THOUGHT = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
_FORMULA = re.compile(_WORDS.pattern("«formula»").pattern, re.DOTALL)
_MATHEMATICAL = re.compile(r"\\[A-Za-z]|[\^_=]|\A[A-Za-z]\Z")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)")


def plain_text(text: str, on_left_out: OnLeftOut) -> str:
    """Return the words of `text` without HTML, with the signs that entities and LaTeX stand for, and without the
    numbers and times of subtitles."""
    if "-->" in text:
        text = _CUE.sub(lambda found: gone(found[0], "marks of a subtitle", on_left_out), text)
    if "<" in text:
        text = _ROW_END.sub("\n", _TAG.sub(lambda found: _of_tag(found, on_left_out), text))
    if "&" in text:
        text = _ENTITY.sub(lambda found: html.unescape(found[0]), text)
    if "$" in text or "\\" in text:
        text = _FORMULA.sub(lambda found: _of_formula(found, on_left_out), text)
    return text


def without_thoughts(text: str, on_left_out: OnLeftOut) -> str:
    """Return `text` without what an LLM wrote between `<think>` and `</think>`."""
    return _THOUGHT.sub(lambda found: gone(found[0], "thoughts", on_left_out), text)


def gone(written: str, reason: str, on_left_out: OnLeftOut, instead: str = "") -> str:
    """Tell `on_left_out` of what is not spoken, and return what is spoken instead."""
    on_left_out(written.strip(), reason)
    return instead


def _of_tag(found: re.Match[str], on_left_out: OnLeftOut) -> str:
    """Return what is spoken of a tag: a line's end after a block, a comma after a cell; all of what is none."""
    written, name = found[0], (found["name"] or "").lower()
    if found["silent"]:
        return gone(written, f"contents of <{found['silent'].lower()}>", on_left_out, " ")
    if found["raised"]:
        on_left_out(written.replace(found["digits"], " "), "HTML tag")
        return found["digits"].translate(_RAISED if found["raised"].lower() == "sup" else _LOWERED)
    if written.startswith("<!"):
        return gone(written, "HTML comment", on_left_out)
    if name and not _SPOKEN_TAG.fullmatch(written):
        if _BLOCK.fullmatch(name):
            return gone(written, "HTML tag", on_left_out, "\n")
        if found["prefix"] or _INLINE.fullmatch(name) or _SILENT.fullmatch(name):
            return gone(written, "HTML tag", on_left_out, ", " if name in ("td", "th") and found["end"] else "")
    return written


def _of_formula(found: re.Match[str], on_left_out: OnLeftOut) -> str:
    """Return a formula with signs for its commands, of which an unknown one is said by its name."""

    def sign(command: re.Match[str]) -> str:
        name, signs = command[1], _WORDS.tables["command"]
        if name in signs:
            return gone(command[0], "LaTeX command", on_left_out, signs[name])
        return name if name in "%&#$" else f" {name} " if name.isalpha() else " "

    body = next(filter(None, found.groups()))
    if found["inline"] and not _MATHEMATICAL.search(body):
        return found[0]
    body = _FRACTION.sub(lambda each: f"{each[1]}/{each[2]}" if each[1].isdigit() else f"{each[1]} / {each[2]}", body)
    body = re.sub(r"\^\{([^{}]*)\}", r"^\1", _COMMAND.sub(sign, body))
    return re.sub("[{}_]", " ", body).strip()


# Format characters, but the joiner and the tags of emoji, which `without_emoji` removes with them.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u180e\u3164\uffa0\u200b-\u200c\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff]"
)
_JOINER = re.compile("(?<![\u200d\ufe0f\u2600-\u27bf\U0001f000-\U0001ffff])\u200d")  # not that of an emoji
_ODD_BLANK = re.compile("[\u00a0\u2000-\u200a\u202f\u205f]")
_SAME = str.maketrans({"\u2010": "-", "\u2011": "-", "\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\u2044": "/"})
_VULGAR_FRACTION = re.compile("(\\d?)([\u00bc-\u00be\u2150-\u215e\u2189])")
_SUPERSCRIPTS = "[\u207b\u00b9\u00b2\u00b3\u2070\u2074-\u2079]+"
_POWER = re.compile(f"(?<=\\d){_SUPERSCRIPTS}")
_FOOTNOTE_MARK = re.compile(f"(?:(?<=[a-z]{{4}})|(?<=[.,;:!?。，、\u4e00-\u9fff])(?<!米)){_SUPERSCRIPTS}")
# Letters and digits that are others in another dress: full width, mathematical, ligatures, super- and subscripts, but
# those of m² and x²: the languages read them.
_DRESSED = re.compile(
    "[\uff10-\uff19\uff21-\uff3a\uff41-\uff5a\ufb00-\ufb06\u2070-\u209c\u00b9\u2460-\u2473"
    "\u2102\u2107\u210a-\u2115\u2119-\u211d\u2124\u2128-\u2131\u2133-\u2138\U0001d400-\U0001d7ff\u33a0-\u33a5\u338d-\u339e\uff05\uff04\uffe1]"
    "|(?<![A-Za-z)])[\u00b2\u00b3]"
)
# A heart between two words is one.
_LOVE = re.compile("(?:\\b(I|[Ww]e|[Yy]ou|[Tt]hey)\\s?|(?<=[我们]))[❤♥]\ufe0f?\\s?(?=[A-Za-z\u4e00-\u9fff])")
_FULL_WIDTH_MARK = re.compile("(?<=\\d)[\uff1a\uff0e](?=\\d)")
# Numbers in circles: of an item, with a pause before and after it; before a mark that of a footnote.
_CIRCLED = re.compile("(\\S?)[^\\S\\n]*([\u2460-\u2473])\\s*(?=([^\\W\\d]?))")
# Faces of signs.
_SMILEY = re.compile(
    "(?<!\\S)<3(?=[\\s.,!]|$)|(?<![\\w:])[:;=]['’]?-?[)(DPpO/\\\\|*\\]\\[]+(?=[\\s.,!?。，！？]|$)|(?<![A-Za-z0-9^])\\^[_.-]?\\^;*|(?<![A-Za-z0-9])(?:T_T|>_<|-_-|:-?[)(])(?![\\w)])"
    "|\u00af\\\\?_?\\(\u30c4\\)_?/\u00af|[(（](?=[^()（）]*[^()（）.?!…,。，！？、\\s—–\\w]|[^()（）]*[\u03c9\u0434\u0414])(?:[^()（）A-Za-z0-9\\s\u4e00-\u9fff\uac00-\ud7a3.,+%$€£=/-]|[oOTQ_.;-]){2,12}[)）][\uff89\u30ce/\u2661\u2665\u266a\u2606~]*"
)


def plain_signs(text: str, on_left_out: OnLeftOut = lambda written, reason: None) -> str:
    """Return `text` without invisible characters and faces of signs, and with plain letters, digits, hyphens and blanks
    for their typographic variants."""
    text = _SMILEY.sub(lambda face: gone(face[0], "smiley", on_left_out, " "), text)
    if text.isascii():
        return text
    if re.search("[\u2460-\u2473]", text):
        text = _CIRCLED.sub(lambda found: _item(found, on_left_out), text)
    text = _ODD_BLANK.sub(" ", _JOINER.sub("", _INVISIBLE.sub("", text))).translate(_SAME)
    text = _LOVE.sub(lambda match: f"{match[1]} love " if match[1] else "爱", text)
    text = _VULGAR_FRACTION.sub(lambda match: f"{match[1]} {_plain(match[2])}".lstrip(), text)
    text = _POWER.sub(lambda match: "^" + _plain(match[0]), text)
    text = _FOOTNOTE_MARK.sub(lambda mark: gone(mark[0], "footnote mark", on_left_out), text)
    text = _DRESSED.sub(lambda match: _plain(match[0]), text)
    return _FULL_WIDTH_MARK.sub(lambda match: _plain(match[0]), text)


def _plain(dressed: str) -> str:
    return unicodedata.normalize("NFKC", dressed).replace("\u2212", "-").replace("\u2044", "/")


def _item(match: re.Match[str], on_left_out: OnLeftOut) -> str:
    number, wide = _plain(match[2]), match[3] > "\u2e80"
    if match[1] and not match[3]:
        return gone(match[2], "footnote mark", on_left_out, match[1])
    pause = "" if not match[1] or match[1] in ",.;:，。；：、" else "，" if wide else ", "
    return f"{match[1]}{pause}{number}{'、' if wide else ', '}"


_MARKUP = re.compile(r"[\\`*_#<>&~|\[\]+-]|^\d+[.)]", re.MULTILINE)
# What the parser leaves, because it is no Markdown: "** bold **", or half of a pair whose other half is elsewhere. A
# star between numbers is a sign, and so is a number sign before one.
_LEFT = re.compile(
    r"(?=[*_~`#])(?:(?<![\d*])\*{2,}(?!\*)|(?<!\*)\*{2,}(?![\d*])|_{2,}|~{2,}|`+|(?<!\S)[*_](?=[^\s*_])|(?<=[^\s*_])[*_](?!\S)|(?<!\d )(?<!\S)\*(?!\S)|(?<!\w)#+(?=[^\W\d])"
    r"|(?<=[\u4e00-\u9fff])#(?!\d))"
)
_KEY = re.compile(r"(\b(?:[Pp]ress|[Dd]ial)) \*(?=[\s\d.,]|$)|(?:(?<=[按拨])|(?<=[按拨]\d))([*#])(?=[\d键号，。；]|$)")
_FOOTNOTE = re.compile(r"\[\^[\w-]{1,32}\]|(?<=[^\s\[\]])(?:\[\d{1,3}\])+")
_TASK = re.compile(r"^(\s*[-*+] )(\[[ xX]\]) ", re.MULTILINE)
_BULLET = re.compile(r"^\s*(?:[•◦‣▪▫●○■□◆◇▶►➤➢✓✔✗✘→⇒]\ufe0f?\s*|~{3,})", re.MULTILINE)
_TIMES = re.compile(r"\*(?=\d)(?:(?<=\d\*)|(?<=\d[a-z]\*)|(?<=\d[a-z]{2}\*))")
_LINK = re.compile(r"\[([^\[\]\n]+)\](\((?:[a-z]+:|/|\.|#|www)[^()\n]*\))")  # with a blank, which is no Markdown
_BLANKS = re.compile(r"[^\S\n]{2,}")
# Rows of one sign are drawn, as lines and borders are: read, they are seconds of invention or of "equals equals". Of
# marks one is left, which is a pause.
_ROW = regex.compile(r"(?!(?<=\d)\*+\d)([\p{P}\p{S}])\1{3,}")  # not the stars in a number
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


def without_markup(text: str, on_left_out: OnLeftOut = lambda written, reason: None) -> str:
    """Return `text` without Markdown, emoji and rows of signs: the words of links, code and tables stay, and the numbers
    of lists."""
    text = _FOOTNOTE.sub(lambda mark: gone(mark[0], "footnote mark", on_left_out), without_emoji(_BULLET.sub("", text)))
    text = _TIMES.sub("×", _KEY.sub(lambda key: f"{key[1]} star" if key[1] else "井" if key[2] == "#" else "星", text))
    if _MARKUP.search(text):
        text = _TASK.sub(lambda box: gone(box[2], "box of a task", on_left_out, box[1]), text)
        text = "".join(_rendered(text, on_left_out)).replace(", \n", "\n")
        text = _LEFT.sub("", _LINK.sub(lambda link: gone(link[2], "address of a link", on_left_out, link[1]), text))
    text = _ROW.sub(lambda row: row[1] if row[1] in _PAUSES else " ", text)
    return _BLANKS.sub(" ", text).strip()


def _rendered(text: str, on_left_out: OnLeftOut) -> Iterator[str]:
    """Yield the words of each block, each block as a line."""
    for token in _parser().parse(text):
        if token.type == "list_item_open" and token.info:
            yield f"{token.info}{token.markup} "
        elif token.type == "inline":
            yield "".join(_inline(part, on_left_out) for part in token.children)
        elif token.type == "fence":
            if " " not in token.info and token.info:
                on_left_out(token.info, "language of code")
            yield (f"{token.info}\n" if " " in token.info else "") + token.content
        yield _AFTER.get(token.type, "")


_AFTER = {"th_close": ", ", "td_close": ", ", "tr_close": "\n", "paragraph_close": "\n", "heading_close": "\n"}


def _inline(part: Any, on_left_out: OnLeftOut) -> str:
    for address in (part.attrs.get("href"), part.attrs.get("src")):
        if address and part.info != "auto":
            on_left_out(unquote(str(address)), "address of a link")
    # An image's content is its description.
    return "\n" if part.type in ("softbreak", "hardbreak") else str(part.content)


@cache
def _parser() -> Any:
    """Return the parser. It is imported here, because most models of the server process no text."""
    from markdown_it import MarkdownIt

    # No definitions of links: "[laughter]: yes" is speech. HTML is plain text before.
    rules = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    return rules.disable(["html_block", "html_inline", "code", "reference", "entity"])


# Every control token of the LLM's vocabulary is written <|name|>. The length limit keeps the prose between a stray "<|"
# and a distant "|>"; names are short.
_CONTROL_TOKEN = re.compile(r"<\|[^<|>]{0,64}\|>")

# Clients of upstream put an instruction, or CosyVoice3's system words, and this before a text or a transcript.
END_OF_PROMPT = "<|endofprompt|>"

_SYMBOL = regex.compile(r"\p{S}")
# Tags and selectors, which hide a text in another one, and accents in heaps.
_HIDDEN = regex.compile(r"[\U000e0000-\U000e01ef]+|\p{M}{9,}")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # Unicode's category Cc without line feeds
_FILLERS = dict.fromkeys(map(ord, "\u115f\u1160\u3164\uffa0"))  # invisible letters


def strip_control_tokens(text: str) -> str:
    """Replace everything that could be tokenized as a control token (`<|s_1|>`, `<|endofprompt|>`) with a space.

    Repeated until nothing matches, because removing an inner token can complete an outer one: `<|s_<|x|>1|>`.
    """
    found = 1
    while found:
        text, found = _CONTROL_TOKEN.subn(" ", text)
    return text


def control_tokens(text: str) -> list[str]:
    """Return what `clean_text` leaves out of `text`: tokens, and the words before `<|endofprompt|>`."""
    before, _, after = text.rpartition(END_OF_PROMPT)
    return ([before] if before else []) + _CONTROL_TOKEN.findall(after)


def split_instruction(text: str) -> tuple[str, str]:
    """Return the words before the last `<|endofprompt|>`, without CosyVoice3's system words and control tokens, and the
    text after it. Without that token: "" and the text."""
    before, _, after = text.rpartition(END_OF_PROMPT)
    words = " ".join(strip_control_tokens(_printable(before)).split())
    return words.removeprefix(SYSTEM_WORDS).strip(), after


def is_speakable(text: str) -> bool:
    """Return whether `text` has a letter, a number or a symbol but emoji: "?!" and a zero-width space are silent."""
    return any(map(str.isalnum, text)) or bool(_SYMBOL.search(without_emoji(text)))


def has_words(text: str) -> bool:
    """Return whether `text` has a letter or a digit. Symbols with names are words by now, and for others alone, such as
    an arrow, the LLM invents speech."""
    return any(map(str.isalnum, text.translate(_FILLERS)))


def clean_text(text: str, *, name: str, max_chars: int) -> str:
    """Return the text without control tokens, surplus whitespace and empty lines; lines are separated by line feeds.
    What is before `<|endofprompt|>` is left out: it is never to be spoken.

    `name`: the input's name in messages. ValueError if the text is longer than `max_chars` or has nothing to speak.
    """
    if len(text) > max_chars:
        raise ValueError(f"{name} has {len(text)} characters, more than the limit of {max_chars}")
    words = strip_control_tokens(_printable(text.rpartition(END_OF_PROMPT)[2]))
    spoken = "\n".join(filter(None, map(" ".join, map(str.split, words.split("\n")))))
    if not is_speakable(spoken):
        shown = text if len(text) <= 80 else text[:80] + "..."
        raise ValueError(f"{name} has nothing to speak: {shown!r}")
    return spoken


def clean_line(text: str, *, name: str, max_chars: int) -> str:
    """Return `clean_text` of an optional text, as one line. Blank text gives ""; control tokens alone are an error."""
    text = text.strip()
    return clean_text(text, name=name, max_chars=max_chars).replace("\n", " ") if text else ""


def clean_transcript(text: str, *, name: str, max_chars: int) -> tuple[str, str]:
    """Return the instruction before `<|endofprompt|>` in the transcript of a recording, "" without one, and the words
    that are spoken in it, as `clean_line`: "" also for an instruction, or CosyVoice3's system words, alone."""
    if len(text) > max_chars:
        raise ValueError(f"{name} has {len(text)} characters, more than the limit of {max_chars}")
    instruction, said = split_instruction(text)
    return instruction, clean_line(said, name=name, max_chars=max_chars)


def stored_transcript(instruction: str, text: str) -> str:
    """Return both as one text, which `clean_transcript` reads."""
    return f"{instruction}{END_OF_PROMPT}{text}" if instruction else text


def _printable(text: str) -> str:
    """Return the text without control characters, which splitting into lines and words would leave to the tokenizer,
    and without signs that nobody sees or that cover others, for which the LLM invents speech."""
    return _CONTROL.sub(" ", _HIDDEN.sub("", "\n".join(text.splitlines())))
