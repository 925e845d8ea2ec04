"""Run trtllm-serve over an engine directory, with what its version needs for one.

    python -m cosyvoice_triton.prepare.trtllm_serve models/official/trt_engines_bfloat16 --tokenizer
    models/official/cosyvoice2_llm

Options after the directory are those of trtllm-serve. Exit code 1 with one line if this TensorRT-LLM serves no engines.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from cosyvoice_triton.prepare.engine import EngineError, backend_options


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", help="directory that trtllm-build wrote")
    args, options = parser.parse_known_args(argv)
    command = ["trtllm-serve", args.engine]
    try:
        command += backend_options()
        os.execvp(command[0], [*command, *options])
    except FileNotFoundError:
        print(
            "trtllm-serve is not installed: run this in the image of Dockerfile.server's target trtllm", file=sys.stderr
        )
    except EngineError as error:
        print(f"trtllm_serve: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
