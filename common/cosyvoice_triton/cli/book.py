"""Speak an EPUB to an M4B with its chapters, from a running server.

    cosyvoice-triton book novel.epub --voice nezumi                     -> novel.m4b

Paragraphs are requests of their own. In the text, `[voice:NAME]` is the voice from there to the chapter's end, and
`[segment 2.5s]` a length. What is spoken is kept in OUTPUT.parts: after an interruption the same command goes on, and
after a change of the book only other paragraphs are spoken. Needs the extra `http`.
"""

import hashlib
import re
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np

from cosyvoice_triton.api import Client
from cosyvoice_triton.arguments import command_parser, positive_int, reporting_errors
from cosyvoice_triton.client.arguments import parameter
from cosyvoice_triton.constants import GRPC_PORT, SAMPLE_RATE
from cosyvoice_triton.text.cleaning import is_speakable, plain_text
from cosyvoice_triton.text.markup import VoicePart, by_voice
from cosyvoice_triton.text.segments import expected_seconds, fitting

PAUSE, CHAPTER_PAUSE = 0.5, 1.5  # seconds after a paragraph, and after a chapter
MOST_SECONDS = 120.0  # expected of a request
_HEADING = re.compile(r"<h[1-3]\b[^>]*>(.*?)</h[1-3]>", re.DOTALL | re.IGNORECASE)
_HEAD = re.compile(r"\A.*?<body\b[^>]*>", re.DOTALL | re.IGNORECASE)

Chapter = tuple[str, list[VoicePart]]  # its title, and what one request each speaks


@reporting_errors("interrupted; the same command goes on")
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("book", type=Path, help="an EPUB")
    parser.add_argument("--output", type=Path, help="default: the book's name, .m4b")
    parser.add_argument("--server", default=f"localhost:{GRPC_PORT}", help="gRPC address (default: %(default)s)")
    parser.add_argument("--voice", default="", help="a registered voice (default: the server's)")
    parser.add_argument("--parameter", type=parameter, action="append", default=[], metavar="NAME=VALUE", help="seed=2")
    parser.add_argument("--concurrency", type=positive_int, default=4, help="requests at once (default: %(default)s)")
    args = parser.parse_args(argv)
    output, options = args.output or Path(f"{args.book.stem}.m4b"), {"played": False, **dict(args.parameter)}
    chapters = read_chapters(args.book, args.voice)
    with Client(args.server) as client:

        def speak(part: VoicePart) -> np.ndarray:
            length = {} if part.seconds is None else {"duration": str(part.seconds)}
            return client.speak(part.text, voice=part.voice or None, timeout=600.0, **options, **length)

        files = spoken(chapters, speak, output.with_name(f"{output.name}.parts"), str(options), args.concurrency)
    print(f"{write(output, [title for title, _ in chapters], files) / 60:.1f} min written to {output}")
    return 0


def read_chapters(path: Path, voice: str) -> list[Chapter]:
    """Return the chapters of an EPUB: its files in reading order. ValueError if it cannot be read or has no text."""
    try:
        with zipfile.ZipFile(path) as book:
            found = [(_HEADING.search(text), list(_parts(_HEAD.sub("", text), voice))) for text in _texts(book)]
    except (zipfile.BadZipFile, ElementTree.ParseError, KeyError, UnicodeDecodeError, StopIteration) as error:
        raise ValueError(f"{path} is not an EPUB that can be read: {error!r}") from None
    if not (chapters := [(heading, parts) for heading, parts in found if parts]):
        raise ValueError(f"{path} has no text to speak")
    return [(_plain(heading[1]) if heading else parts[0].text[:40], parts) for heading, parts in chapters]


def _texts(book: zipfile.ZipFile) -> Iterator[str]:
    container = ElementTree.fromstring(book.read("META-INF/container.xml"))
    package = PurePosixPath(next(container.iterfind(".//{*}rootfile")).attrib["full-path"])
    root = ElementTree.fromstring(book.read(str(package)))
    files = {item.attrib["id"]: item.attrib["href"] for item in root.iterfind(".//{*}item")}
    for each in root.iterfind(".//{*}itemref"):
        yield book.read(str(package.parent / unquote(files[each.attrib["idref"]]))).decode("utf-8-sig")


def _plain(html: str) -> str:
    return plain_text(" ".join(html.split()), lambda written, reason: None)


def _parts(html: str, voice: str) -> Iterator[VoicePart]:
    for paragraph in _plain(html).split("\n"):
        for part in by_voice(paragraph):
            voice = part.voice or voice
            for text in filter(is_speakable, fitting(part.text, expected_seconds, MOST_SECONDS)):
                yield VoicePart(voice, text.strip(), part.seconds)


def spoken(
    chapters: Sequence[Chapter], speak: Callable[[VoicePart], np.ndarray], folder: Path, options: str, concurrency: int
) -> list[list[Path]]:
    """Return files of int16 (N,) for what each chapter says, spoken unless they are there. Prints how far it is."""
    folder.mkdir(parents=True, exist_ok=True)

    def file_of(part: VoicePart) -> Path:
        path = folder / (hashlib.sha256(f"{part} {options}".encode()).hexdigest()[:32] + ".npy")
        if not path.exists():
            work = path.with_suffix(f".{threading.get_ident()}.npy")
            np.save(work, (np.clip(speak(part), -1, 1) * 32767).astype("<i2"))
            work.replace(path)
        return path

    files, begun, done = list[list[Path]](), time.monotonic(), 0.0
    seconds = [sum(expected_seconds(part.text) for part in parts) for _, parts in chapters]
    with ThreadPoolExecutor(concurrency) as threads:
        for (title, parts), taken in zip(chapters, seconds, strict=True):
            files.append(list(threads.map(file_of, parts)))
            done += taken
            minutes = (time.monotonic() - begun) * (sum(seconds) / done - 1) / 60
            print(f"{len(files)}/{len(chapters)} {title}: {minutes:.1f} min to go", flush=True)
    return files


def write(path: Path, titles: Sequence[str], chapters: Sequence[Sequence[Path]]) -> float:
    """Write the chapters' files as one M4B; return its seconds."""
    import av

    from cosyvoice_triton.speech_service.audio.encoding import MARK

    marks, at = list[Any](), 0
    for number, (title, files) in enumerate(zip(titles, chapters, strict=True)):
        begin, at = at, at + sum(wave.size for wave in _waves(files))
        about = {"id": number, "time_base": Fraction(1, SAMPLE_RATE), "metadata": {"title": title}}
        marks.append({**about, "start": begin, "end": at})
    work = path.with_name(f".{path.name}")
    with av.open(str(work), "w", format="mp4") as file:
        file.metadata.update({"title": path.stem, **MARK})
        file.set_chapters(marks)
        stream = file.add_stream("aac", rate=SAMPLE_RATE, layout="mono", bit_rate=64_000)
        for wave in (wave for files in chapters for wave in _waves(files)):
            frame = av.AudioFrame.from_ndarray(wave[None], format="s16", layout="mono")
            frame.sample_rate = SAMPLE_RATE
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    work.replace(path)
    return at / SAMPLE_RATE


def _waves(files: Sequence[Path]) -> Iterator[np.ndarray]:
    for file in files:
        pause = CHAPTER_PAUSE if file is files[-1] else PAUSE
        yield np.append(np.load(file), np.zeros(round(pause * SAMPLE_RATE), np.int16))
