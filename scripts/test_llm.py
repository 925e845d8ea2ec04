"""Run one prompt through any engine of the LLM: prints tokens, speed and finish reason. Not collected by pytest.

    python -m scripts.test_llm --tokenizer_dir models/demo/cosyvoice2_llm --engine_dir models/demo/cosyvoice2_llm_genai
    python -m scripts.test_llm --tokenizer_dir models/demo/cosyvoice2_llm --urls http://localhost:8000/v1
    python -m scripts.test_llm ... --prompt_ids 180 --max_tokens 220 --exact_length --streams 1 4     figures only

Tokens are speech ids, 0..6560. A stream's speed is measured from its first token, the total from the first request.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from common import stacks
from common.config import LLMEngine
from common.errors import UnavailableError
from common.llm.interface import Sampling
from common.llm.openai_dialects import DIALECTS
from common.llm.speech_tokens import LLMTokenizer
from tools.bench.llm import SAMPLING_OPTIONS, run


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input_text", default="Hello. This sentence is here to be spoken.", help="text to synthesize")
    parser.add_argument("--tokenizer_dir", type=Path, required=True, help="HuggingFace directory of the LLM")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--engine_dir", type=Path, help="directory that the engine loads")
    where.add_argument("--urls", nargs="+", help="OpenAI-compatible servers instead of an engine in this process")
    parser.add_argument("--engine", choices=get_args(LLMEngine), default="auto")
    parser.add_argument("--llm_model", default=stacks.DEFAULT.llm.directory, help="name of the LLM at its server")
    parser.add_argument("--llm_dialect", choices=("auto", *DIALECTS), default="auto")
    for name in SAMPLING_OPTIONS:
        default = getattr(Sampling, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--prompt_ids", type=int, default=0, help="pad the prompt with speech tokens to this many ids")
    parser.add_argument("--exact_length", action="store_true", help="generate exactly max_tokens tokens")
    parser.add_argument("--streams", type=int, nargs="*", help="numbers of concurrent requests, one run each")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        tokenizer = LLMTokenizer.from_dir(args.tokenizer_dir)
        asyncio.run(run(args, tokenizer))
    except (ValueError, UnavailableError, OSError) as error:
        print(f"test_llm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
