"""Run one prompt through any engine of the LLM: prints tokens, speed and finish reason. Not collected by pytest.

    cosyvoice-triton test-llm --tokenizer_dir models/demo/cosyvoice2_llm --engine_dir models/demo/cosyvoice2_llm_genai
    cosyvoice-triton test-llm --tokenizer_dir models/demo/cosyvoice2_llm --urls http://localhost:8000/v1
    cosyvoice-triton test-llm ... --prompt_ids 180 --max_tokens 220 --exact_length --streams 1 4     figures only

Tokens are speech ids, 0..6560. A stream's speed is measured from its first token, the total from the first request.
"""

import argparse
import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from cosyvoice_triton import stacks
from cosyvoice_triton.arguments import command_parser, fraction, reporting_errors
from cosyvoice_triton.bench.llm import SAMPLING_OPTIONS, run
from cosyvoice_triton.config import LLMEngine, TensorrtLLMConfig
from cosyvoice_triton.llm.interface import Sampling
from cosyvoice_triton.llm.openai_dialects import DIALECTS
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer

# TensorRT-LLM's names of the levels of a log, as in upstream's commands.
LOG_LEVELS = {
    "internal_error": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
    "debug": logging.DEBUG,
}


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(__doc__)
    text = "Hello. This sentence is here to be spoken."
    parser.add_argument("--input_text", nargs="+", default=[text], help="texts to synthesize, all at once")
    parser.add_argument("--tokenizer_dir", type=Path, required=True, help="HuggingFace directory of the LLM")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--engine_dir", type=Path, help="directory that the engine loads")
    where.add_argument("--urls", nargs="+", help="OpenAI-compatible servers instead of an engine in this process")
    parser.add_argument("--engine", choices=get_args(LLMEngine), default="auto")
    parser.add_argument("--llm_model", default=stacks.DEFAULT.llm.directory, help="name of the LLM at its server")
    parser.add_argument("--llm_dialect", choices=("auto", *DIALECTS), default="auto")
    parser.add_argument(
        "--kv_cache_free_gpu_memory_fraction",
        type=fraction,
        default=TensorrtLLMConfig.gpu_share,
        help="of the free GPU memory, for keys and values (tensorrt_llm; default: %(default)s)",
    )
    parser.add_argument("--log_level", choices=tuple(LOG_LEVELS), default="warning")
    for name in SAMPLING_OPTIONS:
        default = getattr(Sampling, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--prompt_ids", type=int, default=0, help="pad the prompt with speech tokens to this many ids")
    parser.add_argument("--exact_length", action="store_true", help="generate exactly max_tokens tokens")
    parser.add_argument("--streams", type=int, nargs="*", help="numbers of concurrent requests, one run each")
    return parser


@reporting_errors()
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=LOG_LEVELS[args.log_level], format="%(message)s")
    tokenizer = LLMTokenizer.from_dir(args.tokenizer_dir)
    asyncio.run(run(args, tokenizer))
    return 0
