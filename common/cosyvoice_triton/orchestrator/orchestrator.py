"""What answers speech requests: it reads their tensors, speaks them by the pipeline over Triton, and writes the
responses: audio, warnings, segments and the stages that were reached."""

import json
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np

from cosyvoice_triton import triton_io
from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.llm.checkpoint import read_limits, speech_bias
from cosyvoice_triton.llm.interface import SpeechLM
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.llm.triton_client import RESPONSE_OUTPUTS, TritonLM
from cosyvoice_triton.monitoring import tracing
from cosyvoice_triton.monitoring.drain import DrainFile
from cosyvoice_triton.monitoring.environment import ModelEnvironment
from cosyvoice_triton.monitoring.health import has_failed
from cosyvoice_triton.monitoring.metrics import RequestStats
from cosyvoice_triton.orchestrator.assembly import Pipeline, length_ratios, llm_server, timeouts
from cosyvoice_triton.orchestrator.text_stream import TextStream, TextStreams
from cosyvoice_triton.orchestrator.token2wav_port import Token2WavReplicas
from cosyvoice_triton.orchestrator.triton_ports import TritonPromptEncoder, send_over_triton
from cosyvoice_triton.replicas import replicas
from cosyvoice_triton.stacks import Stack

logger = logging.getLogger(__name__)

NUMBERS = ("reference_wav_len", "reference_sample_rate")
TEXTS = ("target_text", "reference_text", "speaker", "instruct_text")


class Orchestrator:
    """Answers speech requests: with a stream of waveforms if the model is decoupled, otherwise with one."""

    def __init__(self, config: OrchestratorConfig, stack: Stack):
        tokenizer = LLMTokenizer.from_dir(config.llm_tokenizer_dir, stack.llm.tokenizer)
        call = partial(triton_io.call, timeout=config.model_timeout)
        first_id = tokenizer.first_speech_id
        models = replicas(stack.token2wav, len(config.token2wav_gpus))
        self._pipeline = Pipeline(
            config,
            stack,
            tokenizer,
            TritonPromptEncoder(call, first_id, stack.mel_max_hz),
            _speech_lm(config, tokenizer),
            Token2WavReplicas(
                {model: send_over_triton(call, model, first_id) for model in models},
                cumulative=stack.cumulative,
                failed=has_failed,
            ),
        )
        if warning := self._pipeline.texts.warning:
            logger.warning("%s", warning)
        self._decoupled = config.decoupled
        self._instances = config.instances
        self._texts = TextStreams(config.max_text_chars, config.text_timeout)
        self._drain = DrainFile(ModelEnvironment.read().drain_file)
        self.stats = RequestStats()

    async def answer(self, request: Any, responder: triton_io.Responder) -> None:
        """Send the audio of one Triton request, (1, N) per response. Cancelling it ends all work started for it.

        A request of a sequence has the first piece of a text, or a further one, see `text_stream`.
        """
        origin = triton_io.origin(request)
        if not (sequence := origin["correlation_id"]):
            await self._speak(request, responder)
            return
        sent = triton_io.read_all(request, ["target_text"])
        piece, end = triton_io.text(sent, "target_text") or "", origin["end"]
        if not origin["start"]:
            self._texts.add(sequence, piece, end)
            return
        if not self._decoupled or self._instances > 1:
            wrong = f"{self._instances} orchestrator processes" if self._decoupled else "offline requests"
            raise ValueError(f"sequence id {sequence}: text in pieces is not served with {wrong}")
        with self._texts.open(sequence) as pieces:
            pieces.add(piece, end)
            await self._speak(request, responder, pieces)

    async def _speak(self, request: Any, responder: triton_io.Responder, pieces: TextStream | None = None) -> None:
        warnings: list[str] = []
        segments: list[tuple[str, int]] = []
        parameters = triton_io.parameters(request)
        caller = str(parameters.get(tracing.TRACEPARENT, ""))
        with self.stats.request() as live, tracing.span("orchestrator", caller) as span:
            timeline = Timeline(span)
            self._drain.check()
            synthesizer = self._pipeline.synthesizer
            if self._decoupled:
                synthesizer.check()
            speech = self._pipeline.rules.request(
                **_inputs(request), parameters=parameters, pieces=pieces, on_warning=warnings.append
            )

            def send(waveform: np.ndarray) -> None:
                tracing.current.set("")  # calls for later chunks are not part of the trace
                stages = timeline.take()
                responder.send(outputs(waveform, warnings, segments, stages if speech.timeline else []))
                live.sent(waveform.size)

            def ended(text: str, samples: int, tokens: Sequence[int]) -> None:
                if speech.segments:
                    segments.append((text, samples))

            if not self._decoupled:
                send(await synthesizer.offline(speech, warnings.append, on_segment=ended))
                return
            stream = synthesizer.stream(speech, warnings.append, timeline.add, ended)
            async with aclosing(stream) as waveforms:
                async for waveform in waveforms:
                    send(waveform)

    async def aclose(self) -> None:
        """Release the LLM's connections."""
        await self._pipeline.llm.aclose()


def _inputs(request: Any) -> dict[str, Any]:
    sent: dict[str, Any] = dict.fromkeys((*TEXTS, *NUMBERS, "reference_wav"))
    tensors = triton_io.read_all(request, list(sent))
    sent |= tensors
    for name in TEXTS:
        sent[name] = triton_io.text(tensors, name)
    for name in NUMBERS:
        sent[name] = triton_io.scalar(tensors, name)
    return sent


def _speech_lm(config: OrchestratorConfig, tokenizer: LLMTokenizer) -> SpeechLM:
    if config.llm_transport == "openai":
        return llm_server(config, tokenizer)
    bias = None
    if config.llm_backend == "tensorrtllm":  # the python backend restricts the vocabulary itself
        limits = read_limits(config.llm_tokenizer_dir)
        bias = speech_bias(config.llm_tokenizer_dir, tokenizer, limits.vocab_size)
    from cosyvoice_triton.triton_io.streams import Streams  # only this transport needs the client

    streams = Streams(config.llm_model, RESPONSE_OUTPUTS)
    return TritonLM(streams, tokenizer, timeouts(config), length_ratios(config), bias)


class Timeline:
    """When each stage of a request was reached, in milliseconds since its processing started. Those up to the first
    response become events of `span`."""

    def __init__(self, span: tracing.Span) -> None:
        self._span = span
        self._started = time.perf_counter()
        self._stages: list[tuple[str, float]] = []

    def add(self, stage: str) -> None:
        self._span.event(stage)
        self._stages.append((stage, round(1e3 * (time.perf_counter() - self._started), 3)))

    def take(self) -> list[tuple[str, float]]:
        """Return the stages added since the last call."""
        self._span = tracing.OFF
        stages, self._stages = self._stages, []
        return stages


def outputs(
    waveform: np.ndarray,
    warnings: list[str],
    segments: list[tuple[str, int]],
    stages: Sequence[tuple[str, float]] = (),
) -> dict[str, np.ndarray]:
    """Return the outputs of one response: waveform (N,) as (1, N), and if there are any, warnings, stages, segments.

    Stages and segments are JSON. A segment is the text and the samples of one that ends here, "" for a pause.

    `warnings` and `segments` are emptied, so each is sent once. They are outputs because Triton 2.51's python backend
    cannot set parameters of a response.
    """
    tensors = {"waveform": waveform[None]}
    if stages:
        tensors["timeline"] = np.array([[json.dumps(stages)]], np.object_)
    if segments:
        tensors["segments"] = np.array([[json.dumps(segments)]], np.object_)
        segments.clear()
    if warnings:
        tensors["warning"] = np.array([["; ".join(warnings)]], np.object_)
        warnings.clear()
    return tensors
