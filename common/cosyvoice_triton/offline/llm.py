"""LLM backends of the offline tools: batches of prompts in, speech tokens out.

    hf                   transformers' generate over a HuggingFace directory: any device, slow
    trtllm               TensorRT-LLM in this process, over built engines or a HuggingFace directory
    vllm                 vLLM in this process, over a HuggingFace directory
    trtllm-serve         a server with OpenAI's API: trtllm-serve, vllm serve, transformers serve
    onnxruntime_genai    this project's CPU engine, over a directory that `cosyvoice-triton prepare convert-genai` wrote

All but `hf` form batches themselves (continuous batching); they are sent one batch of prompts concurrently.
"""

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from async_timeout import timeout

from cosyvoice_triton.config import LLMEngine, TensorrtLLMConfig
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.engines.interface import EngineLM
from cosyvoice_triton.llm.engines.loading import load_engine
from cosyvoice_triton.llm.interface import LLMPrompt, Sampling, SpeechLM, Timeouts
from cosyvoice_triton.llm.openai_client import OpenAILM
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.offline.batch_lm import BatchLM, GeneratedTokens

ENGINES: dict[str, LLMEngine] = {"trtllm": "tensorrt_llm", "vllm": "vllm", "onnxruntime_genai": "onnxruntime_genai"}
BACKENDS = ("hf", "trtllm", "vllm", "trtllm-serve", "onnxruntime_genai")
# Timeout between tokens. Longer than in serving, because no listener waits; an LLM that hangs must still be an error.
SILENT_SECONDS = 60.0


class StreamedLM:
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
        return GeneratedTokens.of(prompt, tokens, stream.finish_reason)


def engine_dir(backend: str, model_dir: Path, given: Path | None) -> Path:
    """The directory that a backend's engine loads; by default the LLM's own, or the converted one next to it."""
    converted = model_dir.with_name(model_dir.name + "_genai")
    return given or (converted if backend == "onnxruntime_genai" else model_dir)


def load_llm(
    backend: str,
    model_dir: Path,
    engine: Path,
    tokenizer: LLMTokenizer,
    batch_size: int,
    device: str,
    free_share: float = TensorrtLLMConfig.gpu_share,
) -> BatchLM:
    """A backend in this process, serving what `engine_dir` names. free_share: see `GPUMemory`, for trtllm. Raises
    ValueError where it cannot."""
    if backend == "hf":
        from cosyvoice_triton.offline.transformers_lm import TransformersLM  # takes seconds to import

        return TransformersLM.load(model_dir, tokenizer, batch_size, device)
    loaded = load_engine(ENGINES[backend], engine, tokenizer, batch_size, free_share=free_share)
    return StreamedLM(EngineLM(loaded, tokenizer), batch_size)


def connect(url: str, model: str, tokenizer: LLMTokenizer, batch_size: int) -> BatchLM:
    """The backend trtllm-serve. url: with or without the path of an API, as upstream's --openai-api-base."""
    base = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
    timeouts = Timeouts(first_token=SILENT_SECONDS, token=SILENT_SECONDS)
    return StreamedLM(OpenAILM([base], model, tokenizer, timeouts), batch_size)
