"""Evaluate a checkpoint like the demo's on the real tritonserver: word errors, lengths, voices, speed.

    python -m demo_voice.evaluation --teacher out/voice/teacher --output out/voice/evaluation

Synthesises every sentence with both stacks, in each voice, streamed and offline, with the server's default sampling and
the sentence's number as seed; then in the voice of a recording of a human. A recogniser (pocketsphinx) counts word
errors. The teacher's recordings are DIR/VOICE/NN.wav, NN the line of the sentence from 00. Prints a table; writes
figures.json and every waveform.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.client.requests import Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.demo_checkpoint.checkpoint import STACKS
from cosyvoice_triton.demo_checkpoint.make import VOICES_DIR
from cosyvoice_triton.server.rendering import StackOptions, render
from cosyvoice_triton.server.tritonserver import Ports, TritonServer
from cosyvoice_triton.voice.audio import load_audio, save_audio
from cosyvoice_triton.voice.encoders import ReferenceEncoder, SpeakerEncoder
from cosyvoice_triton.voice.prompt import Recording

from demo_voice.evaluation import HELD_OUT, HUMAN, HUMAN_TEXT, measures
from demo_voice.evaluation.takes import Series, Take, copy_synthesis, from_tokens, read_teacher, request_takes, seeded

VOICES = ("slt", "rms")  # names in the folder voices of the models


class Evaluation:
    """One evaluation; its methods append to `series`."""

    def __init__(self, models: Path, sentences: Sequence[str], teacher: Path) -> None:
        self.models = models
        self.sentences = sentences
        self.series: list[Series] = []
        self.nearness: dict[str, tuple[int, int]] = {}
        self._recordings = {name: self._registered(name) for name in VOICES}
        self._teachers = {name: read_teacher(teacher, name, sentences) for name in VOICES}
        self.series += self._teachers.values()

    def _registered(self, voice: str) -> Take:
        """The recording and transcript of a registered voice."""
        path = self.models / VOICES_DIR / f"{voice}.wav"
        text = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
        return Take(text, load_audio(path, PROMPT_SAMPLE_RATE), PROMPT_SAMPLE_RATE)

    def parts(self, stack: str) -> None:
        """Quality of the vocoder alone, and of flow and vocoder together."""
        directory = self.models / stacks.named(stack).checkpoint
        encode = ReferenceEncoder(stacks.named(stack), directory)
        for voice, teacher in self._teachers.items():
            self.series.append(copy_synthesis(directory, teacher, stack))
            self.series.append(
                from_tokens(directory, teacher, encode(Recording(self._recordings[voice].waveform)), stack)
            )

    def whole(self, stack: str, mode: str, work: Path) -> None:
        """Audio from the server."""
        options = StackOptions(models_dir=self.models, stack=stack, decoupled=mode == "streaming", device="cpu")
        repository = work / f"{stack}-{mode}"
        render(options, repository)
        with TritonServer(repository, ports=Ports(0, 0, 0), log_file=work / f"{stack}-{mode}.log") as server:
            said = list(enumerate(self.sentences))
            for voice in self._recordings:
                requests = [Utterance(text, speaker=voice, parameters=seeded(number)) for number, text in said]
                takes = request_takes(server.grpc_url, options.orchestrator, mode, requests)
                name = f"text to audio, {'streamed' if mode == 'streaming' else mode}"
                self.series.append(Series(name, stack, voice, takes))
            if mode == "streaming":
                human = load_audio(HUMAN, PROMPT_SAMPLE_RATE)
                requests = [Utterance(text, human, HUMAN_TEXT, seeded(number)) for number, text in said]
                takes = request_takes(server.grpc_url, options.orchestrator, mode, requests)
                self.series.append(Series("after a human's recording, streamed", stack, HUMAN.stem, takes))
                self._prompting(stack, server.grpc_url, options.orchestrator)

    def _prompting(self, stack: str, address: str, model: str) -> None:
        """Speaker similarity. The prompt of each sentence is the teacher's recording of another sentence, in each of
        the voices in turn."""
        voices = {name: teacher.takes for name, teacher in self._teachers.items()}
        wanted, requests = [], []
        for number, text in enumerate(self.sentences):
            voice = VOICES[number % len(VOICES)]
            reference = voices[voice][(number + 1) % len(voices[voice])]
            wanted.append(voice)
            requests.append(Utterance(text, reference.waveform, reference.text, seeded(number)))
        takes = request_takes(address, model, "streaming", requests)
        found = measures.nearest(SpeakerEncoder(self.models / stacks.named(stack).checkpoint), takes, voices)
        near = sum(voice == other for voice, other in zip(wanted, found, strict=True))
        self.nearness[stack] = (near, len(wanted))

    def write(self, output: Path) -> str:
        """Write all files; return a table of the figures."""
        for each in self.series:
            (output / "wav" / each.name).mkdir(parents=True, exist_ok=True)
            for number, take in enumerate(each.takes):
                save_audio(output / "wav" / each.name / f"{number:02d}.wav", take.waveform, take.rate)
        recognised = measures.recognise(self.series)
        rows = [
            measures.figures(each, words, self._teachers.get(each.voice))  # there is none of the human
            for each, words in zip(self.series, recognised, strict=True)
        ]
        content = {"nearness": self.nearness, "rows": rows}
        (output / "figures.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        near = ", ".join(f"{stack} {near} of {of}" for stack, (near, of) in self.nearness.items())
        return f"{measures.table(rows)}\nnearest to the voice of its reference: {near}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=Path, default=Path("models/demo"), help="as cosyvoice_triton.demo_checkpoint.make writes it"
    )
    parser.add_argument(
        "--teacher", type=Path, required=True, metavar="DIR", help="the teacher's recordings of the sentences"
    )
    parser.add_argument("--output", type=Path, default=Path("out/evaluation"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    begun = time.monotonic()
    try:
        sentences = HELD_OUT.read_text(encoding="utf-8").splitlines()
        evaluation = Evaluation(args.models, sentences, args.teacher)
        args.output.mkdir(parents=True, exist_ok=True)
        for stack in (each.name for each in STACKS):
            for mode in ("streaming", "offline"):
                print(f"{stack}, {mode}: {len(sentences)} sentences in each voice", flush=True)
                evaluation.whole(stack, mode, args.output)
            evaluation.parts(stack)
        print("recognising", flush=True)
        print(evaluation.write(args.output))
    except (ValueError, RuntimeError, OSError) as error:  # ClientError and ServerError are RuntimeErrors
        print(f"demo_voice.evaluation: {error}", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - begun:.0f} s; written to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
