"""One prompt through any engine of the LLM: prints tokens, speed and why it ended. pytest does not collect this file.

    python -m scripts.test_llm --tokenizer_dir models/demo/cosyvoice2_llm --engine_dir models/demo/cosyvoice2_llm_genai
    python -m scripts.test_llm --tokenizer_dir models/demo/cosyvoice2_llm --urls http://localhost:8000/v1
    python -m scripts.test_llm ... --prompt_ids 180 --max_tokens 220 --exact_length --streams 1 4     figures only

The tokens are ids of speech, 0..6560. A stream's speed counts from its first token, the total from the first request.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from common.config import LLMEngine, OrchestratorConfig
from common.constants import LOOKAHEAD_TOKENS
from common.errors import UnavailableError
from common.llm.engines.interface import EngineLM
from common.llm.engines.loading import load_engine
from common.llm.interface import FinishReason, LengthRatios, LLMPrompt, Sampling, SpeechLM, Timeouts
from common.llm.openai_client import OpenAILM
from common.llm.openai_dialects import DIALECTS
from common.llm.speech_tokens import LLMTokenizer, speech_token_text

FIRST_AUDIO = OrchestratorConfig.first_hop_tokens + LOOKAHEAD_TOKENS  # tokens that the first chunk of audio waits for
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "ras_window", "ras_tau")
NO_RATIOS = LengthRatios(min=0, max=1e6)


@dataclass
class Answer:
    """Speech ids with the seconds after the request at which they arrived."""

    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    reason: FinishReason | None = None

    def rate(self) -> float:
        """Tokens per second after the first."""
        seconds = self.arrivals[-1] - self.arrivals[0]
        return (len(self.tokens) - 1) / seconds if seconds else float("inf")


async def ask(llm: SpeechLM, prompt: LLMPrompt, sampling: Sampling) -> Answer:
    answer, begun = Answer(), time.perf_counter()
    stream = llm.generate(prompt, sampling)
    try:
        async for tokens in stream:
            answer.arrivals += [time.perf_counter() - begun] * len(tokens)
            answer.tokens += tokens
    finally:
        await stream.aclose()
    answer.reason = stream.finish_reason
    return answer


async def ask_all(llm: SpeechLM, prompt: LLMPrompt, samplings: Sequence[Sampling]) -> list[Answer]:
    """The answers to so many requests at once, and a line of their figures."""
    begun = time.perf_counter()
    answers = await asyncio.gather(*(ask(llm, prompt, sampling) for sampling in samplings))
    seconds = time.perf_counter() - begun
    spoken = [answer for answer in answers if answer.tokens]
    if not spoken:
        raise UnavailableError("the LLM returned no speech token")
    firsts = statistics.median(answer.arrivals[0] for answer in spoken)
    chunks = statistics.median(answer.arrivals[min(FIRST_AUDIO, len(answer.tokens)) - 1] for answer in spoken)
    print(
        f"{len(answers)} stream(s): first token {firsts * 1e3:.0f} ms, token {FIRST_AUDIO} {chunks * 1e3:.0f} ms, "
        f"{statistics.median(map(Answer.rate, spoken)):.1f} tokens/s each, "
        f"{sum(len(answer.tokens) for answer in spoken) / seconds:.1f} in total",
        flush=True,
    )
    return answers


async def run(args: argparse.Namespace, tokenizer: LLMTokenizer, llm: SpeechLM) -> None:
    prompt = LLMPrompt(args.input_text)
    missing = args.prompt_ids - len(tokenizer.encode_prompt("", args.input_text, []))
    if missing > 0:
        prompt = LLMPrompt(args.input_text, "", [token % 100 for token in range(missing)])
    sampling = Sampling(
        **{name: getattr(args, name) for name in SAMPLING},
        seed=args.seed,
        min_tokens=args.max_tokens if args.exact_length else 0,
    )
    for streams in args.streams or [1]:
        answers = await ask_all(llm, prompt, [sampling] * streams)
    if not args.streams:
        print(speech_token_text(answers[0].tokens))
        print(f"{len(answers[0].tokens)} tokens, finish reason {answers[0].reason}")


def speech_lm(args: argparse.Namespace, tokenizer: LLMTokenizer) -> SpeechLM:
    """The server or the engine that the command line names. Raises ValueError."""
    if args.urls:
        return OpenAILM(args.urls, args.llm_model, tokenizer, Timeouts(first_token=60), NO_RATIOS, args.llm_dialect)
    engine = load_engine(args.engine, args.engine_dir, tokenizer, max(args.streams or [1]))
    return EngineLM(engine, tokenizer, NO_RATIOS)


async def ask_and_close(args: argparse.Namespace, tokenizer: LLMTokenizer) -> None:
    llm = speech_lm(args, tokenizer)
    try:
        await run(args, tokenizer, llm)
    finally:
        await llm.aclose()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input_text", default="Hello. This sentence is here to be spoken.", help="what to say")
    parser.add_argument("--tokenizer_dir", type=Path, required=True, help="HuggingFace directory of the LLM")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--engine_dir", type=Path, help="what the engine loads")
    where.add_argument("--urls", nargs="+", help="OpenAI-compatible servers instead of an engine of this process")
    parser.add_argument("--engine", choices=get_args(LLMEngine), default="auto")
    parser.add_argument("--llm_model", default="cosyvoice2_llm", help="the LLM's name at its server")
    parser.add_argument("--llm_dialect", choices=("auto", *DIALECTS), default="auto")
    for name in SAMPLING:
        default = getattr(Sampling, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--prompt_ids", type=int, default=0, help="fill the prompt up to so many with speech tokens")
    parser.add_argument("--exact_length", action="store_true", help="no end token before max_tokens")
    parser.add_argument("--streams", type=int, nargs="*", help="measure so many requests at once, one run for each")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        tokenizer = LLMTokenizer.from_dir(args.tokenizer_dir)
        asyncio.run(ask_and_close(args, tokenizer))
    except (ValueError, UnavailableError, OSError) as error:
        print(f"test_llm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
