"""Generate one prompt, or many concurrently, with any engine or server of the LLM: tokens, speed, finish reason."""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.config import OrchestratorConfig
from common.constants import LOOKAHEAD_TOKENS
from common.errors import UnavailableError
from common.llm.engines.interface import EngineLM
from common.llm.engines.loading import load_engine
from common.llm.interface import FinishReason, LengthRatios, LLMPrompt, Sampling, SpeechLM, Timeouts
from common.llm.openai_client import OpenAILM
from common.llm.speech_tokens import LLMTokenizer, speech_token_text

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
        """Tokens per second after the first."""
        seconds = self.arrivals[-1] - self.arrivals[0]
        return (len(self.tokens) - 1) / seconds if seconds else float("inf")


async def generate(llm: SpeechLM, prompt: LLMPrompt, sampling: Sampling) -> TimedTokens:
    answer, begun = TimedTokens(), time.perf_counter()
    stream = llm.generate(prompt, sampling)
    try:
        async for tokens in stream:
            answer.arrivals += [time.perf_counter() - begun] * len(tokens)
            answer.tokens += tokens
    finally:
        await stream.aclose()
    answer.reason = stream.finish_reason
    return answer


async def generate_all(llm: SpeechLM, prompt: LLMPrompt, samplings: Sequence[Sampling]) -> list[TimedTokens]:
    """The answers to concurrent requests, one per sampling; prints a line of figures."""
    begun = time.perf_counter()
    answers = await asyncio.gather(*(generate(llm, prompt, sampling) for sampling in samplings))
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
    prompt = LLMPrompt(args.input_text)
    missing = args.prompt_ids - len(tokenizer.encode_prompt(prompt))
    if missing > 0:
        prompt = LLMPrompt(args.input_text, "", [token % 100 for token in range(missing)])
    sampling = Sampling(
        **{name: getattr(args, name) for name in SAMPLING_OPTIONS},
        seed=args.seed,
        min_tokens=args.max_tokens if args.exact_length else 0,
    )
    for streams in args.streams or [1]:
        answers = await generate_all(llm, prompt, [sampling] * streams)
    if not args.streams:
        print(speech_token_text(answers[0].tokens))
        print(f"{len(answers[0].tokens)} tokens, finish reason {answers[0].reason}")


def speech_lm(args: argparse.Namespace, tokenizer: LLMTokenizer) -> SpeechLM:
    """The server or engine that the options select. Raises ValueError."""
    if args.urls:
        return OpenAILM(args.urls, args.llm_model, tokenizer, Timeouts(first_token=60), NO_RATIOS, args.llm_dialect)
    engine = load_engine(args.engine, args.engine_dir, tokenizer, max(args.streams or [1]))
    return EngineLM(engine, tokenizer, NO_RATIOS)


async def run(args: argparse.Namespace, tokenizer: LLMTokenizer) -> None:
    llm = speech_lm(args, tokenizer)
    try:
        await generate_and_print(args, tokenizer, llm)
    finally:
        await llm.aclose()
