"""Try a stack: checkpoint, rendered repository, tritonserver, one streaming request, one wav file.

    cosyvoice-triton demo
    cosyvoice-triton demo --stack unet --text "Hello." --speaker nezumi --output hello.wav
    cosyvoice-triton demo --models models/official --stack cosyvoice3 --set first_hop_tokens=10

Writes build/STACK and out/demo.wav in the current directory, and models/demo, a small trained voice (see
demo_voice/README.md), unless --models names other checkpoints. Without a --speaker those speak in the voice of a
recording that comes with the package.
"""

import argparse
import asyncio
import logging
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from cosyvoice_triton import samples, stacks
from cosyvoice_triton.arguments import command_parser, program, reporting_errors
from cosyvoice_triton.client.answer import SpeechResult
from cosyvoice_triton.client.grpc_client import synthesize
from cosyvoice_triton.client.utterance import Utterance, of_recording
from cosyvoice_triton.demo_checkpoint import DEMO, DEMO_SETTINGS
from cosyvoice_triton.load.samples import read_manifest
from cosyvoice_triton.prepare import steps
from cosyvoice_triton.server.options import Device, StackOptions, parse_settings, planned
from cosyvoice_triton.server.rendering import render
from cosyvoice_triton.server.tritonserver import Ports, TritonServer

TEXT = "Good morning. You are listening to Cosy Voice, which runs on your own computer."
SEED = 2  # of the sampling, so that the demo is the same everywhere
STEPS = 4
LOG = Path("build", "tritonserver.log")


@reporting_errors("interrupted; everything was shut down")
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    speech = run(args)
    speech.save(args.output)
    print(speech.summary())
    chosen = "" if args.stack == stacks.DEFAULT.name else f" --stack {args.stack}"
    models = "" if args.models == DEMO else f" --models {args.models}"
    print(f"written to         {args.output}")
    given = "".join(f" --set {shlex.quote(each)}" for each in args.settings)
    print(f"keep it serving    {program()} serve{models}{chosen}{given} --speech-port 10086")
    if args.models == DEMO:
        print(f"then               http://localhost:10086/ in a browser, or: {program()} say 'Hello.'")
        print("A demo voice, of small networks; README.md describes how to serve the official weights.")
    else:
        add = f"{program()} voice add {args.models} anna{chosen} --reference-audio anna.wav"
        print(f"add a voice        {add} --reference-text 'What she says.'")
        print("then               http://localhost:10086/ in a browser")
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name, help=stacks.summaries())
    parser.add_argument("--models", type=Path, default=DEMO, help="the checkpoints (default: %(default)s)")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="see `render`")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--speaker", help="a registered voice (default: kumo of the demo's voices)")
    parser.add_argument("--output", type=Path, default=Path("out/demo.wav"))
    parser.add_argument("--http-port", type=int, default=Ports.http)
    parser.add_argument("--grpc-port", type=int, default=Ports.grpc)
    parser.add_argument("--metrics-port", type=int, default=Ports.metrics)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> SpeechResult:
    """Make what is not there yet, serve it, ask once, shut down. Raises ValueError, RuntimeError or OSError."""
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.open("ab").close()  # what cannot be written is said before minutes of loading
    stack, text, demo = args.stack, args.text, args.models == DEMO
    settings = parse_settings(args.settings)
    if demo:
        settings = {**DEMO_SETTINGS, **settings}
    device: Device = "cpu" if demo else "auto"
    options, _ = planned(StackOptions(models_dir=args.models, stack=stack, device=device, settings=settings))
    with step(1, f"demo checkpoint, a small trained voice: {args.models}" if demo else f"checkpoints: {args.models}"):
        if demo:
            steps.demo(args.models, stack)
        options.require_files()
    repository = Path("build", stack)
    with step(2, f"model repository of the {stack} stack: {repository}"):
        render(options, repository)
    ports = Ports(args.http_port, args.grpc_port, args.metrics_port)
    with ExitStack() as running:
        with step(3, f"tritonserver: starting and loading the models, log in {LOG}"):
            server = running.enter_context(TritonServer(repository.resolve(), ports=ports, log_file=LOG))
        utterance = Utterance(text, speaker=args.speaker, parameters={"seed": SEED})
        if not (demo or args.speaker):
            (sample,) = read_manifest(samples.MANIFEST, limit=1)
            utterance = replace(utterance, reference_text=sample.prompt_text, **of_recording(sample.prompt_audio))
        with step(4, f"one streaming request: {text}"):
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
