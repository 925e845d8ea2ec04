"""Write requests of a manifest, a data set or the command line as an input file for Triton's perf_analyzer.

    python -m cosyvoice_triton.load.perf_analyzer --manifest-path texts.jsonl --output
    out/perf_analyzer.json
    perf_analyzer -m cosyvoice2_dit -i grpc --streaming --async -u localhost:8001 \\
        --input-data out/perf_analyzer.json --concurrency-range 1:4 --measurement-mode count_windows \\
        --measurement-request-count 20 --stability-percentage 50 --profile-export-file out/perf_analyzer_profile.json

The first response of each request in the profile is the first chunk. docs/clients.md explains how to install it.
"""

import argparse
import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from cosyvoice_triton.client.requests import ClientError, Utterance, add_voice_arguments
from cosyvoice_triton.load.jobs import Jobs, add_job_arguments
from cosyvoice_triton.load.samples import SampleError


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.seed is not None or args.sampling or args.parameter or args.cross_lingual:
            raise ClientError("perf_analyzer has its own option for request parameters: --request-parameter seed:7:int")
        jobs = Jobs.from_arguments(args)
        requests = [_request(job.utterance()) for job in jobs.take(args.num_requests or len(jobs))]
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({"data": requests}), encoding="utf-8")
    except (ClientError, SampleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot write {args.output}: {error}; choose another file with --output", file=sys.stderr)
        return 1
    print(f"{args.output}: {len(requests)} request(s)")
    return 0


def _request(utterance: Utterance) -> dict[str, Any]:
    """Returns the tensors of one request, without the batch dimension; perf_analyzer adds it."""
    return {name: _tensor(datatype, array[0]) for name, (datatype, array) in utterance.arrays().items()}


def _tensor(datatype: str, array: np.ndarray) -> dict[str, Any]:
    if datatype == "BYTES":
        return {"content": [text.decode() for text in array], "shape": list(array.shape)}
    return {"content": {"b64": base64.b64encode(array.tobytes()).decode()}, "shape": list(array.shape)}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_voice_arguments(parser)
    add_job_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("out/perf_analyzer.json"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
