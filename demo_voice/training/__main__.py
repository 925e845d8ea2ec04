"""Train the demo voice from scratch: text, speech by Kokoro, every network of the stacks, and its checkpoint.

    python -m demo_voice.training --stages corpus phonemes teacher --packages DIR    needs a network
    python -m demo_voice.training [--work out/voice] [--minutes 27]                 all other stages
    python -m demo_voice.training --stages tokenizer --seconds 100                   one

The result, `checkpoint/` in the working folder, has the official layout: small networks for demos and tests,
trained on voices of Kokoro-82M. Its quality is far below CosyVoice2's.

The stages; each uses what earlier stages left in the working folder:

    corpus        English sentences, from texts in Debian packages and a small grammar; kept if it exists
    phonemes      the same sentences as the teacher's phonemes; kept if they exist
    teacher       the teacher's weights and classes, from packages into --teacher; kept if they exist
    speech        the sentences spoken by the teacher in many voices, with phone times
    tokenizer     S3 tokenizer: phones and mel predicted from codes at 25 Hz, of perturbed recordings
    speaker       x-vectors: classification of voices at several speeds
    more_speech   more sentences for the LLM alone, as many as fit into the time
    flow_dit      Step-Audio2's flow: conditional flow matching, in the chunks of its streams
    flow_unet     CosyVoice2's flow: the same, in its own chunks
    flow_cosyvoice3
                  CosyVoice3's flow: the same, in the chunks of CosyVoice2's
    llm           Qwen2: text, alone or with a prompt, to speech tokens
    export        the checkpoint

Each stage is a process with a log in the working folder, started as soon as its inputs exist; flows and LLM are trained
at the same time, the LLM on a second GPU if there is one. Training stops after --minutes in all. The vocoders are
those of the package's checkpoint: the code that trained them, in ten and thirteen minutes alone on a GPU, is in this
folder as of commit 1039913c. When the command is run again, finished stages are skipped; --stages runs the named stages
in any case. A stage that is run again goes on with the weights of its file, which is written every minute.

Text comes from Debian packages (see corpus.py) under /, or under --texts; phonemes.py and kokoro_weights.py name the
packages for the next two stages. For a machine without a network, copy there `sentences.txt` and `phonemes.txt` of the
working folder, and the folder --teacher. The times are meant for one H200 and 16 cores.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

import torch

# Everyday sentences that `cosyvoice-triton evaluate` hears, and which are not trained on.
_ASSETS = Path(__file__).resolve().parents[2] / "tests" / "assets"
HELD_OUT = (_ASSETS / "everyday_sentences.jsonl", _ASSETS / "held_sentences.jsonl")

MINUTES = 27.0  # that the seconds below are for
# The LLM and the flow of `dit`, the slowest and the one whose streams have the most wrong words, get all the rest.
SECONDS = {
    "speech": 75.0, "tokenizer": 200.0, "speaker": 60.0, "more_speech": 200.0,
    "flow_unet": 450.0, "flow_cosyvoice3": 450.0,
}  # fmt: skip
EXPORT_SECONDS = 30.0  # including process start
SECOND_GPU = ("tokenizer", "llm")  # if there is one: what the others wait for, and what has most to learn
FLOWS = ("flow_dit", "flow_unet", "flow_cosyvoice3")
# What a machine without a network needs as files: each stage with what it writes.
PREPARATION = {"corpus": "sentences.txt", "phonemes": "phonemes.txt", "teacher": "voices.npz"}
STAGES = (*PREPARATION, "speech", "tokenizer", "speaker", "more_speech", *FLOWS, "llm", "export")

log = logging.getLogger("demo_voice.training")


def run(stage: str, args: argparse.Namespace, seconds: float) -> None:
    """Run one stage in this process and mark it as done. Imports are here, since few machines have all that the stages
    need."""
    begun = time.monotonic()
    work, speech = args.work, (args.work, seconds, args.teacher, args.device)
    others = {
        "corpus": ("corpus:make_corpus", (work, HELD_OUT, args.texts)),
        "phonemes": ("phonemes:make_phonemes", (work,)),
        "teacher": ("kokoro_weights:pack", (args.packages, args.teacher)),
        "speech": ("speech:synthesize", speech),
        "more_speech": ("speech:synthesize_more", speech),
        "export": ("export:export", (work, work / "checkpoint")),
    }
    function, given = others.get(stage, (f"{stage}:train", (work, seconds, args.device)))
    resolve_name(f"demo_voice.training.{function}")(*given)
    log.info("%s: done in %.0f s", stage, time.monotonic() - begun)
    (work / "done").mkdir(exist_ok=True)
    (work / "done" / stage).touch()


def prepare(args: argparse.Namespace) -> None:
    """Run the stages whose files are missing."""
    for stage, name in PREPARATION.items():
        if not ((args.teacher if stage == "teacher" else args.work) / name).is_file():
            run(stage, args, 0)


def train_all(args: argparse.Namespace) -> None:
    """Run every stage that is not done, each but the first and the last in a process of its own with a log, within
    `args.minutes`. RuntimeError if one failed; whatever ends this, no process is left."""
    deadline = time.monotonic() + 60 * args.minutes - EXPORT_SECONDS
    running: dict[str, subprocess.Popen] = {}

    def start(*stages: str) -> None:
        for stage in stages:
            if (args.work / "done" / stage).exists():
                continue
            left = max(1.0, deadline - time.monotonic())
            seconds = min(left, SECONDS[stage] * min(1.0, args.minutes / MINUTES)) if stage in SECONDS else left
            command = [sys.executable, "-m", "demo_voice.training", "--stages", stage, "--seconds", f"{seconds:.0f}"]
            for name in ("work", "teacher", "device"):
                command += [f"--{name}", str(getattr(args, name))]
            log.info("%s: %.0f s, log in %s", stage, seconds, args.work / f"{stage}.log")
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
            gpu = visible[int(stage in SECOND_GPU and torch.cuda.device_count() > 1)]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
            with (args.work / f"{stage}.log").open("ab") as output:
                running[stage] = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def wait(*stages: str) -> None:
        failed = [stage for stage in stages if stage in running and running[stage].wait()]
        for stage in stages:
            running.pop(stage, None)
        if failed:
            raise RuntimeError(f"{', '.join(failed)} failed: see {args.work}/*.log")

    args.work.mkdir(parents=True, exist_ok=True)
    try:
        prepare(args)
        start("speech")
        wait("speech")
        start("more_speech", "tokenizer", "speaker")
        wait("tokenizer", "speaker")
        start(*FLOWS)
        wait("more_speech")
        start("llm")
        try:
            wait(*FLOWS, "llm")
        finally:  # export what was trained, also after a failure
            run("export", args, 0)
    finally:
        for process in running.values():
            process.terminate()
            process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 8))  # several stages share the cores
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for stage in args.stages or ():
            run(stage, args, args.seconds)
        if not args.stages:
            train_all(args)
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
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all stages together (default: %(default)s)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, help="run these only, one after another")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training for each of --stages")
    parser.add_argument("--teacher", type=Path, default=Path("out/teacher"), help="folder of the teacher's files")
    parser.add_argument("--packages", type=Path, default=Path("out/packages"), help="the teacher's wheels, unpacked")
    parser.add_argument("--texts", type=Path, default=Path("/"), help="root of the Debian packages with the texts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
