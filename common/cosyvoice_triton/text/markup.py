"""Pauses, voices and lengths in a text, and the part of SSML that is supported.

Anywhere: `[pause 1.2s]`, `[pause 300ms]`, `[pause]`, `<break time="500ms"/>`, `<break strength="strong"/>`, `<break/>`,
and as other servers write it `[pause:1.2s]`, `[silent 1s]`. Their tags `[name:value]` are left out, see `left_out`. A
text that is a document `<speak>...</speak>` may also have p, s, sub and say-as; any other tag in it is an error, and so
are tags that only SSML has outside of one. Other tags are HTML, see `cleaning`.

A request to a model has one voice and one length, so `parts` rejects voices and segments. The speech service cuts its
texts with `by_voice` before: `[voice:NAME]` is for what follows, and in a document `<voice name="NAME">...</voice>` for
its content; `[segment 2.5s]` is the length of what follows, up to the next such mark or the next change of the voice.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

from cosyvoice_triton.constants import MEL_RATE
from cosyvoice_triton.text.cleaning import is_speakable, without_markup

MAX_PAUSE_SECONDS = 10.0
MAX_PAUSES_SECONDS = 60.0  # of a text: silence costs a caller few characters and the server memory
MAX_VOICE_PARTS = 16  # of a text
STRENGTHS = {"none": 0.0, "x-weak": 0.1, "weak": 0.25, "medium": 0.5, "strong": 0.75, "x-strong": 1.0}  # seconds
_SUPPORTED = ("break", "p", "s", "say-as", "speak", "sub")

_MAX_DEPTH = 20
_DOCUMENT = re.compile(r"(?:<\?xml\b[^<>]*>\s*)?<speak\b.*</speak\s*>", re.DOTALL)
_PAUSE = re.compile(r"\[(?:pause|silent)(?:[\s:]([^\[\]]*))?\]|(<break\b[^<>]*>)(?:\s*</break\s*>)?", re.IGNORECASE)
_TAG = re.compile(r"\[(?!voice:|pause:|silent:)[A-Za-z][\w-]{0,31}:(?!//)[^\[\]\s]{0,64}\](?!\()", re.IGNORECASE)
_VOICE = re.compile(r"\[voice:([^\[\]]*)\]", re.IGNORECASE)
_MARK = re.compile(rf"{_VOICE.pattern}|\[segment(?:\s([^\[\]]*))?\]", re.IGNORECASE)
_VOICE_TAG = re.compile(r"<(?:[\w.-]+:)?voice\b")
_TIME = re.compile(r"\+?(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)")
# HTML has no such tags. p, s and sub are HTML's as well, and left to it outside of a document.
_SSML_ONLY = re.compile(r"</?(speak|say-as|voice|prosody|emphasis|phoneme|lexicon)\b[^<>]*>", re.IGNORECASE)
_PROSODY = re.compile(
    r"""\s*(<speak\b[^>]*>)\s*<prosody\s+duration\s*=\s*(["'])([^"']*)\2\s*>(.*)</prosody>\s*</speak>\s*""", re.DOTALL
)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")

# What `say-as` reads one by one, and what the grammars for numbers read anyway.
_SPELLED = ("characters", "spell-out", "verbatim", "digits", "telephone")
_AS_WRITTEN = ("cardinal", "number", "date", "time", "currency", "unit", "address", "text")


@dataclass(frozen=True)
class Pause:
    """Silence between two parts of a text."""

    seconds: float


@dataclass(frozen=True)
class VoicePart:
    """A part of a text and the name of its voice; empty: the one that the request has. seconds: that it is to last."""

    voice: str
    text: str
    seconds: float | None = None


def parts(text: str) -> Iterator[str | Pause]:
    """Yield the parts of `text` in order, without this markup. ValueError naming a tag or value that is not
    supported."""
    if mark := _MARK.search(text):
        raise ValueError(f"{mark[0][:80]} is for texts of the speech service that are not SSML, which has <voice>")
    if is_document(text):
        text = "".join(_of_element(_document(text.strip())))
    elif foreign := _SSML_ONLY.search(text):
        raise _not_supported(foreign[1])
    text, end, pauses = _TAG.sub("", text), 0, 0.0
    for mark in _PAUSE.finditer(text):
        if words := text[end : mark.start()].strip():
            yield words
        pause = Pause(_break(mark[2]) if mark[2] else _seconds(mark[1] or ""))
        pauses += pause.seconds
        _limit(pauses)
        yield pause
        end = mark.end()
    if words := text[end:].strip():
        yield words


def is_document(text: str) -> bool:
    """Return whether `text` is a document of SSML."""
    return _DOCUMENT.fullmatch(text.strip()) is not None


def left_out(text: str) -> list[str]:
    """Return the tags of `text` that are not spoken and mean nothing here, each once."""
    return list(dict.fromkeys(_TAG.findall(text)))


def by_voice(text: str) -> list[VoicePart]:
    """Return the parts of `text` in order, each in one voice and of one length, with their pauses and SSML; none if
    nothing is to be spoken.

    A text without markup for either is one part. ValueError naming markup that is not supported or a limit.
    """
    if is_document(text):
        if not _VOICE_TAG.search(text):
            return [VoicePart("", text)]
        cut = _by_element(_document(text.strip()))
    elif _MARK.search(text):
        cut = list(_by_mark(text))
    else:
        return [VoicePart("", text)]
    contents = [list(parts(part.text)) for part in cut]
    _limit(sum(map(_pauses, contents)))
    found = [part for part, content in zip(cut, contents, strict=True) if _is_heard(content)]
    if len(found) > MAX_VOICE_PARTS:
        raise ValueError(
            f"voice or length change so often that the text has {len(found)} parts, more than {MAX_VOICE_PARTS}"
        )
    return found


def without_voices(text: str) -> tuple[str, str]:
    """Return `text` without `[voice:NAME]`, and the name in the last one; empty if there is none."""
    names = _VOICE.findall(text)
    return _VOICE.sub("", text), names[-1].strip() if names else ""


def without_duration(text: str) -> tuple[str, float | None]:
    """Return a document without the `<prosody duration="2.5s">` around all of its content, and the seconds; any other
    text as it is. ValueError for another form of the seconds."""
    if (found := _PROSODY.fullmatch(text)) is None:
        return text, None
    if (seconds := _DURATION.fullmatch(found[3].strip())) is None:
        raise ValueError(f"the duration {found[3][:80]!r} of <prosody>: write it like 2.5s or 500ms")
    return f"{found[1]}{found[4]}</speak>", float(seconds[1]) / (1000 if seconds[2] == "ms" else 1)


def _limit(pauses: float) -> None:
    if pauses > MAX_PAUSES_SECONDS:
        raise ValueError(f"the pauses of the text are longer than {MAX_PAUSES_SECONDS:g} s together")


def _pauses(content: list[str | Pause]) -> float:
    return sum(part.seconds for part in content if isinstance(part, Pause))


def _is_heard(content: list[str | Pause]) -> bool:
    words = (part for part in content if isinstance(part, str))
    return is_heard(_pauses(content)) or any(is_speakable(without_markup(part)) for part in words)


def is_heard(pauses: float) -> bool:
    """Return whether silence of so many seconds is at least one frame, of which pauses are made."""
    return round(pauses * MEL_RATE) > 0


def _voice_name(name: str) -> str:
    if not name.strip():
        raise ValueError('a change of the voice without a name: write [voice:NAME], in SSML <voice name="NAME">')
    return name.strip()


def _by_mark(text: str) -> Iterator[VoicePart]:
    part = VoicePart("", "")
    first, *rest = _MARK.split(text)  # rest: name or None, time or None, text, ...
    for name, time, words in zip([None, *rest[::3]], [None, *rest[1::3]], [first, *rest[2::3]], strict=True):
        if name is not None:  # a length before it is that of this voice's words
            part = VoicePart(_voice_name(name), words, None if part.text.strip() else part.seconds)
        else:
            part = VoicePart(part.voice, words, _time(time, "a segment") if time and time.strip() else None)
        yield part


def _by_element(document: ET.Element) -> list[VoicePart]:
    """Return a document's parts, each a document."""
    grouped = groupby(_voiced(document, ""), key=lambda found: found[0])
    return [VoicePart(voice, f"<speak>{''.join(xml for _, xml in group)}</speak>") for voice, group in grouped]


def _voiced(element: ET.Element, voice: str) -> Iterator[tuple[str, str]]:
    """Yield voice and XML of the pieces of an element without its tail."""
    name = element.tag
    if name not in ("p", "s", "speak", "voice"):
        if any(inner.tag == "voice" for inner in element.iter()):
            raise _not_supported("voice")
        yield voice, ET.tostring(element, "unicode").replace(" />", "/>")  # not longer than it was: there is a limit
        return
    inside = _voice_name(_attribute(element, "name")) if name == "voice" else voice
    around = "\n" if name in ("p", "s") else ""  # as in `_of_element`
    yield inside, around + escape(element.text or "")
    for child in element:
        tail, child.tail = child.tail or "", None
        yield from _voiced(child, inside)
        yield inside, escape(tail)
    yield inside, around


def _document(text: str) -> ET.Element:
    """Return the elements, their names without namespaces, which would be written again with every part of a text."""
    if "<!DOCTYPE" in text.upper():
        raise ValueError("SSML with a DOCTYPE is not supported")
    try:
        root = ET.fromstring(text)
    except ET.ParseError as error:
        raise ValueError(f"the SSML is not well-formed: {error}") from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    level, depth = [root], 0
    while level := [child for element in level for child in element]:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"SSML of more than {_MAX_DEPTH} levels")
        if any(element.tag == "speak" for element in level):
            raise _not_supported("speak")
    return root


def _of_element(element: ET.Element) -> Iterator[str]:
    """Yield the text of an element, with its pauses as they are written in any text."""
    name = element.tag
    if name not in _SUPPORTED:
        raise _not_supported(name)
    if name == "break":
        yield ET.tostring(ET.Element("break", element.attrib), "unicode")
    elif name == "sub":
        yield _attribute(element, "alias")
    elif name == "say-as":
        yield _said_as("".join(element.itertext()), _attribute(element, "interpret-as"))
    else:
        around = "\n" if name in ("p", "s") else ""  # the end of a line ends a sentence
        yield around + (element.text or "")
        for child in element:
            yield from _of_element(child)
            yield child.tail or ""
        yield around


def _not_supported(tag: str) -> ValueError:
    return ValueError(
        f"the tag <{tag}> is not supported here: <break> is anywhere, and in a text that begins with <speak> and ends "
        "with </speak> also p, s, say-as, sub and, for the speech service, voice"
    )


def _attribute(element: ET.Element, name: str) -> str:
    if (value := element.get(name)) is None:
        raise ValueError(f"the tag <{element.tag}> has no {name}")
    return value


def _said_as(text: str, kind: str) -> str:
    if kind in _SPELLED:
        return " ".join("".join(text.split()))
    if kind not in _AS_WRITTEN:
        raise ValueError(f"interpret-as {kind!r} is not one of {', '.join((*_SPELLED, *_AS_WRITTEN))}")
    return text


def _break(tag: str) -> float:
    """Return the seconds of a `<break>`."""
    element = _document(tag if tag.endswith("/>") else f"{tag[:-1]}/>")
    if unknown := set(element.keys()) - {"time", "strength"}:
        raise ValueError(f"<break> has no attribute {min(unknown)!r}: use time or strength")
    if (time := element.get("time")) is not None:
        return _seconds(time)
    strength = element.get("strength", "medium")
    if strength not in STRENGTHS:
        raise ValueError(f"strength {strength!r} of <break> is not one of {', '.join(STRENGTHS)}")
    return STRENGTHS[strength]


def _seconds(time: str) -> float:
    """Return the length of a pause; an empty text is that of `<break/>`."""
    if not time.strip():
        return STRENGTHS["medium"]
    if (seconds := _time(time, "a pause")) > MAX_PAUSE_SECONDS:
        raise ValueError(f"a pause of {time[:80]!r} is longer than {MAX_PAUSE_SECONDS:g} s")
    return seconds


def _time(time: str, of: str) -> float:
    if (match := _TIME.fullmatch(time.strip())) is None:
        raise ValueError(f"{of} of {time[:80]!r}: write its time like 1.2s or 500ms")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)
