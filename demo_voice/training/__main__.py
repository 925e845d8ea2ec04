"""Train the demo voice from scratch: text, speech by flite, every network of the stacks, and its checkpoint.

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
    vocoder       HiFT, for the stacks dit and unet: spectral losses, then discriminators
    vocoder_causal
                  CosyVoice3's: the same, of causal convolutions
    flow_dit      Step-Audio2's flow: conditional flow matching, in the chunks of its streams
    flow_unet     CosyVoice2's flow: the same, in its own chunks
    flow_cosyvoice3
                  CosyVoice3's flow: the same, in the chunks of CosyVoice2's
    llm           Qwen2: text, alone or with a prompt, to speech tokens
    export        the checkpoint

Each stage is a process with a log in the working folder, started as soon as its inputs exist; the last six networks
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
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch
from cosyvoice_triton.load.samples import read_manifest

# Everyday sentences that `cosyvoice-triton evaluate` hears, and which are not trained on.
HELD_OUT = Path(__file__).resolve().parents[2] / "tests" / "assets" / "everyday_sentences.jsonl"

MINUTES = 19.0  # that the seconds below are for
# The vocoders get all the remaining time, and at the end the GPU to themselves: they affect intelligibility most.
SECONDS = {
    "speech": 80.0, "tokenizer": 75.0, "speaker": 25.0, "more_speech": 220.0,
    "flow_dit": 450.0, "flow_unet": 450.0, "flow_cosyvoice3": 450.0, "llm": 500.0,
}  # fmt: skip
EXPORT_SECONDS = 30.0  # including process start
VOCODERS, FLOWS = ("vocoder", "vocoder_causal"), ("flow_dit", "flow_unet", "flow_cosyvoice3")
NETWORKS = (*VOCODERS, *FLOWS, "llm")  # trained at the same time, on one GPU
STAGES = ("corpus", "speech", "tokenizer", "speaker", "more_speech", *NETWORKS, "export")

log = logging.getLogger("demo_voice.training")


def run(stage: str, args: argparse.Namespace, seconds: float) -> None:
    """Run one stage in this process and mark it as done. Imports are here, since few machines have all that the stages
    need."""
    begun = time.monotonic()
    if stage == "corpus":
        from demo_voice.training.corpus import make_corpus

        make_corpus(args.work, {sample.target_text for sample in read_manifest(HELD_OUT)}, args.texts)
    elif stage in ("speech", "more_speech"):
        from demo_voice.training import speech

        synthesize = speech.synthesize if stage == "speech" else speech.synthesize_more
        synthesize(args.work, seconds, args.flite)
    elif stage == "export":
        from demo_voice.training.export import export

        export(args.work, args.work / "checkpoint")
    else:
        import_module(f"demo_voice.training.{stage}").train(args.work, seconds, args.device)
    log.info("%s: done in %.0f s", stage, time.monotonic() - begun)
    (args.work / "done").mkdir(exist_ok=True)
    (args.work / "done" / stage).touch()


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
            for name in ("work", "flite", "texts", "device"):
                command += [f"--{name}", str(getattr(args, name))]
            log.info("%s: %.0f s, log in %s", stage, seconds, args.work / f"{stage}.log")
            with (args.work / f"{stage}.log").open("ab") as output:
                running[stage] = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def wait(*stages: str) -> None:
        failed = [stage for stage in stages if stage in running and running[stage].wait()]
        for stage in stages:
            running.pop(stage, None)
        if failed:
            raise RuntimeError(f"{', '.join(failed)} failed: see {args.work}/*.log")

    args.work.mkdir(parents=True, exist_ok=True)
    try:
        if not (args.work / "sentences.txt").is_file():
            run("corpus", args, 0)
        start("speech")
        wait("speech")
        start(*VOCODERS, "more_speech", "tokenizer", "speaker")  # the vocoders need `speech` only
        wait("tokenizer", "speaker")
        start(*FLOWS)
        wait("more_speech")
        start("llm")
        try:
            wait(*NETWORKS)
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
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all stages together (default: 19)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, help="run these only, one after another")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training for each of --stages")
    parser.add_argument("--flite", type=Path, default=Path("/usr/lib"), help="folder that contains libflite1")
    parser.add_argument("--texts", type=Path, default=Path("/"), help="root of the Debian packages with the texts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
