"""What a text was written as: HTML, LaTeX, subtitles, an answer of an LLM that thinks. What nobody speaks is left out."""

import html
import re
from collections.abc import Callable

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
    return (
        re.sub(r"\^\{([^{}]*)\}", r"^\1", _COMMAND.sub(sign, body))
        .translate(dict.fromkeys(map(ord, "{}_"), " "))
        .strip()
    )
