"""Generate one prompt, or many concurrently, with any engine of the LLM, and print the speed.

    cosyvoice-triton bench llm --engine cuda --model-dir models/official/cosyvoice2_llm

prints the time to token 18 and tokens/s of 1, 16, 64 and 256 streams, which begin together, after a warm-up.
"""

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import get_args

from cosyvoice_triton.arguments import command_parser
from cosyvoice_triton.config import InstanceKind, LLMEngine, OrchestratorConfig, TensorrtLLMConfig
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.engines.interface import EngineLM, warm_up
from cosyvoice_triton.llm.engines.loading import load_engine
from cosyvoice_triton.llm.interface import FinishReason, LengthRatios, LLMPrompt, Sampling, SpeechLM, Timeouts
from cosyvoice_triton.llm.openai_client import OpenAILM
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer, speech_token_text

FIRST_AUDIO = OrchestratorConfig.first_hop_tokens + LOOKAHEAD_TOKENS  # tokens needed for the first chunk of audio
SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "ras_window", "ras_tau")
FULL_SIZE = "in a clone `python -m tests.random_weights DEST --weights random-full` makes some of full size"
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


async def generate_and_print(args: argparse.Namespace, tokenizer: LLMTokenizer, llm: SpeechLM) -> None:
    prompts = [padded(LLMPrompt(text), args.prompt_ids, tokenizer) for text in args.input_text]
    sampling = Sampling(
        **{name: getattr(args, name) for name in SAMPLING_OPTIONS},
        seed=args.seed,
        min_tokens=args.max_tokens if args.exact_length else 0,
    )
    for streams in args.streams or [len(prompts)]:
        answers = await generate_all(llm, list(islice(cycle(prompts), streams)), sampling)
    if not args.streams:
        for answer in answers:
            print(speech_token_text(answer.tokens))
            print(f"{len(answer.tokens)} tokens, finish reason {answer.reason}")


def padded(prompt: LLMPrompt, ids: int, tokenizer: LLMTokenizer) -> LLMPrompt:
    """Return the prompt, with speech tokens of a recording so that it has at least `ids` ids."""
    missing = ids - len(tokenizer.encode_prompt(prompt))
    return LLMPrompt(prompt.target_text, "", [token % 100 for token in range(missing)]) if missing > 0 else prompt


def speech_lm(args: argparse.Namespace, tokenizer: LLMTokenizer) -> SpeechLM:
    """Return the server or engine that the options select. Raises ValueError."""
    if args.urls:
        return OpenAILM(args.urls, args.llm_model, tokenizer, Timeouts(first_token=60), NO_RATIOS, args.llm_dialect)
    share = args.kv_cache_free_gpu_memory_fraction
    streams = max(args.streams or [len(args.input_text)])
    engine = load_engine(args.engine, args.engine_dir, tokenizer, streams, free_share=share)
    return EngineLM(engine, tokenizer, NO_RATIOS)


async def run(args: argparse.Namespace, tokenizer: LLMTokenizer) -> None:
    llm = speech_lm(args, tokenizer)
    try:
        await generate_and_print(args, tokenizer, llm)
    finally:
        await llm.aclose()


async def measure(args: argparse.Namespace) -> None:
    tokenizer, model_dir = LLMTokenizer.from_dir(args.model_dir), args.model_dir
    requests = max(args.streams)
    engine = load_engine(args.engine, model_dir, tokenizer, requests, args.memory_gib, instance_kind=args.instance_kind)
    llm = EngineLM(engine, tokenizer, NO_RATIOS)
    try:
        await warm_up(engine, tokenizer, requests)
        gc.collect()
        gc.freeze()  # as a server does when it is ready
        for streams in args.streams:
            sampling = Sampling(max_tokens=args.tokens, min_tokens=args.tokens)
            for _ in range(args.repeats):
                await generate_all(llm, [LLMPrompt("Hello.", "", range(args.prompt_ids))] * streams, sampling)
    finally:
        await llm.aclose()


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--engine", choices=get_args(LLMEngine), default="cuda")
    parser.add_argument("--model-dir", type=Path, required=True, help=f"what the engine loads; {FULL_SIZE}")
    parser.add_argument("--instance-kind", choices=get_args(InstanceKind), default=TensorrtLLMConfig.instance_kind)
    parser.add_argument("--memory-gib", type=float, help="as llm_memory_gib")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--prompt-ids", type=int, default=175, help="speech tokens in the prompt")
    parser.add_argument("--tokens", type=int, default=212, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="lines for each number of streams")
    args = parser.parse_args(argv)
    asyncio.run(measure(args))
    return 0
