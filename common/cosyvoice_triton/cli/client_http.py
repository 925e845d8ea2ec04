"""Offline client over HTTP: one request, one wav file.

    cosyvoice-triton client-http --target-text "Hello." --reference-audio voice.wav --reference-text "What it says."

The model must be served for offline requests (`cosyvoice-triton serve --offline`), since HTTP carries one response per
request.
"""

import argparse

from cosyvoice_triton.arguments import command_parser, reporting_errors
from cosyvoice_triton.client.arguments import add_request_arguments, utterance_of
from cosyvoice_triton.client.http_client import synthesize
from cosyvoice_triton.constants import HTTP_PORT


@reporting_errors("interrupted; the request was dropped")
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    request = utterance_of(args)
    answer = synthesize(args.server_url, args.model_name, request, args.timeout)
    answer.save(args.output_audio)
    print(answer.summary())
    print(f"written to         {args.output_audio}")
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("--server-url", default=f"http://localhost:{HTTP_PORT}", help="default: %(default)s")
    add_request_arguments(parser)
    return parser.parse_args(argv)
