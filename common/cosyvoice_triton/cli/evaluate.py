"""Judge a checkpoint: load it, let it speak a set of sentences, and measure the speech.

    cosyvoice-triton evaluate models/official --set seed-tts-en --data seedtts_testset
    cosyvoice-triton evaluate models/official --set seed-tts-zh --data seedtts_testset --recogniser 'asr.sh {wav}'
    cosyvoice-triton evaluate models/demo --data my/manifest.jsonl --require 'error_rate<=0.2' 'dnsmos>=2.6'
    cosyvoice-triton evaluate models/official --data my/manifest.jsonl --steps 10 8 6 5

--data is the folder of seed-tts-eval (en/meta.lst, zh/meta.lst, each with its prompt-wavs/; its repository,
BytedanceSpeech/seed-tts-eval, says where), or for --set own a manifest in the form of
cosyvoice_triton/samples/manifest.jsonl. Upstream's published figures are of whole utterances: beside them speech is
judged whole, and streamed in a second row (--modes). --audio adds rows for folders of ID.wav, such as upstream's;
without a checkpoint only these are judged.

Judges are optional: pip install 'cosyvoice-triton[evaluate]' for Moonshine (words, English only) and DNSMOS, and pip
install --no-deps Resemblyzer for speaker similarity. One that is not installed is named and its column left out.

--steps adds a row for each number of Euler steps, with the error of the mel against 100 steps in standard deviations,
and names the fewest whose speech is as good as that of the most; serve it with --set n_timesteps=N.

--recogniser is a program that prints a line for each of the files that {wav} becomes.

Writes the audio, report.md, report.json, report.png and pictures of ten onsets, which are spoken once more with their
silence, to --output. The exit code is 1 if a requirement is missed.
"""

import argparse
import itertools
import json
import logging
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
from tqdm import tqdm

from cosyvoice_triton import samples, stacks
from cosyvoice_triton.arguments import command_parser, positive_int, reporting_errors
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.demo_checkpoint import VOICES_DIR
from cosyvoice_triton.evaluate import judges, report, speech
from cosyvoice_triton.evaluate.report import Requirement
from cosyvoice_triton.load.measure import host_ms
from cosyvoice_triton.load.samples import Sample, read_manifest
from cosyvoice_triton.server.options import Device, StackOptions, parse_settings
from cosyvoice_triton.text.language import language_of
from cosyvoice_triton.voice.audio import at_rate, load_audio

JudgeT = TypeVar("JudgeT")


class Panel:
    """The judges that are installed; each of the others is named on standard error."""

    def __init__(self, models: Path | None, recogniser: str | None) -> None:
        self._models = models
        self._english_only = recogniser is None
        self._recognise: judges.Recogniser | None = (
            judges.CommandRecogniser(recogniser) if recogniser else _installed(judges.Moonshine)
        )
        self._dnsmos, self._similarity = _installed(judges.Dnsmos), _installed(judges.Similarity)

    def judge(self, name: str, answers: Sequence[speech.SpokenSentence]) -> list[dict[str, Any]]:
        """Return the figures of every answer, {} of one that failed."""
        found = [report.measures(answer) for answer in answers]
        waves = [np.zeros(0, np.float32) if each.wave is None else judges.at_16k(each.wave) for each in answers]
        for answer, figures, wave in zip(tqdm(answers, desc=f"judging {name}"), found, waves, strict=True):
            if figures and self._dnsmos:
                figures["dnsmos"] = self._dnsmos(wave)
            reference = self._reference(answer.sample)
            if figures and self._similarity and reference is not None:
                figures["similarity"] = self._similarity(wave, reference)
        self._count_errors(answers, found, waves)
        return found

    def _count_errors(
        self, answers: Sequence[speech.SpokenSentence], found: list[dict[str, Any]], waves: list[np.ndarray]
    ) -> None:
        read = [
            index
            for index, answer in enumerate(answers)
            if found[index] and (not self._english_only or language_of(answer.sample.target_text) == "en")
        ]
        if self._recognise is None or not read:
            return
        heard = self._recognise([answers[index].path for index in read], [waves[index] for index in read])
        for index, words in zip(read, heard, strict=True):
            text = answers[index].sample.target_text
            wrong, units = judges.errors(text, words)
            found[index] |= {"text": text, "heard": words, "errors": wrong, "units": units}
            found[index]["error_rate"] = wrong / max(units, 1)

    def _reference(self, sample: Sample) -> np.ndarray | None:
        """Return the recording of a sample's voice at 16 kHz, if it is known."""
        if sample.prompt_audio is not None:
            return at_rate(sample.prompt_audio, PROMPT_SAMPLE_RATE)
        path = self._models / VOICES_DIR / f"{sample.speaker}.wav" if self._models else None
        return load_audio(path, PROMPT_SAMPLE_RATE) if path and path.is_file() else None


def _installed(judge: Callable[[], JudgeT]) -> JudgeT | None:
    try:
        return judge()
    except judges.MissingJudgeError as error:
        print(f"left out: {error}", file=sys.stderr)
        return None


@reporting_errors("interrupted; everything was shut down")
def main(argv: Sequence[str] | None = None) -> int:
    """Speak, judge and report; return 1 if a requirement is missed."""
    args = parse_args(argv)
    command = shlex.join(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if args.models is not None and not args.models.is_dir():
        raise ValueError(f"there is no folder {args.models}: give that of the checkpoints, such as models/demo")
    sentences = read_manifest(args.data / speech.SETS[args.set], limit=args.limit)
    panel = Panel(args.models, args.recogniser)
    args.output.mkdir(parents=True, exist_ok=True)
    spoken = [speech.from_folder(folder, sentences) for folder in args.audio]
    of_counts: list[list[tuple[str, list[speech.SpokenSentence]]]] = []
    if args.models is not None:
        modes = args.modes or (["offline", "streaming"] if args.set != speech.OWN else ["streaming"])
        how = sentences, modes, args.tasks, args.output
        options, counts = stack_options(args), args.steps or [None]
        of_counts = [list(speech.spoken(options, *how, count)) for count in counts]
        spoken = [*itertools.chain(*of_counts), *spoken]
    found = {name: panel.judge(name, answers) for name, answers in spoken}
    rows = [report.summary(name, answers) for name, answers in found.items()]
    if args.steps:
        compare_steps(stack_options(args), args.steps, rows[: sum(map(len, of_counts))])
    about = f"{args.set}, {len(sentences)} sentences; {platform.platform()}, host {host_ms():.1f} ms"
    pictures = report.plot_onsets(spoken, args.output)
    write(args.output, f"{about}. `cosyvoice-triton evaluate {command}`", rows, found, sentences, pictures)
    missed = [line for row in rows for each in args.require if (line := each.missed_by(row))]
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


def compare_steps(options: StackOptions, counts: Sequence[int], rows: Sequence[report.Row]) -> None:
    """Add the error of the mel to the rows, as many of each number of steps, and print which number is recommended."""
    each = len(rows) // len(counts)
    for index, error in enumerate(report.mel_errors(options, counts)):
        for row in rows[each * index : each * (index + 1)]:
            row["mel_error"] = error
    fewest = report.recommended(rows[::each], counts)
    print(f"n_timesteps={fewest} speaks as well as {max(counts)}" if fewest else "no judge compared the steps")


def stack_options(args: argparse.Namespace) -> StackOptions:
    return StackOptions(
        models_dir=args.models,
        stack=args.stack,
        device=args.device,
        llm_engine=args.llm_engine,
        settings=parse_settings(args.settings),
    )


def write(
    output: Path,
    about: str,
    rows: Sequence[report.Row],
    found: Mapping[str, Sequence[dict[str, Any]]],
    sentences: Sequence[Sample],
    pictures: Sequence[str],
) -> None:
    """Print the table and write the three files of the report. pictures: that it shows beside its own."""
    table = report.markdown(rows)
    print(table)
    shown = "".join(f"\n![{name}]({name})\n" for name in ("report.png", *pictures))
    (output / "report.md").write_text(f"{about}\n\n{table}\n{shown}", encoding="utf-8")
    answers = {
        name: [{"id": each.id, **figures} for each, figures in zip(sentences, row, strict=True)]
        for name, row in found.items()
    }
    content = {"about": about, "rows": rows, "answers": answers}
    (output / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    report.plot(found, about, output / "report.png")
    print(f"written to {output}: the audio, {', '.join(('report.md', 'report.json', 'report.png', *pictures))}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("models", type=Path, nargs="?", metavar="DIR", help="checkpoints, as `render` takes them")
    add("--set", choices=speech.SETS, default=speech.OWN, help="sentences (default: %(default)s)")
    add("--data", type=Path, default=samples.MANIFEST, help="of the set (default: %(default)s)")
    add("--limit", type=positive_int, help="sentences, from the first")
    add("--audio", type=Path, nargs="+", default=[], metavar="DIR", help="folders of ID.wav")
    add("--recogniser", metavar="'PROGRAM {wav}'", help="instead of Moonshine")
    add(
        "--modes",
        choices=("offline", "streaming"),
        nargs="+",
        help="whole or streamed, a row each (default: both with seed-tts sets, otherwise streaming)",
    )
    add(
        "--require",
        type=Requirement.read,
        nargs="+",
        default=[Requirement("failed", True, 0), Requirement("silent", True, 0)],
        metavar="NAME<=NUMBER",
        help=f"of every row (default: failed<=0 silent<=0); NAME is one of {', '.join(report.COLUMNS)}",
    )
    add("--steps", type=positive_int, nargs="+", metavar="N", help="Euler steps, a row each")
    add("--tasks", type=positive_int, default=1, help="requests at once (1)")
    add("--stack", choices=stacks.names(), default=stacks.DEFAULT.name)
    add("--device", choices=get_args(Device), default=StackOptions.device)
    add("--llm-engine", default=StackOptions.llm_engine, help="as of `cosyvoice-triton render`")
    add("--setting", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="its --set")
    add("--output", type=Path, default=Path("out/evaluate"), help="folder (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.models is None and not args.audio:
        parser.error("nothing to judge: name a folder of checkpoints, or --audio")
    if args.models is None and args.steps:
        parser.error("--steps needs a folder of checkpoints")
    args.steps = list(dict.fromkeys(args.steps or ()))
    return args
