"""What a text was written as: HTML, LaTeX, subtitles, an answer of an LLM that thinks. What nobody speaks is left out."""

import html
import re
from collections.abc import Callable

OnLeftOut = Callable[[str, str], object]  # is told what is left out, and the reason

_BLOCKS = frozenset(
    "p div br hr li ul ol dl dt dd h1 h2 h3 h4 h5 h6 table thead tbody tfoot tr caption section article header footer nav "
    "aside main blockquote pre figure figcaption address form fieldset legend body html option details summary".split()
)
_INLINE = frozenset(
    "a abbr b bdi bdo big button cite code col colgroup data del dfn em embed font center i iframe img input ins kbd label "
    "link map mark meta meter object output param picture progress q ruby s samp select small source span strike strong sub "
    "sup td textarea th time track tt u var video audio canvas wbr".split()
)
_SILENT = "style|script|title|head|template|noscript|svg|rp|rt"  # elements whose contents nobody speaks
_ATTRIBUTE = (
    r"""\s+(?:[\w:@.-]+\s*=\s*(?:"[^"<>]*"|'[^'<>]*'|[^\s"'<>=]+)|checked|disabled|hidden|open|controls|async|defer)"""
)
_TAG = re.compile(
    rf"`[^`\n]+`|<!--.*?-->|<!doctype[^<>]*>|<(?P<silent>{_SILENT})\b[^<>]*>(?:(?!<(?:{_SILENT})\b).)*?</(?P=silent)\s*>"
    rf"|<(?P<raised>su[bp])\b[^<>]*>(?P<digits>[-+\d]{{1,6}})</(?P=raised)>"
    rf"|<(?P<end>/?)(?P<prefix>[A-Za-z][\w-]{{0,20}}:(?!//))?(?P<name>[A-Za-z][A-Za-z0-9-]{{0,20}})(?:{_ATTRIBUTE})*\s*/?>",
    re.DOTALL | re.IGNORECASE,
)
_ROW_END = re.compile(r", *\n\s*")
_SPOKEN_TAG = re.compile(r"</?(?:strong|laughter)>")  # of the LLM's vocabulary
_ENTITY = re.compile(r"&(?:[A-Za-z][A-Za-z0-9]{1,30}|#\d{1,7}|#[xX][0-9A-Fa-f]{1,6});")
_RAISED = str.maketrans("0123456789-+", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺")
_LOWERED = str.maketrans("0123456789-+", "₀₁₂₃₄₅₆₇₈₉₋₊")

_CUE_TIME = r"(?:\d+:)?\d\d:\d\d[.,]\d{3}"
_CUE = re.compile(
    rf"(?m)^(?:\d+\n)?{_CUE_TIME} --> {_CUE_TIME}.*\n?|\AWEBVTT.*\n|^NOTE\b.*\n|<{_CUE_TIME}>|</?[vc](?:[ .][^<>\n]*)?>"
)
_THOUGHT = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL | re.IGNORECASE)

_FORMULA = re.compile(
    r"\$\$(?P<a>[^$]{1,500})\$\$|\\\[(?P<b>.{1,500}?)\\\]|\\\((?P<c>.{1,300}?)\\\)"
    r"|(?<![\w$\\])\$(?=[^\s$])(?P<d>[^$\n]{0,200}?(?:[\\^_=][^$\n]{0,200}?)?[^\s$])\$(?![\d$])",
    re.DOTALL,
)
_MATHEMATICAL = re.compile(r"\\[A-Za-z]|[\^_=]|\A[A-Za-z]\Z")
_COMMANDS = {
    "times": "×", "cdot": "×", "div": "÷", "pm": "±", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠",
    "approx": "≈", "pi": "π", "sqrt": "√", "left": "", "right": "", "text": "", "mathrm": "", "mathbf": "", "quad": " ",
    "displaystyle": "", "operatorname": "", "to": "→", "degree": "°", "circ": "°",
}  # fmt: skip
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
    if written[0] == "`" or _SPOKEN_TAG.fullmatch(written):
        return written
    if found["silent"]:
        return gone(written, f"contents of <{found['silent'].lower()}>", on_left_out, " ")
    if found["raised"]:
        on_left_out(written.replace(found["digits"], " "), "HTML tag")
        return found["digits"].translate(_RAISED if found["raised"].lower() == "sup" else _LOWERED)
    if written.startswith("<!"):
        return gone(written, "HTML comment", on_left_out)
    if name in _BLOCKS:
        return gone(written, "HTML tag", on_left_out, "\n")
    if name in _INLINE or found["prefix"] or re.fullmatch(_SILENT, name):
        return gone(written, "HTML tag", on_left_out, ", " if name in ("td", "th") and found["end"] else "")
    return written


def _of_formula(found: re.Match[str], on_left_out: OnLeftOut) -> str:
    body = next(filter(None, found.groups()))
    if found["d"] and not _MATHEMATICAL.search(body):
        return found[0]
    body = _FRACTION.sub(
        lambda each: f"{each[1]}/{each[2]}" if (each[1] + each[2]).isdigit() else f"{each[1]} / {each[2]}", body
    )
    body = _COMMAND.sub(lambda each: _of_command(each[1], on_left_out), body)
    return re.sub(r"\^\{([^{}]*)\}", r"^\1", body).translate({ord("{"): " ", ord("}"): " ", ord("_"): " "}).strip()


def _of_command(name: str, on_left_out: OnLeftOut) -> str:
    """Return a command's sign; of one that is not known its name, and of an escaped sign nothing but that."""
    if name in _COMMANDS:
        return gone(f"\\{name}", "LaTeX command", on_left_out, _COMMANDS[name])
    return name if name in "%&#$" else " " if not name.isalpha() else f" {name} "
