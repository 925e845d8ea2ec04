"""The engines of a stack in this process, and their ports to the pipeline.

Each is what a model of a server has: the prompt encoders, the LLM's engine, token2wav's service with its admission. In
one process they share Python's interpreter lock, which is why a server gives each a process of its own.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from cosyvoice_triton.config import OrchestratorConfig, SpeakerRuntime, TensorrtLLMConfig, Token2WavConfig
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.llm.engines.interface import EngineLM, warm_up
from cosyvoice_triton.llm.engines.loading import engine_of
from cosyvoice_triton.llm.interface import SpeechLM
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.monitoring.logs import timed
from cosyvoice_triton.orchestrator.assembly import Pipeline, length_ratios, llm_server
from cosyvoice_triton.orchestrator.token2wav_port import Send, Token2WavReplicas
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.serving.requests import Token2WavRequest
from cosyvoice_triton.token2wav.serving.service import Token2WavService
from cosyvoice_triton.voice.audio import at_rate
from cosyvoice_triton.voice.encoders import AudioTokenizer, SpeakerEncoder, reference_mel
from cosyvoice_triton.voice.prompt import Recording

logger = logging.getLogger(__name__)

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
        for thread in self._threads:
            thread.shutdown()


def send_to(service: Token2WavService) -> Send:
    """Return what sends requests to a service of this process. They arrive in the order in which they were sent."""

    async def send(sequence: int, request: Token2WavRequest) -> np.ndarray:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[np.ndarray] = loop.create_future()

        def resolve(result: np.ndarray | BaseException) -> None:
            if answer.done():  # cancelled
                return
            if isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def reply(result: np.ndarray | BaseException) -> None:
            loop.call_soon_threadsafe(resolve, result)

        service.submit(request, reply)
        return await answer

    return send


class LocalEngines:
    """What a stack's models are on a server, loaded into this process: `with LocalEngines(...) as engines`.

    speech, token2wav, llm: the settings of these models; llm None: no LLM, for speech tokens that are there already.
    An LLM behind a server (`llm_transport` "openai") is called as the orchestrator calls it. token2wav is loaded
    first, because it plans the GPU's memory by what is free, and one after another, because kernels are compiled and
    graphs captured for the whole process. Raises what the models would fail to load with.
    """

    def __init__(
        self,
        stack: Stack,
        token2wav: Token2WavConfig,
        speech: OrchestratorConfig | None = None,
        llm: TensorrtLLMConfig | None = None,
        speaker_runtime: SpeakerRuntime = "onnxruntime",
    ) -> None:
        self.stack = stack
        self._speech = speech
        with ExitStack() as closing:
            self.service = Token2WavService(
                Token2Wav.from_config(stack, token2wav), idle_seconds=token2wav.idle_seconds
            )
            closing.callback(self.service.close)
            self.token2wav = Token2WavReplicas({stack.token2wav: send_to(self.service)}, cumulative=stack.cumulative)
            device = "cpu" if token2wav.prompt_device == "cpu" else token2wav.device
            with timed("prompt encoders"):
                self.encoder = LocalPromptEncoder(stack, token2wav.model_dir, device, speaker_runtime)
            closing.callback(self.encoder.close)
            if speech is not None:
                self.tokenizer = LLMTokenizer.from_dir(speech.llm_tokenizer_dir, stack.llm.tokenizer)
                self.llm = self._loaded_llm(speech, llm, closing)
            self._closing = closing.pop_all()

    def _loaded_llm(self, speech: OrchestratorConfig, llm: TensorrtLLMConfig | None, closing: ExitStack) -> SpeechLM:
        if llm is None:
            return llm_server(speech, self.tokenizer)
        with timed("LLM"):
            engine = engine_of(llm, self.tokenizer)
        closing.callback(engine.close)
        with timed("first requests"):
            asyncio.run(warm_up(engine, self.tokenizer, llm.max_requests))
        return EngineLM(engine, self.tokenizer, length_ratios(speech))

    def pipeline(self) -> Pipeline:
        """Return the stack's pipeline over these engines."""
        assert self._speech is not None
        return Pipeline(self._speech, self.stack, self.tokenizer, self.encoder, self.llm, self.token2wav)

    def close(self) -> None:
        """Free the engines, after the pipeline's requests have ended."""
        self._closing.close()

    def __enter__(self) -> "LocalEngines":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
