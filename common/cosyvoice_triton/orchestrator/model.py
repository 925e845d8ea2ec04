"""The orchestrator of every stack as the Triton model that clients call: it reads the tensors of requests for speech,
speaks them by the pipeline over Triton, and writes the responses: audio, warnings, segments and stages.
"""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
import torch

from cosyvoice_triton import triton_io
from cosyvoice_triton.audible import leading_silence
from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.constants import MAX_SOURCE_SECONDS, PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.monitoring import tracing
from cosyvoice_triton.monitoring.environment import ModelEnvironment
from cosyvoice_triton.monitoring.health import DrainFile, ModelMonitor, has_failed
from cosyvoice_triton.monitoring.metrics import BAD_ANSWERS, RequestStats, Values
from cosyvoice_triton.orchestrator.assembly import Pipeline, remote_llm
from cosyvoice_triton.orchestrator.text_stream import Limit, PieceStream, PieceStreams
from cosyvoice_triton.orchestrator.token2wav_port import Token2WavReplicas, send_over_triton
from cosyvoice_triton.orchestrator.triton_encoder import TritonPromptEncoder
from cosyvoice_triton.replicas import replicas
from cosyvoice_triton.stacks import Stack

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
TEST_SECONDS = 10.0  # a loop that takes longer for nothing is blocked
NUMBERS = ("reference_wav_len", "reference_sample_rate", "source_sample_rate")
WAVES = ("reference_wav", "source_wav")
TEXTS = ("target_text", "reference_text", "speaker", "instruct_text")


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
        self._monitor = ModelMonitor(args, test=self._test, read=self._orchestrator.values)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._loop.submit(request)

    def _test(self) -> None:
        self._loop.run(asyncio.sleep(0), TEST_SECONDS)

    def finalize(self) -> None:
        try:
            self._loop.end_requests()  # before the connections that they use are closed
            self._loop.run(self._orchestrator.aclose(), CLOSE_SECONDS)
        finally:
            self._loop.close()
            self._monitor.close()


class Report:
    """What the next response says beside its audio: each warning, segment and stage is sent once.

    They are outputs because Triton 2.51's python backend cannot set parameters of a response.
    """

    def __init__(self, span: tracing.Span) -> None:
        """Begin. Stages are in milliseconds from now; those up to the first response become events of `span`."""
        self.warnings: list[str] = []
        self._span = span
        self._started = time.perf_counter()
        self._stages: list[tuple[str, float]] = []
        self._segments: list[tuple[str, int]] = []

    def stage(self, name: str) -> None:
        """Note that a stage has been reached, see `OnStage`."""
        self._span.event(name)
        self._stages.append((name, round(1e3 * (time.perf_counter() - self._started), 3)))

    def segment(self, text: str, samples: int, tokens: Sequence[int]) -> None:
        """Note that a segment's last waveform or a pause comes next, see `OnSegment`."""
        self._segments.append((text, samples))

    def outputs(self, waveform: np.ndarray, *, timeline: bool, segments: bool) -> dict[str, np.ndarray]:
        """Return the outputs of one response: waveform (N,) as (1, N), and if there are any, warnings, and stages and
        segments, both as JSON, if the request asks for them. A segment is the text and the samples of one that ends
        here, "" for a pause."""
        tensors = {"waveform": waveform[None]}
        if self._stages and timeline:
            tensors["timeline"] = np.array([[json.dumps(self._stages)]], np.object_)
        if self._segments and segments:
            tensors["segments"] = np.array([[json.dumps(self._segments)]], np.object_)
        if self.warnings:
            tensors["warning"] = np.array([["; ".join(self.warnings)]], np.object_)
        for sent in (self._stages, self._segments, self.warnings):
            sent.clear()
        self._span = tracing.OFF
        return tensors


class Orchestrator:
    """Answers speech requests: with a stream of waveforms if the model is decoupled, otherwise with one."""

    def __init__(self, config: OrchestratorConfig, stack: Stack):
        tokenizer = LLMTokenizer.from_dir(config.llm_tokenizer_dir, stack.llm.tokenizer)
        call = partial(triton_io.call, timeout=config.model_timeout)
        first_id = tokenizer.first_speech_id
        models = replicas(stack.token2wav, len(config.token2wav_gpus))
        environment = ModelEnvironment.read()
        self._pipeline = Pipeline(
            config,
            stack,
            tokenizer,
            TritonPromptEncoder(call, first_id, stack.mel_max_hz),
            remote_llm(config, tokenizer),
            Token2WavReplicas(
                {model: send_over_triton(call, model, first_id) for model in models},
                cumulative=stack.cumulative,
                failed=partial(has_failed, environment.metrics_directory),
            ),
        )
        if warning := self._pipeline.texts.warning:
            logger.warning("%s", warning)
        self._decoupled = config.decoupled
        self._instances = config.instances
        self._pieces = PieceStreams(config.text_timeout)
        self._text_limit = Limit("target_text", config.max_text_chars, "characters")
        self._drain = DrainFile(environment.drain_file)
        self.stats = RequestStats()

    def values(self) -> Values:
        """Return the current numbers of its metrics."""
        judged = self._pipeline.synthesizer.judged
        bad = {
            BAD_ANSWERS.sample(reason=reason, then="made again" if again else "sent"): float(count)
            for (reason, again), count in judged.items()
        }
        return {**self.stats.values(), **bad}

    async def answer(self, request: Any, responder: triton_io.Responder) -> None:
        """Send the audio of one Triton request, (1, N) per response. Cancelling it ends all work started for it.

        A request of a sequence has the first piece of a text or of speech, or a further one, see `text_stream`.
        """
        origin = triton_io.origin(request)
        if not (sequence := origin["correlation_id"]):
            await self._speak(request, responder)
            return
        sent = triton_io.read_all(request, ["target_text", "source_wav", "source_sample_rate"])
        samples, end = sent.get("source_wav"), origin["end"]
        piece = (triton_io.scalar(sent, "target_text") or "") if samples is None else samples.reshape(-1)
        if not origin["start"]:
            self._pieces.add(sequence, piece, end)
            return
        if not self._decoupled or self._instances > 1:
            wrong = f"{self._instances} orchestrator processes" if self._decoupled else "offline requests"
            raise ValueError(f"sequence id {sequence}: a request in pieces is not served with {wrong}")
        limit = self._text_limit
        if samples is not None:
            rate = triton_io.scalar(sent, "source_sample_rate") or PROMPT_SAMPLE_RATE
            limit = Limit("source_wav", round(MAX_SOURCE_SECONDS * rate), "samples")
        with self._pieces.open(sequence, limit) as pieces:
            pieces.add(piece, end)
            await self._speak(request, responder, pieces)

    async def _speak(self, request: Any, responder: triton_io.Responder, pieces: PieceStream | None = None) -> None:
        parameters = triton_io.parameters(request)
        caller = str(parameters.get(tracing.TRACEPARENT, ""))
        with self.stats.request() as live, tracing.span("orchestrator", caller) as span:
            report = Report(span)
            self._drain.check()
            synthesizer = self._pipeline.synthesizer
            if self._decoupled:
                synthesizer.refusal.check()  # before the request is read
            speech = self._pipeline.rules.request(
                **_inputs(request), parameters=parameters, pieces=pieces, on_warning=report.warnings.append
            )

            def send(waveform: np.ndarray) -> None:
                tracing.current.set("")  # calls for later chunks are not part of the trace
                responder.send(report.outputs(waveform, timeline=speech.timeline, segments=speech.segments))
                silence = leading_silence(waveform) if live.first_audible is None else None
                live.sent(waveform.size / SAMPLE_RATE, silence)

            if not self._decoupled:
                send(await synthesizer.offline(speech, report.warnings.append, on_segment=report.segment))
                return
            stream = synthesizer.stream(speech, report.warnings.append, report.stage, report.segment)
            async with aclosing(stream) as waveforms:
                async for waveform in waveforms:
                    send(waveform)

    async def aclose(self) -> None:
        """Release the LLM's connections."""
        await self._pipeline.llm.aclose()


def _inputs(request: Any) -> dict[str, Any]:
    sent: dict[str, Any] = triton_io.read_all(request, [*TEXTS, *NUMBERS, *WAVES])
    for name in (*TEXTS, *NUMBERS):
        sent[name] = triton_io.scalar(sent, name)
    return sent
