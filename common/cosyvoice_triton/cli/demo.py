"""Run the whole system once: demo checkpoint, rendered repository, tritonserver, one streaming request, one wav file.

    cosyvoice-triton demo [--stack NAME] [--text TEXT] [--speaker NAME] [--output out/demo.wav]

The checkpoint is a small trained voice, see demo_voice/README.md; everything else also serves the official weights.
"""

import argparse
import logging
import sys
from pathlib import Path

import torch

from cosyvoice_triton import stacks
from cosyvoice_triton.cli import demo_run as demo
from cosyvoice_triton.server.tritonserver import Ports


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)
    try:
        speech = demo.run(args.stack, args.text, args.speaker, Ports(args.http_port, args.grpc_port, args.metrics_port))
        speech.save(args.output)
    except (ValueError, RuntimeError, OSError) as error:  # ClientError and ServerError are RuntimeErrors
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; everything was shut down", file=sys.stderr)
        return 130
    print(speech.summary())
    print(f"written to         {args.output}")
    print("A small synthetic voice for demos; README.md describes how to serve the official weights.")
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--stack", choices=stacks.names(), default=stacks.DEFAULT.name, help=stacks.summaries())
    parser.add_argument("--text", default=demo.TEXT)
    parser.add_argument("--speaker", default=demo.SPEAKER, help="a voice in the checkpoint's folder voices (rms)")
    parser.add_argument("--output", type=Path, default=Path("out/demo.wav"))
    parser.add_argument("--http-port", type=int, default=Ports.http)
    parser.add_argument("--grpc-port", type=int, default=Ports.grpc)
    parser.add_argument("--metrics-port", type=int, default=Ports.metrics)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
