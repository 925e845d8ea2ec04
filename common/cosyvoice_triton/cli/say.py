"""Speak a text at a running server or in this process, and write it to a file.

    cosyvoice-triton say "Good morning."                                       the demo's voice kumo -> out/say.wav
    cosyvoice-triton say "Good morning." --voice nezumi
    cosyvoice-triton say "Good morning." --local                               without a server, with the demo voice
    cosyvoice-triton say "Good morning." --local models/official --stack unet
    cosyvoice-triton say --source me.wav --voice nezumi                        a recording in another voice
    cosyvoice-triton say --subtitles film.srt --voice nezumi                   one track, each cue in its time
    cosyvoice-triton say "Good morning." --server gpu1:8001 --reference anna.wav --reference-text "What she says."

`cosyvoice-triton serve` starts a server. With --local the checkpoints are loaded first, which takes seconds.
"""

import argparse
import itertools
import re
import sys
import wave
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cosyvoice_triton import stacks
from cosyvoice_triton.api import Client
from cosyvoice_triton.arguments import command_parser, positive_number, reporting_errors
from cosyvoice_triton.client.arguments import parameter, words
from cosyvoice_triton.constants import GRPC_PORT, MIN_REFERENCE_SECONDS, SAMPLE_RATE
from cosyvoice_triton.demo_checkpoint import DEMO
from cosyvoice_triton.prepare import steps

_CLOCK = r"(?:(\d+):)?(\d\d):(\d\d)[.,](\d{3})"
_TIMES = re.compile(rf"^{_CLOCK}[ \t]*-->[ \t]*{_CLOCK}.*$", re.MULTILINE)
_TAG = re.compile(r"<[^>]*>|\{\\[^}]*\}")  # of WebVTT and SubRip; {\an8} of SubStation


class Cue(NamedTuple):
    """A text, and when it is shown, in seconds."""

    start: float
    end: float
    text: str


def read_cues(file: str) -> list[Cue]:
    """Return the cues of SubRip or WebVTT that have a text. ValueError if there is none, or one ends before it
    begins."""
    file, cues = file.replace("\r\n", "\n"), []
    for found in _TIMES.finditer(file):
        text = re.split(r"\n[ \t]*(?:\n|$)", file[found.end() :], maxsplit=1)[0] if found.end() < len(file) else ""
        said = " ".join(unescape(_TAG.sub("", text)).split())
        start, end = _seconds(*found.groups()[:4]), _seconds(*found.groups()[4:])
        if end <= start:
            raise ValueError(f"the cue {found[0]!r} ends before it begins")
        if said:
            cues.append(Cue(start, end, said))
    if not cues:
        raise ValueError("there are no cues like '00:00:01,000 --> 00:00:03,000' with a text below")
    return cues


def track(
    cues: Iterable[Cue], speak: Callable[[str, float], np.ndarray], on_warning: Callable[[str], object]
) -> Iterator[np.ndarray]:
    """Yield speech and the silence before it, float32 (N,), in order. speak: returns a text in so many seconds. A cue
    that the one before leaves no room begins late, which is a warning."""
    at = 0
    for cue in sorted(cues):
        begin = round(cue.start * SAMPLE_RATE)
        if at > begin + SAMPLE_RATE // 10:
            on_warning(f"{(at - begin) / SAMPLE_RATE:.2f} s late: {cue.text[:80]!r}")
        speech = speak(cue.text, max(cue.end - cue.start, MIN_REFERENCE_SECONDS))
        yield np.concatenate([np.zeros(max(0, begin - at), np.float32), speech])
        at = max(at, begin) + speech.size


def _seconds(hours: str | None, minutes: str, seconds: str, milliseconds: str) -> float:
    return 3600 * int(hours or 0) + 60 * int(minutes) + int(seconds) + int(milliseconds) / 1000


if TYPE_CHECKING:
    from cosyvoice_triton.speaker.speaker import Speaker


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(__doc__)
    parser.add_argument("text", nargs="?", default="", help="what to speak")
    parser.add_argument("--source", type=Path, help="instead of a text: a recording to convert, of up to two minutes")
    parser.add_argument("--subtitles", type=Path, help="instead of a text: an SRT or WebVTT file")
    parser.add_argument("--duration", type=positive_number, help="seconds of the speech, by a speed of 0.7 to 1.4")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--server", default=f"localhost:{GRPC_PORT}", help="gRPC address (default: %(default)s)")
    where.add_argument(
        "--local",
        nargs="?",
        type=Path,
        const=DEMO,
        metavar="MODELS",
        help=f"without a server: load these checkpoints into this process (default: {DEMO}, written if missing)",
    )
    parser.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name, help="with --local")
    voice = parser.add_mutually_exclusive_group()
    voice.add_argument("--voice", help="a registered voice (default: the server's, kumo of the demo)")
    voice.add_argument("--reference", type=Path, help="instead, a recording of a voice, 0.5 to 30 s")
    parser.add_argument("--reference-text", help="what the recording says, word for word")
    parser.add_argument("--instruct-text", help='how to speak, e.g. "Speak slowly."')
    parser.add_argument("--language", help="of the text, such as de; without it: guessed")
    parser.add_argument("--pronunciation", type=words, metavar="FILE", help="words = readings, a line each")
    parser.add_argument("--parameter", type=parameter, action="append", default=[], metavar="NAME=VALUE", help="seed=2")
    parser.add_argument("--timeout", type=positive_number, default=120.0, help="seconds for the whole answer (120)")
    parser.add_argument(
        "--output", type=Path, default=Path("out/say.wav"), help="24 kHz, 16 bit (default: %(default)s)"
    )
    return parser


@reporting_errors("interrupted; the request was cancelled")
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.subtitles and (args.text or args.source or args.duration or "duration" in dict(args.parameter)):
        raise ValueError("--subtitles comes instead of a text, --source and --duration")
    with voice_of(args) as speaker:
        options = {
            "voice": args.voice,
            "reference": args.reference,
            "reference_text": args.reference_text,
            "instruct_text": args.instruct_text,
            "pronunciation": args.pronunciation,
            **({"timeout": args.timeout} if args.local is None else {}),
            **({"language": args.language} if args.language else {}),
            **({"source": args.source} if args.source else {}),
            **({"duration": str(args.duration)} if args.duration else {}),
            **dict(args.parameter),
        }
        if args.subtitles is not None:
            cues = read_cues(args.subtitles.read_text(encoding="utf-8-sig"))
            chunks = track(cues, lambda text, seconds: speaker.speak(text, **options, duration=str(seconds)), _warn)
        else:
            chunks = speaker.stream(args.text, **options)
        print(f"{write(chunks, args.output):.2f} s written to {args.output}")
    return 0


@contextmanager
def voice_of(args: argparse.Namespace) -> Iterator["Client | Speaker"]:
    """Yield what speaks: the server's client, or the stack in this process."""
    if args.local is None:
        with Client(args.server) as client:
            yield client
        return
    from cosyvoice_triton.speaker.speaker import Speaker  # a client does not need what it imports

    if args.local == DEMO:
        steps.demo(args.local, args.stack)
    with Speaker(args.local, stack=args.stack) as speaker:
        yield speaker


def write(chunks: Iterator[np.ndarray], path: Path) -> float:
    """Write the chunks as they arrive; return the seconds of audio. Without a first chunk there is no file."""
    first = next(chunks)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Opened here: `wave` shows a traceback of its own if it cannot open a file.
        with path.open("wb") as opened, wave.open(opened, "wb") as file:
            file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
            for chunk in itertools.chain([first], chunks):
                file.writeframes((np.clip(chunk, -1, 1) * 32767).astype("<i2").tobytes())
            return file.getnframes() / SAMPLE_RATE
    except OSError as error:
        raise OSError(f"cannot write to {path}: {error}; choose another with --output") from None


def _warn(warning: str) -> None:
    print(f"warning: {warning}", file=sys.stderr)
