"""English abbreviations, signs and addresses of the web, as they are said."""

import re

from cosyvoice_triton.text.numbers import ROMAN, english, english_digits, english_ordinal, roman
from cosyvoice_triton.text.quantities import Rules

_MONTHS = "January February March April May June July August September October November December".split()
MONTHS = {name[:length].lower(): name for name in _MONTHS for length in (3, len(name))} | {"sept": "September"}
_SHORT = r"Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec"
MONTH = "|".join((*_MONTHS, _SHORT))
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
DAYS = {name[:3]: name for name in _DAYS} | {"Tues": "Tuesday", "Thur": "Thursday", "Thurs": "Thursday"}
_DAY = rf"\b({'|'.join(sorted(DAYS, key=len, reverse=True))})\b\.?"
_MONTH = rf"\b({_SHORT})\b\.?"

_BEFORE_NAMES = dict(
    Dr="Doctor", Mr="Mister", Mrs="Missus", Prof="Professor", Capt="Captain", Gen="General", Sgt="Sergeant",
    Lt="Lieutenant", Col="Colonel", Rev="Reverend", Hon="Honorable", Gov="Governor", Sen="Senator", Mt="Mount",
    Ft="Fort", St="Saint",
)  # fmt: skip
_ANYWHERE = dict(
    Jr="Junior", Sr="Senior", Ltd="Limited", Corp="Corporation", Inc="Incorporated", dept="department",
    approx="approximately", incl="including",
)  # fmt: skip
BEFORE_NUMBERS = dict(
    p="page", pp="pages", ext="extension", fig="figure", ch="chapter", vol="volume", eq="equation", sec="section",
    apt="apartment", approx="approximately", no="number", nr="number", num="number", op="opus",
)  # fmt: skip
_ROADS = dict(
    Ave="Avenue", Blvd="Boulevard", Rd="Road", Ln="Lane", Hwy="Highway", Pkwy="Parkway", Sq="Square"
)  # fmt: skip
_STREET = r"(?=\s+[a-z]|[,;:]|\s*$)"

_RULERS = (
    "Albert|Alexander|Alfonso|Amenhotep|Anne|Benedict|Boniface|Catherine|Charles|Christian|Clement|Constantine|Darius|Edward|"
    "Elizabeth|Ferdinand|Francis|Franz|Frederick|Friedrich|George|Gregory|Gustav|Harald|Henri|Henry|Innocent|Isabella|Ivan|"
    "James|John|Joseph|Julius|Justinian|Leo|Leopold|Louis|Ludwig|Margaret|Mary|Maximilian|Mehmed|Napoleon|Nicholas|Otto|Paul|"
    "Pedro|Peter|Philip|Pius|Ptolemy|Rama|Ramesses|Ramses|Richard|Rudolf|Sixtus|Stephen|Urban|Victor|Wilhelm|William|Xerxes"
)
_NUMBERED = (
    "War|Part|Type|Book|Chapter|Act|Scene|Phase|Volume|Stage|Class|Title|Article|Section|Level|Grade|Round|Bowl|Appendix|"
    "Mark|Apollo|Episode|Rocky"
)
_BOOKS = (
    "Genesis|Exodus|Deuteronomy|Joshua|Job|Psalms?|Proverbs|Ecclesiastes|Isaiah|Jeremiah|Ezekiel|Daniel|Matthew|Mark|Luke|"
    "John|Acts|Romans|Corinthians|Galatians|Ephesians|Philippians|Colossians|Timothy|Hebrews|James|Peter|Revelation|Surah|Quran"
)


def _cased(names: dict[str, str], found: str) -> str:
    """Return the word for an abbreviation, with a capital as the abbreviation has."""
    said = names[found] if found in names else names[found.lower()]
    return said.capitalize() if found[0].isupper() and said.islower() else said


def _any_case(names: dict[str, str]) -> str:
    return "|".join(f"[{name[0].upper()}{name[0].lower()}]{name[1:]}" for name in names)


def _power(exponent: str) -> str:
    return {"2": " squared", "3": " cubed"}.get(exponent) or f" to the power of {exponent}"


# What compares, after what it compares and without it.
_COMPARED = {
    "=": ("equals", ""), "≠": ("is not equal to", "not "), "<": ("is less than", "less than "),
    ">": ("is greater than", "more than "), "≥": ("is greater than or equal to", "at least "),
    "≤": ("is less than or equal to", "at most "), "≈": ("is about", "about "),
}  # fmt: skip
_COMPARED |= {"!=": _COMPARED["≠"], ">=": _COMPARED["≥"], "<=": _COMPARED["≤"]}
_NO_OPERANDS = re.compile(r"\b(?:is|are|be|was|were|of|for|with|at|to|and|or|if|than|only)\s?\Z")


def _compared(found: re.Match[str]) -> str:
    """Return the words of a sign. It compares with what is before it if the blanks are the same on both of its sides."""
    relation, bound = _COMPARED[found[3]]
    text, begin, end = found.string, found.start(), found.end()
    if found[3] in "<>" and (
        text[end : end + 2].isalpha()
        and len(text[end : end + 2]) == 2
        or not found[2]
        and text[begin - 2 : begin].isalpha()
    ):
        return found[0]  # rather brackets
    before = found.string[max(0, found.start() - 8) : found.start()]
    if found[1] and (found[3] == "=" or (found[2] == found[4] and not _NO_OPERANDS.search(before))):
        return f" {relation} "
    return f"{found[2] or ''}{bound}" if bound and not text[end : end + 1].isalpha() else found[0]


# Each with what a text must have for it to match.
RULES: Rules = [
    ("\\d['’′\"″]", [
        (r"""(?<![\w.])(\d{1,2})['’′] ?(\d{1,2})(["”″]|'')?(?!\w)""",
         lambda found: f"{found[1]} feet {found[2]}" + (" inches" if found[3] else "")),
        (r"""(?<=\d)["″] ?x ?(?=\d)""", " by "), (r"""(?<= by )(\d+)["″]""", r"\1 inches"),
        (r"""(?<![\w"])(\d{1,3}(?:\.\d{1,2})?)["″](?=\s[A-Za-z])""",  # unless it closes a quotation
         lambda found: f"{found[1]} inch" if found.string.count('"') % 2 else found[0]),
    ]),
    (r"\.(?=\s*\S)|\b(?:Ave|Blvd|Rd|Ln|Hwy|Pkwy|Sq|Apt|St|Co)\b", [
        (rf"(?<=[a-z] )St(?:\.{_STREET}|(?=, [A-Z]))", "Street"),
        (rf"(?<!\d (?=[sS]ec))\b({_any_case(BEFORE_NUMBERS)})\.\s?(?=\d)|\b(Apt)(?=\s\w)",
         lambda found: _cased(BEFORE_NUMBERS, found[1] or found[2]) + (" " if found[1] else "")),
        (r"\b([Vv]ol)\.(?= [IVX]+\b)", lambda found: _cased(BEFORE_NUMBERS, found[1])),
        (rf"(?<=[a-z0-9] )({'|'.join(_ROADS)})\b\.?(?=\s|[,;:]|$)", lambda found: _ROADS[found[1]]),
        (rf"\b({'|'.join(_BEFORE_NAMES)})\.(?= [A-Z])", lambda found: _BEFORE_NAMES[found[1]]),
        (rf"(?<!\d )\b({_any_case(_ANYWHERE)})\.(?=,? \S)", lambda found: _cased(_ANYWHERE, found[1])),
        (r"\bvs\.(?= )", "versus"), (r"(?<=[a-z] )Co\.(?!\w)", "Company"),
        (r"\b(?:[A-Z]\.){2,}", lambda found: found[0].replace(".", "")),
        (r"\bPh\.D\.?", "PhD"),
        (r"\b([A-Z])\. ([A-Z])\.(?= [A-Z])", r"\1 \2"),
    ]),
    (_DAY + "|" + _MONTH, [
        (rf"{_DAY}\s?[-–—]\s?{_DAY}", lambda found: f"{DAYS[found[1]]} to {DAYS[found[2]]}"),
        (rf"{_DAY}(?=,? (?:{MONTH}))", lambda found: DAYS[found[1]]),
        (rf"{_MONTH}\s?[-–—]\s?{_MONTH}", lambda found: f"{MONTHS[found[1].lower()]} to {MONTHS[found[2].lower()]}"),
        (rf"\b((?:[Ii]n|[Ss]ince|[Uu]ntil|[Bb]y|last|next|of|early|late|mid|and|to|from) ){_MONTH}(?!\w| \d)",
         lambda found: found[1] + MONTHS[found[2].lower()]),
        (rf"\b({_SHORT})\.(?= [a-z])", lambda found: MONTHS[found[1].lower()]),
    ]),
    (r"\b(?:[IVXL]{2,}|[a-z] [IVX])\b", [
        (rf"\b((?:King|Queen|Pope|Emperor|Empress|Tsar|Prince|Princess|Kaiser|Duke) [A-Z][a-z]+(?: [A-Z][a-z]+)?|{_RULERS}) ({ROMAN})\b(?!['’.]?[A-Z])",
         lambda found: f"{found[1]} the {english_ordinal(roman(found[2]))}"),
        (rf"\b({_NUMBERED}) ({ROMAN})\b", lambda found: f"{found[1]} {english(roman(found[2]))}"),
    ]),
    (r"w/|_|[A-G]#", [
        (r"\bw/o\b", "without"), (r"\bw/(?=\s)", "with"), (r"(?<=\w)_(?=\w)", " underscore "), (r"\b([A-G])#", r"\1 sharp"),
    ]),
    (r":\d|\d ?h|\d ?€", [
        (r"(?<=\d),(?=\d\d? ?€)", "."),
        (rf"\b({_BOOKS}) (\d{{1,3}}):(?=\d)", r"\1 \2 "),
        (r"(?<![\w.,])(\d+ ?)(h|hrs?) ?([0-5]?\d) ?m?(?:in)?(?![\w/²³])", r"\1h \3 min"),
    ]),
    (r"[#№]|\b[vV]\d|T\d\d:|\d-\d|\w-\d", [
        (r"№\s?|(?<![\w#&])#(?=\d)", "number "),
        (r"\b[vV](?=\d+\.\d)", "version "),
        (r"(?<=\d{4}-\d\d-\d\d)T(\d\d:\d\d(?::\d\d)?)(?:\.\d+)?(Z?)", lambda found: f" {found[1]}{found[2] and ' UTC'}"),
        (r"(?<=[A-Za-z])(?<!\d[eE])-(?=\d{1,4}s?\b(?![-.]\d))", " "),
    ]),
    (r"[×÷*+^²³π√]|\d(?: ?[a-z]{1,3})? ?x| / |\d[eE]|[-–]\s?\d[\d.,]*\s*=", [
        (r"(?:(?<=[\d)])|(?<=\b[a-z])) / (?=[\d(]|[a-z]\b)", " divided by "),
        (r"(?<![^\W\d])(\d+\.\d+[eE]|\d+[eE](?=[-+]))([-+]?)(?=\d{1,3}(?!\w))",
         lambda found: f"{found[1][:-1]} times ten to the power of {'minus ' if found[2] == '-' else ''}"),
        (r"(?:(?<=\))|(?<=(?<![A-Za-z])(?<!\d)(?<!\d\s)[A-Za-z])|(?<=(?<![A-Za-z\d])(?<!\d\s)(?![kcm]m)[A-Za-z]{2}))(?:\^(-?\d{1,3})|([²³]))(?!\d)", lambda found: _power(found[1] or ("2" if found[2] == "²" else "3"))),
        (r"(?<=[\w)])\s?[-–]\s?(?=\d[\d.,]*\s*=)", " minus "),
        (r"(?<=[\d)])\s?[×*]\s?(?=[\d(])|(?<=\d) x (?=\d[\d.]* ?=)", " times "),
        (r"(?!0x)(\d(?: ?[a-z]{1,3})? ?)x ?(?=\d)", lambda found: f"{found[1].rstrip()} by "),
        (r"\s?π\s?", " pi "), (r"√\s?(?=[\d(a-z])", "square root of "),
    ]),
    (r"[=<>≠≥≤≈]", [
        (r"(?:(?<=([\w)]))(\s?)|(?<![\w)]))(!=|≠|[<>]=|[≥≤≈=<>])(\s?)(?=[-\w($€£√π]|\.\d)(?!(?<=<)3\b(?! ?[%°\w]))", _compared),
    ]),
]  # fmt: skip
# Signs of addresses; and those that no rule read, named alone or beside a word.
_SIGNS = {"@": "at", ".": "dot", "/": "slash", "_": "underscore", "-": "dash", ":": "colon", "?": "question mark"}
_SIGNS |= {"=": "equals", "&": "and", "#": "hash", "%": "percent", "+": "plus", "~": "tilde"}
_NAMES = _SIGNS | {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "°": "degree", "^": "to the power of"}
_NAMES |= {"©": "copyright", "™": "trademark", "®": "registered", "§": "section", "×": "times", "÷": "divided by"}
_NAMES |= {"±": "plus or minus", "<": "less than", ">": "greater than"}
_BLANKS = re.compile(r"(?<=\s) | (?=[.,;:!?)])")
_LEFT = re.compile("[$€£¥°©™®§%&@+=#^~×÷±]")


def named(text: str) -> str:
    """Return `text` with the names of the signs that are left in it."""
    if not _LEFT.search(text):
        return text
    return _BLANKS.sub("", _LEFT.sub(lambda found: f"{' ' if found.start() else ''}{_NAMES[found[0]]} ", text))


# Names of hosts and of people at hosts; what follows the host is part of the address.
ADDRESS = r"(?<![\w@.])(?:https?://)?(?:[\w.+-]{1,64}@)?(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w@])(?::\d+)?(?:/[\w/.?=&%#~+:-]*[\w/])?"
_HOSTS = frozenset(
    "com org net edu gov io ai app dev co uk us ca au de fr es it ru cn jp kr tv me info biz eu ch nl se br".split()
)
_ENDING = re.compile(r"\.([A-Za-z]+)(?:[:/]|\Z)")
_PARTS = re.compile(r"\d+|[^\W\d_]+|.", re.ASCII)


def address(written: str) -> str:
    """Return an address of the web or of mail as it is said: "example dot com"; "" for another name with a full stop,
    such as of a file."""
    if written.startswith("http"):
        written = written.partition("://")[2]
    elif (
        "@" not in written and "/" not in written and not ((ending := _ENDING.search(written)) and ending[1] in _HOSTS)
    ):
        return ""
    return " ".join(
        english_digits(part) if part.isdigit() else _SIGNS.get(part, part) for part in _PARTS.findall(written)
    )
