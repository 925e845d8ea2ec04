"""What answers speech requests: it reads their tensors, and has the parts that a stack's settings select."""

import dataclasses
import logging
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np

from cosyvoice_triton import triton_io
from cosyvoice_triton.config import OrchestratorConfig
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.llm.checkpoint import follows_instructions, read_limits, speech_bias
from cosyvoice_triton.llm.interface import LengthRatios, SpeechLM, Timeouts
from cosyvoice_triton.llm.interleaving import InterleavedLM
from cosyvoice_triton.llm.openai_client import OpenAILM
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.llm.triton_client import TritonLM
from cosyvoice_triton.llm.triton_tensors import RESPONSE_OUTPUTS
from cosyvoice_triton.monitoring import tracing
from cosyvoice_triton.monitoring.drain import DrainFile
from cosyvoice_triton.monitoring.environment import ModelEnvironment
from cosyvoice_triton.monitoring.health import has_failed
from cosyvoice_triton.monitoring.metrics import RequestStats
from cosyvoice_triton.orchestrator.chunking import HopRules
from cosyvoice_triton.orchestrator.ports import TritonPromptEncoder, TritonToken2Wav
from cosyvoice_triton.orchestrator.request import RequestInputs, default_sampling
from cosyvoice_triton.orchestrator.responses import Timeline, outputs
from cosyvoice_triton.orchestrator.synthesis import Synthesizer
from cosyvoice_triton.orchestrator.text_stream import TextStream, TextStreams
from cosyvoice_triton.replicas import replicas
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.text import TextFrontend
from cosyvoice_triton.text.markup import left_out
from cosyvoice_triton.voice.book import VoiceBook

logger = logging.getLogger(__name__)

TEXTS = ("target_text", "reference_text", "speaker", "instruct_text")


class Orchestrator:
    """Answers speech requests: with a stream of waveforms if the model is decoupled, otherwise with one."""

    def __init__(self, config: OrchestratorConfig, stack: Stack):
        tokenizer = LLMTokenizer.from_dir(config.llm_tokenizer_dir, stack.llm.tokenizer)
        call = partial(triton_io.call, timeout=config.model_timeout)
        self._llm = _speech_lm(config, tokenizer)
        full_band = stack.mel_max_hz > PROMPT_SAMPLE_RATE / 2
        voices = VoiceBook(config.voices_dir, config.model_dir, tokenizer.decode, config.default_speaker, full_band)
        voices.pronunciation(None)  # fail now rather than in a request
        if config.default_speaker:
            voices.get()
        texts = TextFrontend(stack.name)
        self._languages = texts.languages
        if texts.warning:
            logger.warning("%s", texts.warning)
        self._synthesizer = Synthesizer(
            texts,
            voices,
            TritonPromptEncoder(call, tokenizer.first_speech_id, stack.mel_max_hz),
            self._llm,
            InterleavedLM(self._llm, tokenizer),
            TritonToken2Wav(
                call,
                replicas(stack.token2wav, len(config.token2wav_gpus)),
                cumulative=stack.cumulative,
                first_speech_id=tokenizer.first_speech_id,
                failed=has_failed,
            ),
            HopRules(
                strategy=config.dynamic_chunk_strategy,
                first_hop=config.first_hop_tokens,
                short_first_hop=config.short_first_hop_tokens,
                max_hop=config.max_hop_tokens,
                boundary=stack.chunk_boundary,
            ),
            silent_tokens=stack.silent_tokens,
        )
        self._sampling = default_sampling(config)
        self._instructions = follows_instructions(config.llm_tokenizer_dir)
        self._max_text_chars = config.max_text_chars
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
            if self._decoupled:
                self._synthesizer.check()
            speech = _inputs(request, parameters, pieces).check(self._sampling, self._max_text_chars, self._languages)
            if speech.instruct_text and not self._instructions:  # it would read them aloud
                speech = dataclasses.replace(speech, instruct_text="")
                warnings.append("instruct_text was left out: this LLM does not follow instructions")
            if tags := left_out(speech.target_text):
                warnings.append(f"tags were left out, as they mean nothing here: {', '.join(tags[:8])}")

            def send(waveform: np.ndarray) -> None:
                tracing.current.set("")  # calls for later chunks are not part of the trace
                stages = timeline.take()
                responder.send(outputs(waveform, warnings, segments, stages if speech.timeline else []))
                live.sent(waveform.size)

            def ended(text: str, samples: int) -> None:
                if speech.segments:
                    segments.append((text, samples))

            if not self._decoupled:
                send(await self._synthesizer.offline(speech, warnings.append, ended))
                return
            stream = self._synthesizer.stream(speech, warnings.append, timeline.add, ended)
            async with aclosing(stream) as waveforms:
                async for waveform in waveforms:
                    send(waveform)

    async def aclose(self) -> None:
        """Release the LLM's connections."""
        await self._llm.aclose()


def _inputs(request: Any, parameters: Mapping[str, Any], pieces: TextStream | None) -> RequestInputs:
    sent = triton_io.read_all(request, (*TEXTS, "reference_wav", "reference_wav_len", "reference_sample_rate"))
    return RequestInputs(
        **{name: triton_io.text(sent, name) for name in TEXTS},
        reference_wav=sent.get("reference_wav"),
        reference_wav_len=triton_io.scalar(sent, "reference_wav_len"),
        reference_sample_rate=triton_io.scalar(sent, "reference_sample_rate"),
        parameters=parameters,
        pieces=pieces,
    )


def _speech_lm(config: OrchestratorConfig, tokenizer: LLMTokenizer) -> SpeechLM:
    timeouts = Timeouts(first_token=config.token_timeout, token=config.token_timeout)
    ratios = LengthRatios(min=config.min_token_ratio, max=config.max_token_ratio)
    if config.llm_transport == "openai":
        return OpenAILM(config.llm_urls, config.llm_model, tokenizer, timeouts, ratios, config.llm_dialect)
    bias = None
    if config.llm_backend == "tensorrtllm":  # the python backend restricts the vocabulary itself
        limits = read_limits(config.llm_tokenizer_dir)
        bias = speech_bias(config.llm_tokenizer_dir, tokenizer, limits.vocab_size)
    from cosyvoice_triton.triton_io.streams import Streams  # only this transport needs the client

    return TritonLM(Streams(config.llm_model, RESPONSE_OUTPUTS), tokenizer, timeouts, ratios, bias)
