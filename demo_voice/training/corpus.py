"""Stage `corpus`: English sentences from free texts in Debian packages, a small grammar and random words.

It needs these packages installed, or unpacked into a folder with `dpkg -x`:

    wamerican bible-kjv bible-kjv-text fortunes fortunes-min wordnet-base anarchism jargon-text miscfiles debian-faq
    developers-reference debian-reference-en git-doc perl-doc python3.11-doc and wesnoth-1.16-{did,httt,low,nr,sof,utbs}

A missing package only means fewer sentences. Sentences are spelled as the serving front end passes them to the LLM:
`cosyvoice_triton.text` spells out numbers and signs; then lower case, because case is varied later (llm_data.py).
The LLM learns
pronunciation from these texts alone, and more text is better: natural sentences for intonation, the grammar for
everyday words, and random words for the spelling of all others.
"""

import gzip
import html
import logging
import random
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cosyvoice_triton.load.samples import read_manifest
from cosyvoice_triton.text.frontend import TextFrontend
from tqdm import tqdm

from demo_voice.training.grammar import everyday_sentence

logger = logging.getLogger(__name__)

GRAMMAR_SENTENCES, RANDOM_SENTENCES, NATURAL_SENTENCES = 36_000, 9_000, 60_000
MOST_OF_A_SOURCE = 22_000  # natural ones: most are from dictionaries and manuals otherwise
NUMBERED_SENTENCES = 15_000  # natural ones with digits: the front end takes milliseconds for each
SHORT = 3  # words of a sentence that may come several times: short answers need several voices
MAX_CHARS, MIN_WORDS, MAX_WORDS = 110, 3, 18
KNOWN_SHARE = 0.95  # share of a sentence's words that must be in the word list

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+")
_WORD = re.compile(r"[A-Za-z']+")
_ACCEPTED = re.compile(r"[A-Za-z0-9 ,.'?!:;\"()-]+")
_SPELLED_OUT = re.compile(r"[a-z ,.'?!:;\"()-]+")
_TAG = re.compile(r"<[^>]*>")
_BLOCK_END = re.compile(r"</(?:p|li|h\d|td|dd|dt|pre|div)>|<br ?/?>", re.IGNORECASE)
_CODE = re.compile(r"<(script|style|pre)\b.*?</\1>", re.IGNORECASE | re.DOTALL)


def make_corpus(work: Path, held_out: Sequence[Path], root: Path = Path("/"), seed: int = 1) -> None:
    """Write `sentences.txt` in `work`, in random order, without the sentences of the manifests `held_out`."""
    rng = random.Random(seed)
    words = [word.strip() for word in (root / "usr/share/dict/words").read_text(encoding="utf-8").splitlines()]
    held = {_key(sample.target_text) for path in held_out for sample in read_manifest(path)}
    natural = _natural(root, {word.lower() for word in words} | {"a", "i"}, held, rng)
    rng.shuffle(natural)
    counts = Counter(word for sentence in natural for word in _WORD.findall(sentence.lower()))
    common = [word for word, _ in counts.most_common(4000)]
    rare = sorted(word for word in words if re.fullmatch(r"[a-z]+(?:'[a-z]+)?", word))
    made = [everyday_sentence(rng, common) for _ in range(GRAMMAR_SENTENCES)]
    made += [_random_words(rng, common, rare) for _ in range(RANDOM_SENTENCES)]
    chosen = _with_few_numbers(natural)[:NATURAL_SENTENCES] + made
    lines = [line for line in _as_served(chosen) if _key(line) not in held]
    short = [line for line in lines if len(line.split()) <= SHORT]
    lines = [*dict.fromkeys(line for line in lines if len(line.split()) > SHORT), *short]
    rng.shuffle(lines)
    work.mkdir(parents=True, exist_ok=True)
    (work / "sentences.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    logger.info("%d sentences, %d of them natural of %d found", len(lines), len(chosen) - len(made), len(natural))


def _key(sentence: str) -> str:
    """Equal for sentences that differ in case and punctuation only."""
    return " ".join(_WORD.findall(sentence.lower()))


def _natural(root: Path, known: set[str], held: set[str], rng: random.Random) -> list[str]:
    sentences: dict[str, str] = {}
    for name, source in SOURCES.items():
        found = {_key(sentence): sentence for paragraph in source(root) for sentence in _sentences(paragraph, known)}
        chosen = rng.sample(sorted(found), min(MOST_OF_A_SOURCE, len(found)))
        sentences |= {key: found[key] for key in chosen}
        logger.info("%-10s %6d of %6d sentences", name, len(chosen), len(found))
    return [sentence for key, sentence in sentences.items() if key not in held]


def _sentences(paragraph: str, known: set[str]) -> Iterator[str]:
    text = paragraph.replace("\u2019", "'").replace("\u201c", '"').replace("\u201d", '"').replace("`", "'")
    for candidate in _SENTENCE_END.split(" ".join(text.split())):
        sentence = candidate.strip(" -*':;,.")
        if sentence.count('"') % 2 or sentence.count("(") != sentence.count(")"):
            sentence = sentence.replace('"', "").replace("(", "").replace(")", "").strip()
        words = _WORD.findall(sentence)
        if not (MIN_WORDS <= len(words) <= MAX_WORDS and len(sentence) <= MAX_CHARS and _ACCEPTED.fullmatch(sentence)):
            continue
        if sum(char.isdigit() for char in sentence) > 4 or any(word.isupper() and len(word) > 1 for word in words):
            continue
        if sum(word.lower() in known for word in words) < KNOWN_SHARE * len(words):
            continue
        yield sentence if sentence[-1] in ".?!" else sentence.rstrip(",.:;- ") + "."


def _with_few_numbers(sentences: list[str]) -> list[str]:
    numbered = [sentence for sentence in sentences if any(char.isdigit() for char in sentence)]
    surplus = set(numbered[NUMBERED_SENTENCES:])
    return [sentence for sentence in sentences if sentence not in surplus]


def _as_served(sentences: list[str]) -> Iterator[str]:
    """The sentences spelled out, in lower case. Those that still contain other characters are left out."""
    frontend = TextFrontend()
    for sentence in tqdm(sentences, desc="corpus", unit="sentence", mininterval=1):
        # The front end is slow and changes numbers, signs and abbreviations only.
        plain = not re.search(r"\d|\b[A-Z][a-z]{1,3}\.", sentence)
        spelled_out = (sentence if plain else frontend.transcript(sentence)).lower()
        if _SPELLED_OUT.fullmatch(spelled_out):
            yield spelled_out


def _random_words(rng: random.Random, common: list[str], rare: list[str]) -> str:
    """Two to eight words: a quarter function words, a quarter frequent ones, the rest from the word list."""
    groups = (common[:150], common, rare, rare)
    words = [rng.choice(rng.choice(groups)) for _ in range(rng.randint(2, 8))]
    if len(words) > 4 and rng.random() < 0.3:
        words[len(words) // 2] += ","
    return " ".join(words) + rng.choice("...?!")


# --- sources: paragraphs from one kind of file --------------------------------------------------------------------


def _bible(root: Path) -> Iterator[str]:
    program = root / "usr/bin/bible"
    if program.is_file():
        command = [str(program), "-p", str(root / "usr/lib"), "gen1:1-rev22:21"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        # Verses begin with blanks and their number, and are wrapped; a blank line is before a chapter.
        yield from (verse.partition("\n\n")[0] for verse in re.split(r"(?m)^ +\d+ ", text)[1:])


def _fortunes(root: Path) -> Iterator[str]:
    for path in sorted((root / "usr/share/games/fortunes").glob("*")):
        if path.suffix not in (".dat", ".u8"):
            yield from path.read_text(encoding="utf-8", errors="ignore").split("\n%\n")


def _wordnet(root: Path) -> Iterator[str]:
    """The quoted examples after definitions."""
    for path in sorted((root / "usr/share/wordnet").glob("data.*")):
        for line in path.read_text(encoding="utf-8", errors="ignore").splitlines():
            yield from line.partition(" | ")[2].split('"')[1::2]


def _wesnoth(root: Path) -> Iterator[str]:
    for path in sorted((root / "usr/share/games/wesnoth").rglob("*.cfg")):
        yield from re.findall(r'_ ?"([^"]+)"', path.read_text(encoding="utf-8", errors="ignore"))


def _html(root: Path) -> Iterator[str]:
    pages = [page for folder in ("doc", "developers-reference") for page in (root / "usr/share" / folder).rglob("*")]
    for path in sorted(page for page in pages if page.name.endswith((".html", ".html.gz"))):
        text = _BLOCK_END.sub("\n\n", _CODE.sub(" ", _read(path)))
        yield from html.unescape(_TAG.sub("", text)).split("\n\n")


def _plain(root: Path) -> Iterator[str]:
    folders = ("doc", "misc", "debian-reference", "common-licenses")
    files = [file for folder in folders for file in (root / "usr/share" / folder).rglob("*")]
    for path in sorted(file for file in files if file.name.endswith((".txt", ".txt.gz", ".md", "README.gz"))):
        yield from _read(path).split("\n\n")


def _pod(root: Path) -> Iterator[str]:
    for path in sorted((root / "usr/share/perl").rglob("*.pod")):
        paragraphs = _read(path).split("\n\n")
        yield from (re.sub(r"[A-Z]<([^<>]*)>", r"\1", text) for text in paragraphs if not text.startswith((" ", "=")))


def _docstrings(root: Path) -> Iterator[str]:
    for path in sorted((root / "usr/lib").glob("python3*/**/*.py")):
        for text in re.findall(r'"""(.*?)"""', _read(path), re.DOTALL):
            yield from text.split("\n\n")


def _read(path: Path) -> str:
    data = path.read_bytes() if path.is_file() else b""
    return (gzip.decompress(data) if path.suffix == ".gz" and data else data).decode("utf-8", errors="ignore")


SOURCES: dict[str, Callable[[Path], Iterator[str]]] = {
    "bible": _bible,
    "fortunes": _fortunes,
    "wordnet": _wordnet,
    "wesnoth": _wesnoth,
    "html": _html,
    "plain": _plain,
    "pod": _pod,
    "docstrings": _docstrings,
}
