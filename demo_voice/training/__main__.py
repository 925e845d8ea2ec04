"""Train the demo voice from scratch: text, speech by flite, every network of both stacks, and its checkpoint.

    python -m demo_voice.training --flite DIR [--work out/voice] [--minutes 19]      all stages
    python -m demo_voice.training --stages vocoder --seconds 600                     one

The result, `checkpoint/` in the working folder, has the official layout: a small synthetic voice for demos and tests,
trained on flite's free voices. Its quality is far below CosyVoice2's.

The stages; each uses what earlier stages left in the working folder:

    corpus        English sentences, from texts in Debian packages and a small grammar; kept if it exists
    speech        the sentences synthesised by flite in four voices, on all cores, with phone times
    tokenizer     S3 tokenizer: phones and mel predicted from codes at 25 Hz, of perturbed recordings
    speaker       x-vectors: classification of voices at several speeds
    more_speech   more sentences for the LLM alone, as many as fit into the time
    vocoder       HiFT, for both stacks: spectral losses, then discriminators
    flow_dit      Step-Audio2's flow: conditional flow matching, in the chunks of its streams
    flow_unet     CosyVoice2's flow: the same, in its own chunks
    llm           Qwen2: text, alone or with a prompt, to speech tokens
    export        the checkpoint

Each stage is a process with a log in the working folder, started as soon as its inputs exist; the last four networks
are trained at the same time on one GPU. Training stops after --minutes in all. When the command is run again, finished
stages are skipped; --stages runs the named stages in any case.

Text comes from Debian packages (see corpus.py) under /, or under --texts. flite is Debian's libflite1,
installed or unpacked (`dpkg -x`) under --flite. For a machine without a network, copy both there as files, the texts as
`sentences.txt` in the working folder. One H200 and 16 cores take 20 minutes in all.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import torch
from cosyvoice_triton.load.samples import read_manifest

# Everyday sentences that `cosyvoice-triton evaluate` hears, and which are not trained on.
HELD_OUT = Path(__file__).resolve().parents[2] / "tests" / "assets" / "everyday_sentences.jsonl"

WHOLE = 19 * 60.0  # seconds in all that the seconds below are for
SECONDS = {
    "speech": 80.0,
    "tokenizer": 75.0,
    "speaker": 25.0,
    "more_speech": 220.0,
    # The vocoder gets all the remaining time, and at the end the GPU to itself: it affects intelligibility most.
    "flow_dit": 450.0,
    "flow_unet": 450.0,
    "llm": 500.0,
}
EXPORT_SECONDS = 30.0  # including process start
NETWORKS = ("vocoder", "flow_dit", "flow_unet", "llm")  # trained at the same time, on one GPU

log = logging.getLogger("demo_voice.training")


@dataclass(frozen=True)
class TrainingJob:
    """Paths and device of one training, the same for every stage."""

    work: Path
    flite: Path
    texts: Path
    device: str

    def run(self, stage: str, seconds: float) -> None:
        """Run one stage in this process and mark it as done."""
        begun = time.monotonic()
        _STAGES[stage](self, seconds)
        log.info("%s: done in %.0f s", stage, time.monotonic() - begun)
        self._mark(stage).parent.mkdir(exist_ok=True)
        self._mark(stage).touch()

    def is_done(self, stage: str) -> bool:
        return self._mark(stage).exists()

    def _mark(self, stage: str) -> Path:
        return self.work / "done" / stage


# --- stages: imports are in the functions, since few machines have every dependency ---------------------------------


def _corpus(job: TrainingJob, seconds: float) -> None:
    from demo_voice.training.corpus import make_corpus

    held_out = {sample.target_text for sample in read_manifest(HELD_OUT)}
    make_corpus(job.work, held_out, job.texts)


def _speech(job: TrainingJob, seconds: float) -> None:
    from demo_voice.training.speech import synthesize

    synthesize(job.work, seconds, job.flite)


def _more_speech(job: TrainingJob, seconds: float) -> None:
    from demo_voice.training.speech import synthesize_more

    synthesize_more(job.work, seconds, job.flite)


def _network(name: str) -> Callable[[TrainingJob, float], None]:
    return lambda job, seconds: import_module(f"demo_voice.training.{name}").train(job.work, seconds, job.device)


def _export(job: TrainingJob, seconds: float) -> None:
    from demo_voice.training.export import export

    export(job.work, job.work / "checkpoint")


_STAGES: dict[str, Callable[[TrainingJob, float], None]] = {
    "corpus": _corpus,
    "speech": _speech,
    "more_speech": _more_speech,
    **{name: _network(name) for name in ("tokenizer", "speaker", *NETWORKS)},
    "export": _export,
}


# --- all of them -------------------------------------------------------------------------------------------------


@dataclass
class Processes:
    """Stages as subprocesses, each with a log. On leaving the context, running ones are terminated."""

    job: TrainingJob
    running: dict[str, subprocess.Popen] = field(default_factory=dict)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.terminate()
            process.wait()

    def start(self, stage: str, seconds: float) -> None:
        """Start a stage unless it is done."""
        if self.job.is_done(stage):
            return
        job, path = self.job, self.job.work / f"{stage}.log"
        command = [sys.executable, "-m", "demo_voice.training", "--stages", stage, "--seconds", f"{seconds:.0f}"]
        command += ["--work", str(job.work), "--flite", str(job.flite), "--texts", str(job.texts)]
        command += ["--device", job.device]
        log.info("%s: %.0f s, log in %s", stage, seconds, path)
        with path.open("ab") as output:
            self.running[stage] = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def wait(self, *stages: str) -> None:
        """Wait until these stages have ended. RuntimeError if one failed."""
        waiting = [stage for stage in stages if stage in self.running]
        failed = [stage for stage in waiting if self.running[stage].wait()]
        for stage in waiting:
            del self.running[stage]
        if failed:
            raise RuntimeError(f"{', '.join(failed)} failed: see {self.job.work}/*.log")


def train_all(job: TrainingJob, seconds: float) -> None:
    """Run every stage that is not done, within `seconds`. RuntimeError if one failed."""
    deadline = time.monotonic() + seconds - EXPORT_SECONDS
    share = min(1.0, seconds / WHOLE)

    def left(stage: str | None = None) -> float:
        """Seconds for a stage that starts now."""
        until_end = max(1.0, deadline - time.monotonic())
        return min(until_end, SECONDS[stage] * share) if stage else until_end

    job.work.mkdir(parents=True, exist_ok=True)
    with Processes(job) as processes:
        if not (job.work / "sentences.txt").is_file():
            job.run("corpus", 0)
        processes.start("speech", left("speech"))
        processes.wait("speech")
        processes.start("vocoder", left())  # needs `speech` only
        for stage in ("more_speech", "tokenizer", "speaker"):
            processes.start(stage, left(stage))
        processes.wait("tokenizer", "speaker")
        for stage in ("flow_dit", "flow_unet"):
            processes.start(stage, left(stage))
        processes.wait("more_speech")
        processes.start("llm", left("llm"))
        try:
            processes.wait(*NETWORKS)
        finally:  # export what was trained, also after a failure
            job.run("export", 0)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 8))  # several stages share the cores
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    job = TrainingJob(args.work, args.flite, args.texts, args.device)
    try:
        if args.stages:
            for stage in args.stages:
                job.run(stage, args.seconds)
        else:
            train_all(job, 60 * args.minutes)
    except (ValueError, RuntimeError, OSError) as error:
        log.error("demo_voice.training: %s", error)
        return 1
    except KeyboardInterrupt:
        log.error("demo_voice.training: interrupted; run the same command again for the stages that are left")
        return 130
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--work", type=Path, default=Path("out/voice"))
    parser.add_argument("--minutes", type=float, default=WHOLE / 60, help="for all stages together (default: 19)")
    parser.add_argument("--stages", nargs="+", choices=list(_STAGES), help="run these only, one after another")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training for each of --stages")
    parser.add_argument("--flite", type=Path, default=Path("/usr/lib"), help="folder that contains libflite1")
    parser.add_argument("--texts", type=Path, default=Path("/"), help="root of the Debian packages with the texts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
