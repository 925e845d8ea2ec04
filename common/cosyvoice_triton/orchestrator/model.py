"""The orchestrator of every stack as the Triton model that clients call: it reads the tensors of requests for speech,
speaks them by the pipeline over Triton, and writes the responses: audio, warnings, segments and stages.
"""

import asyncio
import logging
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
import torch

from cosyvoice_triton import triton_io
from cosyvoice_triton.audible import leading_silence
from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.constants import MAX_SOURCE_SECONDS, PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.monitoring import tracing
from cosyvoice_triton.monitoring.environment import DRAIN_FILE, METRICS_DIRECTORY, path_of
from cosyvoice_triton.monitoring.health import ModelMonitor, Notice, failure_of
from cosyvoice_triton.monitoring.metrics import BAD_ANSWERS, RequestStats, Values
from cosyvoice_triton.orchestrator.assembly import Pipeline, remote_llm
from cosyvoice_triton.orchestrator.report import Events, Report
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
    """Base class of the orchestrators' `TritonPythonModel`: each request is a task of one asyncio loop. It is answered
    with a stream of waveforms if the model is decoupled, otherwise with one."""

    stack: Stack  # set by each model.py

    def initialize(self, args: dict[str, str]) -> None:
        self._config = config = OrchestratorConfig.from_triton(args)
        torch.set_num_threads(1)  # it only computes mels of recordings
        tokenizer = LLMTokenizer.from_dir(config.llm_tokenizer_dir, self.stack.llm.tokenizer)
        call, first_id = partial(triton_io.call, timeout=config.model_timeout), tokenizer.first_speech_id
        models = replicas(self.stack.token2wav, len(config.token2wav_gpus))
        failures = {model: failure_of(path_of(METRICS_DIRECTORY), model) for model in models}
        token2wav = Token2WavReplicas(
            {model: send_over_triton(call, model, first_id) for model in models},
            cumulative=self.stack.cumulative,
            failed=lambda model: failures[model].given(),
        )
        encoder = TritonPromptEncoder(call, first_id, self.stack.mel_max_hz)
        self._pipeline = Pipeline(config, self.stack, tokenizer, encoder, remote_llm(config, tokenizer), token2wav)
        if warning := self._pipeline.texts.warning:
            logger.warning("%s", warning)
        self._pieces = PieceStreams(config.text_timeout)
        self._drain = Notice(path_of(DRAIN_FILE))
        self._stats = RequestStats()
        self._loop = triton_io.RequestLoop(self.answer, model=args["model_name"], decoupled=config.decoupled)
        self._monitor = ModelMonitor(args, test=self._test, read=self._values)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._loop.submit(request)

    def _test(self) -> None:
        self._loop.run(asyncio.sleep(0), TEST_SECONDS)

    def finalize(self) -> None:
        try:
            self._loop.end_requests()  # before the connections that they use are closed
            self._loop.run(self._pipeline.llm.aclose(), CLOSE_SECONDS)
        finally:
            self._loop.close()
            self._monitor.close()

    def _values(self) -> Values:
        bad = {
            BAD_ANSWERS.sample(reason=reason, then="made again" if again else "sent"): float(count)
            for (reason, again), count in self._pipeline.synthesizer.judged.items()
        }
        return {**self._stats.values(), **bad}

    async def answer(self, request: Any, responder: triton_io.Responder) -> None:
        """Send the audio of one Triton request, (1, N) per response. Cancelling it ends all work started for it.

        A request of a sequence has the first piece of a text or of speech, or a further one, see `text_stream`.
        """
        origin = triton_io.origin(request)
        if not (sequence := origin["correlation_id"]):
            return await self._speak(request, responder)
        sent = triton_io.read_all(request, ["target_text", "source_wav", "source_sample_rate"])
        samples, end = sent.get("source_wav"), origin["end"]
        piece = (triton_io.scalar(sent, "target_text") or "") if samples is None else samples.reshape(-1)
        if not origin["start"]:
            self._pieces.add(sequence, piece, end)
            return
        decoupled, instances = self._config.decoupled, self._config.instances
        if not decoupled or instances > 1:
            wrong = f"{instances} orchestrator processes" if decoupled else "offline requests"
            raise ValueError(f"sequence id {sequence}: a request in pieces is not served with {wrong}")
        limit = Limit("target_text", self._config.max_text_chars, "characters")
        if samples is not None:
            rate = triton_io.scalar(sent, "source_sample_rate") or PROMPT_SAMPLE_RATE
            limit = Limit("source_wav", round(MAX_SOURCE_SECONDS * rate), "samples")
        with self._pieces.open(sequence, limit) as pieces:
            pieces.add(piece, end)
            await self._speak(request, responder, pieces)

    async def _speak(self, request: Any, responder: triton_io.Responder, pieces: PieceStream | None = None) -> None:
        parameters = triton_io.parameters(request)
        caller = str(parameters.get(tracing.TRACEPARENT, ""))
        with self._stats.request() as live, tracing.span("orchestrator", caller) as span:
            report = Report(span)
            if self._drain.given():
                raise UnavailableError("this server is shutting down and takes no requests; retry or use another one")
            synthesizer = self._pipeline.synthesizer
            if self._config.decoupled:
                synthesizer.refusal.check()  # before the request is read
            speech = self._pipeline.rules.request(
                **_inputs(request), parameters=parameters, pieces=pieces, on_warning=report.warnings.append
            )

            def send(waveform: np.ndarray) -> None:
                tracing.current.set("")  # calls for later chunks are not part of the trace
                responder.send(report.outputs(waveform, timeline=speech.timeline, segments=speech.segments))
                silence = leading_silence(waveform) if live.first_audible is None else None
                live.sent(waveform.size / SAMPLE_RATE, silence)

            if not self._config.decoupled:
                send(await synthesizer.offline(speech, Events(report.warnings.append, segment=report.segment)))
                return
            stream = synthesizer.stream(speech, Events(report.warnings.append, report.stage, report.segment))
            async with aclosing(stream) as waveforms:
                async for waveform in waveforms:
                    send(waveform)


def _inputs(request: Any) -> dict[str, Any]:
    inputs: dict[str, Any] = triton_io.read_all(request, [*TEXTS, *NUMBERS, *WAVES])
    for name in (*TEXTS, *NUMBERS):
        inputs[name] = triton_io.scalar(inputs, name)
    return inputs
