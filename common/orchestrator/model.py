"""The orchestrator of every stack: the Triton model that clients call."""

import asyncio
import gc
import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
import torch

from common import triton_io
from common.config import OrchestratorConfig
from common.llm.checkpoint import read_limits, speech_bias
from common.llm.interface import LengthRatios, SpeechLM, Timeouts
from common.llm.openai_client import OpenAILM
from common.llm.speech_tokens import LLMTokenizer
from common.llm.triton_client import TritonLM
from common.llm.triton_tensors import RESPONSE_OUTPUTS
from common.orchestrator.chunking import HopRules
from common.orchestrator.ports import TritonPromptEncoder, TritonToken2Wav
from common.orchestrator.request import RequestInputs, default_sampling
from common.orchestrator.silence import SilenceRules
from common.orchestrator.synthesis import Synthesizer
from common.process.drain import DrainFile
from common.process.environment import ModelEnvironment
from common.process.health import ModelMonitor
from common.process.metrics import RequestStats
from common.stacks import Stack
from common.text import TextFrontend
from common.voice.book import VoiceBook

CLOSE_SECONDS = 5.0


class OrchestratorModel:
    """Base class of the orchestrators' `TritonPythonModel`: each request is a task of one asyncio loop."""

    stack: Stack  # set by each model.py

    def initialize(self, args: dict[str, str]) -> None:
        config = OrchestratorConfig.from_triton(args)
        torch.set_num_threads(1)  # it only computes mels of recordings
        self._orchestrator = Orchestrator(config, self.stack)
        self._loop = triton_io.RequestLoop(
            self._orchestrator.answer, model=args["model_name"], decoupled=config.decoupled
        )
        self._monitor = ModelMonitor(args, test=self._test, read=self._orchestrator.stats.values)
        gc.freeze()  # loaded objects are permanent: scanning them takes 5 % of the CPU time of a busy process

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._loop.submit(request)

    def _test(self) -> None:
        self._loop.run(asyncio.sleep(0))

    def finalize(self) -> None:
        try:
            self._loop.end_requests()  # before the connections that they use are closed
            self._loop.run(self._orchestrator.aclose(), CLOSE_SECONDS)
        finally:
            self._loop.close()
            self._monitor.close()


class Orchestrator:
    """Answers speech requests: with a stream of waveforms if the model is decoupled, otherwise with one."""

    def __init__(self, config: OrchestratorConfig, stack: Stack):
        tokenizer = LLMTokenizer.from_dir(config.llm_tokenizer_dir, stack.llm.tokenizer)
        call = partial(triton_io.call, timeout=config.model_timeout)
        self._llm = _speech_lm(config, tokenizer)
        voices = VoiceBook(config.voices_dir, config.model_dir, tokenizer.decode, config.default_speaker)
        if config.default_speaker:
            voices.get()  # fail now rather than in a request
        self._synthesizer = Synthesizer(
            TextFrontend(),
            voices.get,
            TritonPromptEncoder(call, tokenizer.first_speech_id),
            self._llm,
            TritonToken2Wav(
                call, stack.token2wav, cumulative=stack.cumulative, first_speech_id=tokenizer.first_speech_id
            ),
            HopRules(
                strategy=config.dynamic_chunk_strategy,
                first_hop=config.first_hop_tokens,
                max_hop=config.max_hop_tokens,
                boundary=stack.chunk_boundary,
            ),
            silence=SilenceRules(tokens=frozenset(config.silent_tokens), most=config.max_silent_tokens),
        )
        self._sampling = default_sampling(config)
        self._max_text_chars = config.max_text_chars
        self._decoupled = config.decoupled
        self._drain = DrainFile(ModelEnvironment.read().drain_file)
        self.stats = RequestStats()

    async def answer(self, request: Any, responder: triton_io.Responder) -> None:
        """Send the audio of one Triton request, (1, N) per response. Cancelling it ends all work started for it."""
        timeline = Timeline()
        warnings: list[str] = []
        with self.stats.request() as live:
            self._drain.check()
            speech = _inputs(request).check(self._sampling, self._max_text_chars)

            def send(waveform: np.ndarray) -> None:
                stages = timeline.take()
                responder.send(_outputs(waveform, warnings, stages if speech.timeline else []))
                live.sent(waveform.size)

            if not self._decoupled:
                send(await self._synthesizer.offline(speech, warnings.append))
                return
            async with aclosing(self._synthesizer.stream(speech, warnings.append, timeline.add)) as waveforms:
                async for waveform in waveforms:
                    send(waveform)

    async def aclose(self) -> None:
        """Release the LLM's connections."""
        await self._llm.aclose()


def _inputs(request: Any) -> RequestInputs:
    return RequestInputs(
        target_text=triton_io.text(request, "target_text"),
        reference_wav=triton_io.read(request, "reference_wav"),
        reference_wav_len=triton_io.scalar(request, "reference_wav_len"),
        reference_text=triton_io.text(request, "reference_text"),
        speaker=triton_io.text(request, "speaker"),
        instruct_text=triton_io.text(request, "instruct_text"),
        parameters=triton_io.parameters(request),
    )


class Timeline:
    """When each stage of a request was reached, in milliseconds since its processing started."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._stages: list[tuple[str, float]] = []

    def add(self, stage: str) -> None:
        self._stages.append((stage, round(1e3 * (time.perf_counter() - self._started), 3)))

    def take(self) -> list[tuple[str, float]]:
        """The stages added since the last call."""
        stages, self._stages = self._stages, []
        return stages


def _outputs(
    waveform: np.ndarray, warnings: list[str], stages: Sequence[tuple[str, float]] = ()
) -> dict[str, np.ndarray]:
    """The outputs of one response: waveform (N,) -> (1, N), and if there are any, warnings and stages as JSON.

    `warnings` is emptied, so each is sent once. They are outputs because Triton 2.51's python backend cannot set
    parameters of a response.
    """
    outputs = {"waveform": waveform[None]}
    if stages:
        outputs["timeline"] = np.array([[json.dumps(stages)]], np.object_)
    if warnings:
        outputs["warning"] = np.array([["; ".join(warnings)]], np.object_)
        warnings.clear()
    return outputs


def _speech_lm(config: OrchestratorConfig, tokenizer: LLMTokenizer) -> SpeechLM:
    timeouts = Timeouts(first_token=config.first_token_timeout, token=config.token_timeout)
    ratios = LengthRatios(min=config.min_token_ratio, max=config.max_token_ratio)
    if config.llm_transport == "openai":
        return OpenAILM(config.llm_urls, config.llm_model, tokenizer, timeouts, ratios, config.llm_dialect)
    bias = None
    if config.llm_backend == "tensorrtllm":  # the python backend restricts the vocabulary itself
        limits = read_limits(config.llm_tokenizer_dir)
        bias = speech_bias(config.llm_tokenizer_dir, tokenizer, limits.vocab_size)
    from common.triton_io.streams import Streams  # only this transport needs the client

    return TritonLM(Streams(config.llm_model, RESPONSE_OUTPUTS), tokenizer, timeouts, ratios, bias)
