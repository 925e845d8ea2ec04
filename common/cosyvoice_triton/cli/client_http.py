"""Offline client over HTTP: one request, one wav file.

    cosyvoice-triton client-http --target-text "Hello." --reference-audio voice.wav --reference-text "What it says."

The model must be served for offline requests (`cosyvoice-triton serve --offline`), since HTTP carries one response per
request.
"""

import argparse
from http.client import HTTPException
from urllib.parse import urlsplit

import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from cosyvoice_triton.arguments import command_parser, reporting_errors
from cosyvoice_triton.client import failures
from cosyvoice_triton.client.answer import AudioPart, Recorder, SpeechResult
from cosyvoice_triton.client.arguments import add_request_arguments, utterance_of
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import HTTP_PORT


def synthesize(server_url: str, model: str, request: Utterance, timeout: float) -> SpeechResult:
    """Return one complete waveform. Raise ClientError for any failure."""
    address = urlsplit(server_url if "://" in server_url else f"http://{server_url}")
    if address.scheme not in ("http", "https") or not address.hostname:
        raise failures.ClientError(f"--server-url is '{server_url}'; it must look like http://localhost:{HTTP_PORT}")
    location = address.netloc + address.path.rstrip("/")
    try:
        with triton.InferenceServerClient(
            location, ssl=address.scheme == "https", connection_timeout=min(timeout, 10.0), network_timeout=timeout
        ) as connection:
            if not connection.is_model_ready(model):
                raise failures.not_served(server_url, model)
            if connection.get_model_config(model).get("model_transaction_policy", {}).get("decoupled", False):
                raise failures.streams_only(model)
            inputs = request.tensors(triton.InferInput)
            recorder = Recorder()
            result = connection.infer(model, inputs, parameters=request.parameters or None)
            recorder.add(AudioPart.of(result))
            return recorder.finish()
    except InferenceServerException as error:
        raise failures.refused(error.message()) from None
    except TimeoutError:
        raise failures.timed_out(server_url, timeout) from None
    except (OSError, ValueError, HTTPException) as error:  # the two last: the response is not one of Triton's
        raise failures.unreachable(server_url, error) from None


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
