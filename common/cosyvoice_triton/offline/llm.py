"""The LLM of the offline tool, in this process or behind a server: batches of prompts in, speech tokens out.

Both form batches themselves (continuous batching); they are sent one batch of prompts concurrently.
"""

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from async_timeout import timeout

from cosyvoice_triton.config import LLMEngine, TensorrtLLMConfig
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.engines.interface import EngineLM
from cosyvoice_triton.llm.engines.loading import load_engine
from cosyvoice_triton.llm.interface import FinishReason, LLMPrompt, Sampling, SpeechLM, Timeouts
from cosyvoice_triton.llm.openai_client import OpenAILM
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer

# By backend. hf is upstream's name for whatever reads the HuggingFace directory: see `engine_of`.
ENGINES: dict[str, LLMEngine] = {"trtllm": "tensorrt_llm", "vllm": "vllm", "onnxruntime_genai": "onnxruntime_genai"}
BACKENDS = ("hf", *ENGINES, "trtllm-serve")
# Timeout between tokens. Longer than in serving, because no listener waits; an LLM that hangs must still be an error.
SILENT_SECONDS = 60.0


@dataclass(frozen=True)
class GeneratedTokens:
    """Speech ids (n,) int64 0..6560, at least one. finish_reason: "length" if the token limit cut generation short."""

    tokens: np.ndarray
    finish_reason: FinishReason | None


class OfflineLLM:
    """An LLM with continuous batching, sent up to `concurrency` requests at a time. It runs its own event loop, which
    handles interruptions, so it must be used in the main thread.
    """

    def __init__(self, llm: SpeechLM, concurrency: int) -> None:
        self._llm = llm
        self._concurrency = concurrency
        self._loop = asyncio.new_event_loop()

    def generate(self, prompts: Sequence[LLMPrompt], sampling: Sampling) -> list[GeneratedTokens | Exception]:
        batch = self._loop.create_task(self._generate(prompts, sampling))
        # An interruption must end the requests first; a KeyboardInterrupt inside the loop would leave them running.
        self._loop.add_signal_handler(signal.SIGINT, batch.cancel)
        try:
            return self._loop.run_until_complete(batch)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._llm.aclose())
            self._loop.close()

    async def _generate(self, prompts: Sequence[LLMPrompt], sampling: Sampling) -> list[GeneratedTokens | Exception]:
        semaphore = asyncio.Semaphore(self._concurrency)

        async def generate_limited(prompt: LLMPrompt) -> GeneratedTokens | Exception:
            async with semaphore:
                try:
                    return await self._generate_one(prompt, sampling)
                except Exception as error:
                    return error

        return await asyncio.gather(*map(generate_limited, prompts))

    async def _generate_one(self, prompt: LLMPrompt, sampling: Sampling) -> GeneratedTokens:
        stream = self._llm.generate(prompt, sampling)
        tokens: list[int] = []
        try:
            while True:
                async with timeout(SILENT_SECONDS):
                    part = await anext(stream, None)
                if part is None:
                    break
                tokens += part
        except asyncio.TimeoutError:
            raise UnavailableError(f"the LLM sent no token for {SILENT_SECONDS:g} s") from None
        finally:
            await stream.aclose()
        if not tokens:
            raise UnavailableError(f"the LLM returned no speech token for the text {prompt.target_text[:80]!r}")
        return GeneratedTokens(np.asarray(tokens, np.int64), stream.finish_reason)


def engine_of(backend: str, model_dir: Path, given: Path | None, device: str) -> tuple[LLMEngine, Path]:
    """Return the engine of a backend in this process, and the directory that it loads: the LLM's own, or for the CPU
    engine the converted one next to it, or the one that is given."""
    engine = ENGINES.get(backend) or ("onnxruntime_genai" if device == "cpu" else "cuda")
    if engine == "onnxruntime_genai":
        return engine, given or model_dir.with_name(model_dir.name + "_genai")
    return engine, model_dir if engine == "cuda" else given or model_dir


def load_llm(
    engine: LLMEngine,
    directory: Path,
    tokenizer: LLMTokenizer,
    batch_size: int,
    free_share: float = TensorrtLLMConfig.gpu_share,
) -> OfflineLLM:
    """Load what `engine_of` names. free_share: for trtllm. ValueError if the engine cannot serve it."""
    loaded = load_engine(engine, directory, tokenizer, batch_size, free_share=free_share)
    return OfflineLLM(EngineLM(loaded, tokenizer), batch_size)


def connect(url: str, model: str, tokenizer: LLMTokenizer, batch_size: int) -> OfflineLLM:
    """Return the backend trtllm-serve. url: with or without the path of an API, as upstream's --openai-api-base."""
    base = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
    timeouts = Timeouts(first_token=SILENT_SECONDS, token=SILENT_SECONDS)
    return OfflineLLM(OpenAILM([base], model, tokenizer, timeouts), batch_size)
