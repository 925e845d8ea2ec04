"""The engines that the offline tools' options name."""

import argparse
import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from cosyvoice_triton import stacks
from cosyvoice_triton.checkpoint import read_state
from cosyvoice_triton.config import (
    FlowRuntime,
    LLMEngine,
    OrchestratorConfig,
    SpeakerRuntime,
    TensorrtLLMConfig,
    Token2WavConfig,
)
from cosyvoice_triton.constants import FLOW_CHUNK_TOKENS
from cosyvoice_triton.demo_checkpoint import has_random_weights
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.voice.prompt import Prompt

# By backend. hf is upstream's name for whatever reads the HuggingFace directory: see `llm_engine`.
ENGINES: dict[str, LLMEngine] = {"trtllm": "tensorrt_llm", "vllm": "vllm", "onnxruntime_genai": "onnxruntime_genai"}
BACKENDS = ("hf", *ENGINES, "trtllm-serve")
# Timeout between tokens of a server. Longer than in serving, because no listener waits; an LLM that hangs must still be
# an error.
SILENT_SECONDS = 60.0


def stack_of(model_dir: Path) -> Stack:
    """Return the stack whose token2wav checkpoint is there. ValueError if it is none's."""
    path = model_dir / Stack.flow
    return stacks.of_flow(read_state(path, "meta"), path)


def described(stack: Stack, model_dir: Path) -> str:
    """Return the vocoder's name in the figures, which says so if its weights are random."""
    return f"{stack.name} token2wav{', RANDOM weights' if has_random_weights(model_dir) else ''}"


def token2wav_config(args: argparse.Namespace, model_dir: Path, runtime: FlowRuntime, streams: int) -> Token2WavConfig:
    """Return the settings of token2wav in this process. runtime: of its estimator, unless --enable-trt names plans."""
    return Token2WavConfig(
        model_dir=str(model_dir),
        device=args.device,
        flow_runtime="tensorrt" if args.enable_trt else runtime,
        max_streams=streams,
        first_hop_tokens=FLOW_CHUNK_TOKENS,
    )


def speaker_runtime(args: argparse.Namespace) -> SpeakerRuntime:
    return "tensorrt" if args.enable_trt else "onnxruntime"


def llm_engine(backend: str, model_dir: Path, given: Path | None, device: str) -> tuple[LLMEngine, Path]:
    """Return the engine of a backend in this process, and the directory that it loads: the LLM's own, or for the CPU
    engine the converted one next to it, or the one that is given."""
    engine = ENGINES.get(backend) or ("onnxruntime_genai" if device == "cpu" else "cuda")
    if engine == "onnxruntime_genai":
        return engine, given or model_dir.with_name(model_dir.name + "_genai")
    return engine, model_dir if engine == "cuda" else given or model_dir


def llm_configs(args: argparse.Namespace) -> tuple[OrchestratorConfig, TensorrtLLMConfig | None]:
    """Return the settings of the pipeline and of the LLM's engine, None for a server (trtllm-serve).

    The address of a server may have the path of an API, as upstream's --openai-api-base.
    """
    directory = args.llm_model_name_or_path
    speech: dict[str, Any] = {"model_dir": str(args.token2wav_path), "llm_tokenizer_dir": str(directory)}
    if args.backend == "trtllm-serve":
        base = args.openai_api_base.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
        speech |= {"llm_transport": "openai", "llm_urls": (base,), "llm_model": args.openai_model_name}
        return OrchestratorConfig(**speech, token_timeout=SILENT_SECONDS), None
    engine, loaded = llm_engine(args.backend, directory, args.engine_dir, args.device)
    llm = TensorrtLLMConfig(
        engine_dir=str(loaded),
        tokenizer_dir=str(directory),
        engine=engine,
        instance_kind="KIND_CPU" if args.device == "cpu" else "KIND_GPU",
        max_requests=args.batch_size,
        gpu_share=args.kv_cache_free_gpu_memory_fraction,
    )
    return OrchestratorConfig(**speech), llm


class WholeToken2Wav:
    """The pipeline's port to a token2wav that renders whole utterances only, in batches: without streams or admission.

    calls: forward calls of the flow so far.
    """

    def __init__(self, stack: Stack, config: Token2WavConfig, batch_size: int) -> None:
        self._engine = Token2Wav.from_config(stack, config)
        self._engine.warm_up()
        self._batch_size = batch_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="token2wav")
        self._waiting: list[tuple[tuple[Prompt, np.ndarray], asyncio.Future[np.ndarray]]] = []
        self._rendering: asyncio.Task[None] | None = None
        self.calls = 0

    def open(self, speed: float = 1.0) -> NoReturn:
        """Raise ValueError: it has no streams."""
        raise ValueError("the offline tools' token2wav renders whole utterances only")

    async def offline(self, prompt: Prompt, tokens: Sequence[int], speed: float = 1.0) -> np.ndarray:
        """Return audio (N,) float32 of a whole utterance, at the usual rate."""
        answer: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._waiting.append(((prompt, np.asarray(tokens, np.int64)), answer))
        if self._rendering is None:
            self._rendering = asyncio.create_task(self._render())
        return await answer

    def close(self) -> None:
        self._thread.shutdown()

    async def _render(self) -> None:
        """Render what waits, the shortest first: every row of a batch costs as much as its longest one."""
        try:
            while self._waiting:
                self._waiting.sort(key=lambda each: len(each[0][1]))
                batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
                utterances = [utterance for utterance, _ in batch]
                results = await asyncio.get_running_loop().run_in_executor(self._thread, self._whole, utterances)
                for (_, answer), result in zip(batch, results, strict=True):
                    if answer.cancelled():
                        continue
                    if isinstance(result, Exception):
                        answer.set_exception(result)
                    else:
                        answer.set_result(result)
        finally:
            self._rendering = None

    def _whole(self, batch: Sequence[tuple[Prompt, np.ndarray]]) -> list[np.ndarray | Exception]:
        """Render a batch; one that fails is rendered one by one, so that only the utterance that causes it fails."""
        self.calls += 1
        try:
            return list(self._engine.whole_batch(batch))
        except Exception as error:
            if len(batch) == 1:
                return [error]
        return [self._whole([utterance])[0] for utterance in batch]
