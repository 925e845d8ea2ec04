"""English abbreviations and addresses of the web, as they are said."""

import re

from cosyvoice_triton.text.numbers import Rule, english_digits, reader

_MONTHS = "January February March April May June July August September October November December".split()
MONTHS = {name[:length].lower(): name for name in _MONTHS for length in (3, len(name))} | {"sept": "September"}
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
DAYS = {name[:3]: name for name in _DAYS} | {"Tues": "Tuesday", "Thur": "Thursday", "Thurs": "Thursday"}
_DAY = rf"\b({'|'.join(sorted(DAYS, key=len, reverse=True))})\b\.?"
_MONTH = r"\b(Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\b\.?"

_BEFORE_NAMES = {
    "Dr": "Doctor", "Mr": "Mister", "Mrs": "Missus", "Prof": "Professor", "Capt": "Captain",
    "Gen": "General",
    "Sgt": "Sergeant", "Lt": "Lieutenant", "Col": "Colonel",
    "Rev": "Reverend", "Hon": "Honorable", "Gov": "Governor", "Sen": "Senator",
    "Mt": "Mount", "Ft": "Fort", "St": "Saint",
}  # fmt: skip
_ANYWHERE = {
    "Jr": "Junior", "Sr": "Senior", "Ltd": "Limited", "Corp": "Corporation", "Inc": "Incorporated",
    "dept": "department", "Dept": "Department", "approx": "approximately",
    "Approx": "Approximately", "incl": "including",
}  # fmt: skip
BEFORE_NUMBERS = {
    "p": "page", "pp": "pages", "ext": "extension", "Ext": "Extension", "fig": "figure", "Fig": "Figure",
    "ch": "chapter", "Ch": "Chapter", "vol": "volume", "Vol": "Volume", "eq": "equation", "Eq": "Equation",
    "sec": "section", "Sec": "Section", "apt": "apartment", "Apt": "Apartment",
    "approx": "approximately", "Approx": "Approximately",
}  # fmt: skip
_ROADS = {
    "Ave": "Avenue",
    "Blvd": "Boulevard",
    "Rd": "Road",
    "Ln": "Lane",
    "Hwy": "Highway",
    "Pkwy": "Parkway",
    "Sq": "Square",
}
_SIGNS = {
    "@": "at",
    ".": "dot",
    "/": "slash",
    "_": "underscore",
    "-": "dash",
    ":": "colon",
    "?": "question mark",
    "=": "equals",
}
_SIGNS |= {"&": "and", "#": "hash", "%": "percent", "+": "plus", "~": "tilde"}
_STREET = r"(?=\s+[a-z]|[,;:]|\s*$)"

_WORDS: list[Rule] = [
    (rf"(?<=[a-z] )St(?:\.{_STREET}|(?=, [A-Z]))", "Street"),
    (rf"(?<!\d )\b({'|'.join(BEFORE_NUMBERS)})\.\s?(?=\d)|\b(Apt)(?=\s\w)",
     lambda match: BEFORE_NUMBERS[match[1] or match[2]] + (" " if match[1] else "")),
    (r"\bvs\.(?= )", "versus"),
    (rf"(?<=[a-z0-9] )({'|'.join(_ROADS)})\b\.?(?=\s|[,;:]|$)", lambda match: _ROADS[match[1]]),
    (rf"\b({'|'.join(_BEFORE_NAMES)})\.(?= [A-Z])", lambda match: _BEFORE_NAMES[match[1]]),
    (rf"(?<!\d )\b({'|'.join(_ANYWHERE)})\.(?=,? \S)", lambda match: _ANYWHERE[match[1]]),
    (r"(?<=[a-z] )Co\.(?!\w)", "Company"),
    (r"\b(?:[A-Z]\.){2,}", lambda match: match[0].replace(".", "")),
    (r"\bPh\.D\.?", "PhD"),
    (r"\b([A-Z])\. ([A-Z])\.(?= [A-Z])", r"\1 \2"),
]  # fmt: skip
_CALENDAR: list[Rule] = [
    (rf"{_DAY}\s?[-–—]\s?{_DAY}", lambda match: f"{DAYS[match[1]]} to {DAYS[match[2]]}"),
    (rf"{_DAY}(?=,? (?:{_MONTH}|{'|'.join(_MONTHS)}|the \w+ of))", lambda match: DAYS[match[1]]),
    (rf"{_MONTH}\s?[-–—]\s?{_MONTH}", lambda match: f"{MONTHS[match[1].lower()]} to {MONTHS[match[2].lower()]}"),
    (rf"\b((?:[Ii]n|[Ss]ince|[Uu]ntil|[Bb]y|last|next|of|early|late|mid|and|to|from) ){_MONTH}(?!\w)",
     lambda match: match[1] + MONTHS[match[2].lower()]),
]  # fmt: skip
_BESIDE: list[Rule] = [
    (r"\bw/o\b", "without"), (r"\bw/(?=\s)", "with"), (r"(?<=\w)\s?&\s?(?=\w)", " and "), (r"(?<!\S)@(?=[\w])", "at "),
    (r"(?<=\w)\+\+(?!\w)", " plus plus"), (r"(?<=\w)_(?=\w)", " underscore "), (r"\bC#", "C sharp"),
]  # fmt: skip

# Signs that no rule read: named, alone or beside a word.
_NAMES = _SIGNS | {
    "$": "dollar",
    "€": "euro",
    "£": "pound",
    "¥": "yen",
    "°": "degree",
    "^": "to the power of",
    "©": "copyright",
    "™": "trademark",
}
_NAMES |= {"®": "registered", "§": "section", "×": "times", "÷": "divided by"}
_BLANKS = re.compile(r"(?<=\s) | (?=[.,;:!?)])")
_LEFT = re.compile("[$€£¥°©™®§%&@+=#^~×÷]")


def named(text: str) -> str:
    """Return `text` with the names of the signs that are left in it."""
    if not _LEFT.search(text):
        return text
    return _BLANKS.sub("", _LEFT.sub(lambda match: f"{' ' if match.start() else ''}{_NAMES[match[0]]} ", text))


words = reader(
    (r"\.|\b(?:Ave|Blvd|Rd|Ln|Hwy|Pkwy|Sq|Apt)\b", _WORDS), (_DAY + "|" + _MONTH, _CALENDAR), (r"w/|[&@+_]|C#", _BESIDE)
)

# Names of hosts and of people at hosts; what follows the host is part of the address.
ADDRESS = re.compile(
    r"(?<![\w@.])(?:https?://)?(?:[\w.+-]{1,64}@)?(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w@])(?::\d+)?(?:/[\w/.?=&%#~+:-]*[\w/])?",
    re.ASCII,
)
_HOSTS = frozenset(
    "com org net edu gov io ai app dev co uk us ca au de fr es it ru cn jp kr tv me info biz eu ch nl se br".split()
)
_ENDING = re.compile(r"\.([A-Za-z]+)(?:[:/]|\Z)")
_PARTS = re.compile(r"\d+|[^\W\d_]+|.", re.ASCII)


def address(written: str) -> str:
    """Return an address of the web or of mail as it is said: "example dot com". Another name with a full stop, such as
    of a file, stays."""
    if written.startswith("http"):
        written = written.partition("://")[2]
    elif (
        "@" not in written and "/" not in written and not ((ending := _ENDING.search(written)) and ending[1] in _HOSTS)
    ):
        return written
    return " ".join(
        english_digits(part) if part.isdigit() else _SIGNS.get(part, part) for part in _PARTS.findall(written)
    )
