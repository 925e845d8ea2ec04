"""Train the demo voice from nothing: text, speech by flite, every network of both stacks, and its checkpoint.

    python -m tools.voice_training --flite DIR [--work out/voice] [--minutes 19]      all stages
    python -m tools.voice_training --stages vocoder --seconds 600                     one

What comes out, `checkpoint/` in the working folder, is in the official layout: a small synthetic voice for demos and
tests, taught by flite's free voices. It has not the quality of CosyVoice2.

The recipe, as stages; each learns from what the ones before it left in the working folder:

    corpus        English sentences, from texts in Debian's packages and a small grammar; kept if it is there
    speech        spoken by flite in four voices, on all cores; with the times of its phones
    tokenizer     S3 tokenizer: phones and mel from codes of 25 Hz, of perturbed recordings
    speaker       x-vectors: voices at several speeds told apart
    more_speech   as many sentences again as there is time for, for the LLM alone
    vocoder       HiFT, of both stacks: spectra, then discriminators
    flow_dit      Step-Audio2's flow: conditional flow matching, in chunks as its streams have them
    flow_unet     CosyVoice2's flow: the same, in its own chunks
    llm           Qwen2: text, alone or with a prompt, to speech tokens
    export        the checkpoint

Each is a process of its own with a log in the working folder, started once what it needs is there: the last four
networks are trained at the same time on one GPU. Training ends by the clock, within --minutes in all. Run again, a
stage that is done is passed over and one that was interrupted goes on; --stages runs a stage in any case.

Text comes from Debian's packages (see voice_training/corpus.py) under /, or under --texts. flite is Debian's libflite1,
installed or unpacked (`dpkg -x`) under --flite. On a machine without a network both are brought there as files, the
texts as `sentences.txt` in the working folder. One H200 and 16 cores take 20 minutes in all.
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

from tools.voice_evaluation import HELD_OUT
from tools.voice_training.training import Recorded

WHOLE = 19 * 60.0  # what the seconds below are of
SECONDS = {
    "speech": 80.0,
    "tokenizer": 75.0,
    "speaker": 25.0,
    "more_speech": 220.0,
    # The vocoder has all the time that is left, and in the end the GPU for itself: it decides more than the others how
    # well the voice is understood.
    "flow_dit": 450.0,
    "flow_unet": 450.0,
    "llm": 500.0,
}
EXPORT_SECONDS = 30.0  # and for starting processes
POLL_SECONDS = 0.5
NETWORKS = ("vocoder", "flow_dit", "flow_unet", "llm")  # which share the GPU

log = logging.getLogger("train_demo_voice")


@dataclass(frozen=True)
class Job:
    """What stages are told."""

    work: Path
    flite: Path
    texts: Path
    device: str

    def run(self, stage: str, seconds: float) -> None:
        """One stage, to its end."""
        begun = time.monotonic()
        _STAGES[stage](self, seconds)
        log.info("%s: done in %.0f s", stage, time.monotonic() - begun)
        self._mark(stage).parent.mkdir(exist_ok=True)
        self._mark(stage).touch()

    def is_done(self, stage: str) -> bool:
        return self._mark(stage).exists()

    def _mark(self, stage: str) -> Path:
        return self.work / "done" / stage


# --- stages: what they need is imported when they run, since hardly any machine has it all ------------------------


def _corpus(job: Job, seconds: float) -> None:
    from tools.voice_training.corpus import make_corpus

    held_out = HELD_OUT.read_text(encoding="utf-8").splitlines() if HELD_OUT.is_file() else []
    make_corpus(job.work, set(held_out), job.texts)


def _speech(job: Job, seconds: float) -> None:
    from tools.voice_training.speech import speak

    speak(job.work, seconds, job.flite)


def _more_speech(job: Job, seconds: float) -> None:
    from tools.voice_training.speech import speak_more

    speak_more(job.work, seconds, job.flite)


def _network(name: str) -> Callable[[Job, float], None]:
    return lambda job, seconds: import_module(f"tools.voice_training.{name}").train(job.work, seconds, job.device)


def _export(job: Job, seconds: float) -> None:
    from tools.voice_training.export import export

    export(job.work, job.work / "checkpoint")


_STAGES: dict[str, Callable[[Job, float], None]] = {
    "corpus": _corpus,
    "speech": _speech,
    "more_speech": _more_speech,
    **{name: _network(name) for name in ("tokenizer", "speaker", *NETWORKS)},
    "export": _export,
}


# --- all of them -------------------------------------------------------------------------------------------------


@dataclass
class Processes:
    """Stages as processes of their own, each with a log. Leaving by an error ends those that run."""

    job: Job
    running: dict[str, subprocess.Popen] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.terminate()
            process.wait()

    def start(self, stage: str, seconds: float) -> None:
        """Unless it is done."""
        if self.job.is_done(stage):
            return
        self.seconds[stage] = seconds
        self._launch(stage)

    def wait(self, *stages: str) -> None:
        """Until they have ended. RuntimeError where one failed, also when started once more.

        A GPU that fails to record or to replay a step leaves a process in no state to go on. The second one takes its
        steps one by one, from what the first one saved, and ends later by what the first one had not.
        """
        waiting = [stage for stage in stages if stage in self.running]
        while True:
            for stage, process in list(self.running.items()):  # those too that are not waited for
                if process.poll() and stage not in self.again:
                    log.warning("%s: failed, goes on without recorded steps; see %s", stage, self._log(stage))
                    self.again.add(stage)
                    self._launch(stage, "--eager")
            if all(self.running[stage].poll() is not None for stage in waiting):
                break
            time.sleep(POLL_SECONDS)
        failed = [stage for stage in waiting if self.running.pop(stage).returncode]
        if failed:
            raise RuntimeError(f"{', '.join(failed)} failed: see {self.job.work}/*.log")

    def _launch(self, stage: str, *options: str) -> None:
        job, seconds = self.job, self.seconds[stage]
        command = [sys.executable, "-m", "tools.voice_training", "--stages", stage, "--seconds", f"{seconds:.0f}"]
        command += ["--work", str(job.work), "--flite", str(job.flite), "--texts", str(job.texts), *options]
        log.info("%s: %.0f s, log in %s", stage, seconds, self._log(stage))
        with self._log(stage).open("ab") as output:
            self.running[stage] = subprocess.Popen(
                [*command, "--device", job.device], stdout=output, stderr=subprocess.STDOUT
            )

    def _log(self, stage: str) -> Path:
        return self.job.work / f"{stage}.log"


def train_all(job: Job, seconds: float) -> None:
    """Every stage that is not done, within `seconds`. RuntimeError where one failed."""
    deadline = time.monotonic() + seconds - EXPORT_SECONDS
    share = min(1.0, seconds / WHOLE)

    def left(stage: str | None = None) -> float:
        """For a stage that starts now."""
        until_end = max(1.0, deadline - time.monotonic())
        return min(until_end, SECONDS[stage] * share) if stage else until_end

    job.work.mkdir(parents=True, exist_ok=True)
    with Processes(job) as processes:
        if not (job.work / "sentences.txt").is_file():
            job.run("corpus", 0)
        processes.start("speech", left("speech"))
        processes.wait("speech")
        processes.start("vocoder", left())  # which needs nothing else
        for stage in ("more_speech", "tokenizer", "speaker"):
            processes.start(stage, left(stage))
        processes.wait("tokenizer", "speaker")
        for stage in ("flow_dit", "flow_unet"):
            processes.start(stage, left(stage))
        processes.wait("more_speech")
        processes.start("llm", left("llm"))
        try:
            processes.wait(*NETWORKS)
        finally:  # what is trained is worth having
            job.run("export", 0)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 8))  # several stages share the cores
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    job = Job(args.work, args.flite, args.texts, args.device)
    Recorded.enabled = not args.eager
    try:
        if args.stages:
            for stage in args.stages:
                job.run(stage, args.seconds)
        else:
            train_all(job, 60 * args.minutes)
    except (ValueError, RuntimeError, OSError) as error:
        log.error("train_demo_voice: %s", error)
        return 1
    except KeyboardInterrupt:
        log.error("train_demo_voice: interrupted; the same command goes on from what was saved")
        return 130
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--work", type=Path, default=Path("out/voice"))
    parser.add_argument("--minutes", type=float, default=WHOLE / 60, help="for all stages together (default 19)")
    parser.add_argument("--stages", nargs="+", choices=list(_STAGES), help="these alone, one after another")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each of --stages")
    parser.add_argument("--flite", type=Path, default=Path("/usr/lib"), help="folder under which libflite1 is")
    parser.add_argument("--texts", type=Path, default=Path("/"), help="root of the Debian packages with the texts")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
