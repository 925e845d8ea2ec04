"""Run the whole system once: demo checkpoint, rendered repository, tritonserver, one streaming request, one wav file.

    cosyvoice-triton demo
    cosyvoice-triton demo --stack unet --text "Hello." --speaker slt --output hello.wav

Writes models/demo, build/STACK and out/demo.wav in the current directory. The checkpoint is a small trained voice, see
demo_voice/README.md; everything else also serves the official weights.
"""

import argparse
import asyncio
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cosyvoice_triton import stacks
from cosyvoice_triton.cli.arguments import program
from cosyvoice_triton.cli.say import PLAYERS
from cosyvoice_triton.client.grpc_client import synthesize
from cosyvoice_triton.client.requests import SpeechResult, Utterance
from cosyvoice_triton.prepare import steps
from cosyvoice_triton.server.rendering import StackOptions, render
from cosyvoice_triton.server.tritonserver import Ports, TritonServer

TEXT = "Good morning. You are listening to Cosy Voice, which runs on your own computer."
SEED = 2  # of the sampling, so that the demo is the same everywhere
STEPS = 4


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        speech = run(args.stack, args.text, args.speaker, Ports(args.http_port, args.grpc_port, args.metrics_port))
        speech.save(args.output)
    except (ValueError, RuntimeError, OSError) as error:  # ClientError and ServerError are RuntimeErrors
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; everything was shut down", file=sys.stderr)
        return 130
    print(speech.summary())
    stack = "" if args.stack == stacks.DEFAULT.name else f" --stack {args.stack}"
    print(f"written to         {args.output}")
    if player := next((each for each, *_ in PLAYERS if shutil.which(each)), None):
        print(f"play it            {player} {args.output}")
    print(f"keep it serving    {program()} serve{stack} --speech-port 10086")
    print(f"then               http://localhost:10086/ in a browser, or: {program()} say 'Hello.'")
    print("A small synthetic voice for demos; README.md describes how to serve the official weights.")
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name, help=stacks.summaries())
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--speaker", default=steps.DEMO_SETTINGS["default_speaker"], help="rms (default) or slt")
    parser.add_argument("--output", type=Path, default=Path("out/demo.wav"))
    parser.add_argument("--http-port", type=int, default=Ports.http)
    parser.add_argument("--grpc-port", type=int, default=Ports.grpc)
    parser.add_argument("--metrics-port", type=int, default=Ports.metrics)
    return parser.parse_args(argv)


def run(stack: str, text: str, speaker: str, ports: Ports) -> SpeechResult:
    """Make what is not there yet, serve it, ask once, shut down. Raises ValueError, RuntimeError or OSError."""
    with step(1, f"demo checkpoint, a small trained voice: {steps.DEMO}"):
        steps.demo(steps.DEMO, stack)
    repository = Path("build", stack)
    options = StackOptions(models_dir=steps.DEMO, stack=stack, device="cpu", settings=steps.DEMO_SETTINGS)
    with step(2, f"model repository of the {stack} stack: {repository}"):
        render(options, repository)
    with ExitStack() as running:
        with step(3, "tritonserver: starting and loading the models"):
            server = running.enter_context(TritonServer(repository.resolve(), ports=ports))
        utterance = Utterance(text, speaker=speaker, parameters={"seed": SEED})
        with step(4, f"one streaming request in the voice {speaker}: {text}"):
            return asyncio.run(synthesize(server.grpc_url, options.orchestrator, utterance))


@contextmanager
def step(number: int, what: str) -> Iterator[None]:
    """Print a step as it begins, and its seconds at the end of the same line."""
    print(f"[{number}/{STEPS}] {what}", end="", flush=True)
    begun = time.monotonic()
    try:
        yield
    finally:
        print(f" ({time.monotonic() - begun:.1f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
