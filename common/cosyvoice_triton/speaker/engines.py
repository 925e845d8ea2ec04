"""The engines of a stack in this process, and their ports to the pipeline.

Each is what a model of a server has: the prompt encoders, the LLM's engine, token2wav's service with its admission. In
one process they share Python's interpreter lock, which is why a server gives each a process of its own.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from cosyvoice_triton.config import OrchestratorConfig, SpeakerRuntime, TensorrtLLMConfig, Token2WavConfig
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.llm.engines.interface import EngineLM, warm_up
from cosyvoice_triton.llm.engines.loading import engine_of
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.monitoring.logs import timed
from cosyvoice_triton.orchestrator.assembly import Pipeline, length_ratios, remote_llm
from cosyvoice_triton.orchestrator.token2wav_port import Send, Token2WavPort, Token2WavReplicas
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.serving.requests import Token2WavRequest
from cosyvoice_triton.token2wav.serving.service import Token2WavService
from cosyvoice_triton.voice.audio import at_rate
from cosyvoice_triton.voice.encoders import AudioTokenizer, SpeakerEncoder, reference_mel
from cosyvoice_triton.voice.prompt import Recording

Encode = Callable[[Sequence[np.ndarray]], list[np.ndarray]]  # waves (N_i,) at 16 kHz -> the output of each


class LocalPromptEncoder:
    """The prompt encoders of a stack, each in a thread of its own; mels are computed in others."""

    def __init__(
        self, stack: Stack, model_dir: str | Path, device: str, runtime: SpeakerRuntime = "onnxruntime"
    ) -> None:
        self._mel_max_hz = stack.mel_max_hz
        self._tokenizer = AudioTokenizer(model_dir, device)
        self._speaker = SpeakerEncoder(model_dir, runtime, device)
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("tokenizer", "speaker-encoder")]

    async def tokens(self, recording: Recording) -> np.ndarray:
        return await self._encoded(self._threads[0], self._tokenizer, recording)

    async def mel(self, recording: Recording) -> np.ndarray:
        return await asyncio.to_thread(reference_mel, recording, self._mel_max_hz)

    async def embedding(self, recording: Recording) -> np.ndarray:
        return await self._encoded(self._threads[1], self._speaker, recording)

    async def _encoded(self, thread: ThreadPoolExecutor, encode: Encode, recording: Recording) -> np.ndarray:
        def encoded() -> np.ndarray:
            return encode([at_rate(recording, PROMPT_SAMPLE_RATE)])[0]

        return await asyncio.get_running_loop().run_in_executor(thread, encoded)

    def close(self) -> None:
        """Wait for the recordings that are being encoded."""
        for thread in self._threads:
            thread.shutdown()


def send_to(service: Token2WavService) -> Send:
    """Return what sends requests to a service of this process. They arrive in the order in which they were sent."""

    async def send(sequence: int, request: Token2WavRequest) -> np.ndarray:
        answer: Future[np.ndarray] = Future()

        def reply(result: np.ndarray | BaseException) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            if isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        service.submit(request, reply)
        return await asyncio.wrap_future(answer)

    return send


def load_token2wav(stack: Stack, config: Token2WavConfig) -> Token2WavService:
    """Load token2wav as its model does, with admission. On a GPU before the LLM: it plans the memory by what is free.
    Raises what the model would fail to load with."""
    return Token2WavService(Token2Wav.from_config(stack, config), idle_seconds=config.idle_seconds)


def port_of(service: Token2WavService, stack: Stack) -> Token2WavReplicas:
    return Token2WavReplicas({stack.token2wav: send_to(service)}, cumulative=stack.cumulative)


def load_pipeline(
    stack: Stack,
    speech: OrchestratorConfig,
    llm: TensorrtLLMConfig | None,
    encoder: LocalPromptEncoder,
    token2wav: Token2WavPort,
    closing: ExitStack,
) -> Pipeline:
    """Load the LLM as its model does, and return the pipeline over these ports.

    llm: of the engine in this process; None: it is behind a server (`llm_transport` "openai"), and the pipeline's `llm`
    is to be closed in the loop that has used it. closing: closes the engine.
    """
    tokenizer = LLMTokenizer.from_dir(speech.llm_tokenizer_dir, stack.llm.tokenizer)
    if llm is None:
        return Pipeline(speech, stack, tokenizer, encoder, remote_llm(speech, tokenizer), token2wav)
    with timed("LLM"):
        engine = engine_of(llm, tokenizer)
    closing.callback(engine.close)
    with timed("first requests"):
        asyncio.run(warm_up(engine, tokenizer, llm.max_requests))
    lm = EngineLM(engine, tokenizer, length_ratios(speech))
    return Pipeline(speech, stack, tokenizer, encoder, lm, token2wav)
