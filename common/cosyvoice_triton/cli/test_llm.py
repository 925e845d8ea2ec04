"""Run one prompt through any engine of the LLM: prints tokens, speed and finish reason. Not collected by pytest.

    cosyvoice-triton test-llm --tokenizer_dir models/demo/cosyvoice2_llm --engine_dir models/demo/cosyvoice2_llm_genai
    cosyvoice-triton test-llm --tokenizer_dir models/demo/cosyvoice2_llm --urls http://localhost:8000/v1
    cosyvoice-triton test-llm ... --prompt_ids 180 --max_tokens 220 --exact_length --streams 1 4     figures only

Tokens are speech ids, 0..6560. A stream's speed is measured from its first token, the total from the first request.
With --streams an engine is warmed up first.
"""

import argparse
import asyncio
import gc
import logging
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import get_args

from cosyvoice_triton import stacks
from cosyvoice_triton.arguments import command_parser, fraction, positive_int, reporting_errors
from cosyvoice_triton.config import LLMEngine, OrchestratorConfig, TensorrtLLMConfig
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.engines.interface import EngineLM, warm_up
from cosyvoice_triton.llm.engines.loading import engine_of
from cosyvoice_triton.llm.interface import FinishReason, LengthRatios, LLMPrompt, Sampling, SpeechLM, Timeouts
from cosyvoice_triton.llm.openai_client import DIALECTS, OpenAILM
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer, speech_token_text

# TensorRT-LLM's names of the levels of a log, as in upstream's commands.
LOG_LEVELS = {
    "internal_error": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
    "debug": logging.DEBUG,
}


FIRST_AUDIO = OrchestratorConfig.first_hop_tokens + LOOKAHEAD_TOKENS  # tokens needed for the first chunk of audio
SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "ras_window", "ras_tau")
NO_RATIOS = LengthRatios(min=0, max=1e6)


@dataclass
class TimedTokens:
    """Speech ids, and their arrival times in seconds after the request."""

    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    reason: FinishReason | None = None

    def rate(self) -> float:
        """Return the tokens per second after the first."""
        seconds = self.arrivals[-1] - self.arrivals[0]
        return (len(self.tokens) - 1) / seconds if seconds else float("inf")


async def generate(llm: SpeechLM, prompt: LLMPrompt, sampling: Sampling) -> TimedTokens:
    answer, begun = TimedTokens(), time.perf_counter()
    async with aclosing(llm.generate(prompt, sampling)) as chunks:
        async for chunk in chunks:
            answer.arrivals += [time.perf_counter() - begun] * len(chunk.tokens)
            answer.tokens += chunk.tokens
            answer.reason = chunk.finish_reason
    return answer


async def generate_all(llm: SpeechLM, prompts: Sequence[LLMPrompt], sampling: Sampling) -> list[TimedTokens]:
    """Return the answers to concurrent requests; prints a line of figures."""
    begun = time.perf_counter()
    answers = await asyncio.gather(*(generate(llm, prompt, sampling) for prompt in prompts))
    seconds = time.perf_counter() - begun
    answered = [answer for answer in answers if answer.tokens]
    if not answered:
        raise UnavailableError("the LLM returned no speech token")
    firsts = statistics.median(answer.arrivals[0] for answer in answered)
    chunks = statistics.median(answer.arrivals[min(FIRST_AUDIO, len(answer.tokens)) - 1] for answer in answered)
    print(
        f"{len(answers)} stream(s): first token {firsts * 1e3:.0f} ms, token {FIRST_AUDIO} {chunks * 1e3:.0f} ms, "
        f"{statistics.median(map(TimedTokens.rate, answered)):.1f} tokens/s each, "
        f"{sum(len(answer.tokens) for answer in answered) / seconds:.1f} in total",
        flush=True,
    )
    return answers


async def run(args: argparse.Namespace, tokenizer: LLMTokenizer) -> None:
    prompts = [padded(LLMPrompt(text), args.prompt_ids, tokenizer) for text in args.input_text]
    sampling = Sampling(
        **{name: getattr(args, name) for name in SAMPLING_OPTIONS},
        seed=args.seed,
        min_tokens=args.max_tokens if args.exact_length else 0,
    )
    async with aclosing(await speech_lm(args, tokenizer)) as llm:
        for streams in args.streams or [len(prompts)]:
            for _ in range(args.repeats):
                answers = await generate_all(llm, list(islice(cycle(prompts), streams)), sampling)
    if not args.streams:
        for answer in answers:
            print(speech_token_text(answer.tokens))
            print(f"{len(answer.tokens)} tokens, finish reason {answer.reason}")


def padded(prompt: LLMPrompt, ids: int, tokenizer: LLMTokenizer) -> LLMPrompt:
    """Return the prompt, with speech tokens of a recording so that it has at least `ids` ids."""
    missing = ids - len(tokenizer.encode_prompt(prompt))
    return LLMPrompt(prompt.target_text, "", [token % 100 for token in range(missing)]) if missing > 0 else prompt


async def speech_lm(args: argparse.Namespace, tokenizer: LLMTokenizer) -> SpeechLM:
    """Return the server or engine that the options select; an engine that is measured is warmed up. Raises
    ValueError."""
    if args.urls:
        return OpenAILM(args.urls, args.llm_model, tokenizer, Timeouts(first_token=60), NO_RATIOS, args.llm_dialect)
    share, directory = args.kv_cache_free_gpu_memory_fraction, str(args.engine_dir)
    streams = max(args.streams or [len(args.input_text)])
    config = TensorrtLLMConfig(engine_dir=directory, engine=args.engine, max_requests=streams, gpu_share=share)
    engine = engine_of(config, tokenizer)
    if args.streams:
        await warm_up(engine, tokenizer, streams)
        gc.collect()
        gc.freeze()  # as a server does when it is ready
    return EngineLM(engine, tokenizer, NO_RATIOS)


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
    parser.add_argument("--repeats", type=positive_int, default=1, help="runs of each number (1)")
    return parser


@reporting_errors()
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=LOG_LEVELS[args.log_level], format="%(message)s")
    tokenizer = LLMTokenizer.from_dir(args.tokenizer_dir)
    asyncio.run(run(args, tokenizer))
    return 0
