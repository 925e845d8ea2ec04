"""Streaming and offline client over gRPC: one request, one wav file, latencies on the screen.

    python scripts/client_grpc.py --target-text "Hello." --reference-audio voice.wav --reference-text "What it says."

`--mode streaming` needs a model served for streaming (`make serve`), `--mode offline` one that is served for offline
requests (`make serve MODE=offline`).
"""

import argparse
import asyncio
import sys

from common import client as speech
from common.grpc_client import synthesize


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    server = f"{args.server_addr}:{args.server_port}"
    try:
        request = speech.Utterance.from_arguments(args)
        answer = asyncio.run(synthesize(server, args.model_name, request, args.mode, args.timeout))
        answer.save(args.output_audio)
    except speech.ClientError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; the request was cancelled", file=sys.stderr)
        return 130
    print(answer.summary())
    print(f"written to         {args.output_audio}")
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--server-addr", default="localhost")
    parser.add_argument("--server-port", type=int, default=8001)
    parser.add_argument("--mode", choices=("streaming", "offline"), default="streaming")
    speech.add_request_arguments(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
