"""Text to speech in this process: the Python API without a server."""

import asyncio
import dataclasses
import json
import logging
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import numpy as np

from cosyvoice_triton import stacks
from cosyvoice_triton.background import BackgroundLoop, in_thread
from cosyvoice_triton.config import OrchestratorConfig, TensorrtLLMConfig, Token2WavConfig
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.monitoring.logs import timed
from cosyvoice_triton.orchestrator.report import Events
from cosyvoice_triton.orchestrator.request import SynthesisRequest
from cosyvoice_triton.prepare import steps
from cosyvoice_triton.server.options import StackOptions, planned
from cosyvoice_triton.speaker.engines import LocalPromptEncoder, load_pipeline, load_token2wav, port_of
from cosyvoice_triton.text.pronunciation import pronunciations
from cosyvoice_triton.voice.audio import load_recording

logger = logging.getLogger(__name__)

OnWarning = Callable[[str], object]
SpeechSource = str | Path | np.ndarray | Iterable[np.ndarray]  # what is converted


class Speaker:
    """A stack in this process: `with Speaker("models/demo") as speaker: speaker.speak("Hello.")`.

    models: the directory of the checkpoints, see `cosyvoice-triton prepare`; by default the demo voice. options: those
    of `cosyvoice_triton.server.options.StackOptions`, such as stack="unet", device="cpu", llm_engine="cuda" or
    settings={"max_streams": "4"}. A request without a voice has the voice of the setting `default_speaker`; without
    that, the default of a server, or else the first registered voice.

    Any number of threads and asyncio loops may speak at the same time. Listeners are admitted as by a server: one for
    whom there is no room is refused with OverloadedError (a RuntimeError), which says when to try again.

    ValueError if a file is missing, or a setting is wrong or does not fit the machine.
    """

    sample_rate = SAMPLE_RATE  # Hz, of all audio

    def __init__(self, models: str | Path | None = None, **options: Any) -> None:
        with ExitStack() as closing:
            if models is None:
                work = closing.enter_context(tempfile.TemporaryDirectory(prefix="cosyvoice-triton-"))
                models = Path(work) / "models"
                steps.demo(models, options.get("stack", stacks.DEFAULT.name))
            self._load(StackOptions(models_dir=Path(models), **options), closing)
            self._closing = closing.pop_all()

    @classmethod
    def of(cls, options: StackOptions) -> "Speaker":
        """Return the speaker of a stack with these options."""
        given = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
        return cls(given.pop("models_dir"), **given)

    def _load(self, options: StackOptions, closing: ExitStack) -> None:
        chosen, _ = planned(options)
        chosen.require_files()
        llm = chosen.config(TensorrtLLMConfig) if chosen.llm_transport == "triton" else None
        speech = chosen.config(OrchestratorConfig)
        stack, config = stacks.named(chosen.stack), chosen.config(Token2WavConfig)
        service = load_token2wav(stack, config)
        closing.callback(service.close)
        with timed("prompt encoders"):
            device = "cpu" if config.prompt_device == "cpu" else config.device
            encoder = LocalPromptEncoder(stack, config.model_dir, device)
        closing.callback(encoder.close)
        self._pipeline = load_pipeline(stack, speech, llm, encoder, port_of(service, stack), closing)
        if warning := self._pipeline.texts.warning:
            logger.warning("%s", warning)
        self._default = None if speech.default_speaker else self._default_voice()
        self._loop = BackgroundLoop("speaker")
        closing.callback(self._loop.close, None if llm else self._pipeline.llm.aclose)

    @property
    def voices(self) -> list[str]:
        """Return the names of the registered voices, sorted."""
        return self._pipeline.voices.names()

    def stream(self, text: str, **options: Any) -> Iterator[np.ndarray]:
        """Yield the audio of `text` in chunks, float32 (N,) in -1..1, as they are rendered.

        voice: the name of a registered voice. reference: instead, a recording to clone, of 0.5 to 30 seconds: a file,
        or float32 (T,) at reference_sample_rate (16 kHz); reference_text: what it says, word for word. instruct_text:
        how to speak. pronunciation: words of the text and what is spoken for each. on_warning: called with what the
        caller should know although there is audio; without it, that is logged. All others are request parameters, such
        as seed=2, language="de" or speed=1.2, see docs/clients.md. Closing the iterator cancels the request.

        ValueError naming a value that cannot be used, OverloadedError without a place for a listener.
        """
        return self._loop.iterate(self._stream(text, **options))

    def astream(self, text: str, **options: Any) -> AsyncGenerator[np.ndarray, None]:
        """Yield what `stream` yields, in the caller's asyncio loop."""
        return self._loop.aiterate(self._stream(text, **options))

    def speak(self, text: str, **options: Any) -> np.ndarray:
        """Return the whole audio of `text`, float32 (N,) in -1..1, rendered at once; options and errors are those of
        `stream`. It waits while listeners are in a hurry."""
        return self._loop.run(self._speak(text, **options))

    def aspeak(self, text: str, **options: Any) -> Coroutine[Any, Any, np.ndarray]:
        """Return what `speak` returns, in the caller's asyncio loop."""
        return self._loop.arun(self._speak(text, **options))

    def convert(self, source: SpeechSource, **options: Any) -> Iterator[np.ndarray]:
        """Yield speech in another voice, as `stream` does, with its words and its timing: no LLM is asked.

        source: a file or float32 (T,) at source_sample_rate (16 kHz), of 0.5 to 120 seconds, or an iterable of such
        arrays of any length, of which what is known is converted before the next one comes. options: the voice, as of
        `stream`.
        """
        return self._loop.iterate(self._stream("", source=source, **options))

    def close(self) -> None:
        """Cancel the requests under way and free everything; the speaker cannot be used afterwards."""
        self._closing.close()

    def __enter__(self) -> "Speaker":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _stream(
        self, text: str, on_warning: OnWarning | None = None, **options: Any
    ) -> AsyncGenerator[np.ndarray, None]:
        warn, synthesizer = on_warning or _log_warning, self._pipeline.synthesizer
        synthesizer.refusal.check()
        async with aclosing(synthesizer.stream(await self._request(text, warn, **options), Events(warn))) as waveforms:
            async for waveform in waveforms:
                yield waveform

    async def _speak(self, text: str, on_warning: OnWarning | None = None, **options: Any) -> np.ndarray:
        warn = on_warning or _log_warning
        return await self._pipeline.synthesizer.offline(await self._request(text, warn, **options), Events(warn))

    async def _request(
        self,
        text: str,
        on_warning: OnWarning,
        voice: str | None = None,
        reference: str | Path | np.ndarray | None = None,
        reference_text: str | None = None,
        reference_sample_rate: int = PROMPT_SAMPLE_RATE,
        instruct_text: str | None = None,
        pronunciation: Mapping[str, str] | None = None,
        source: SpeechSource | None = None,
        source_sample_rate: int = PROMPT_SAMPLE_RATE,
        **parameters: int | float | str | bool,
    ) -> SynthesisRequest:
        if isinstance(reference, (str, Path)):
            recording = await asyncio.to_thread(load_recording, Path(reference))
            reference, reference_sample_rate = recording.wav, recording.rate
        pieces = None
        if isinstance(source, (str, Path)):
            recording = await asyncio.to_thread(load_recording, Path(source))
            source, source_sample_rate = recording.wav, recording.rate
        elif source is not None and not isinstance(source, np.ndarray):
            source, pieces = np.zeros(0, np.float32), in_thread(source)
        if pronunciation:
            parameters["pronunciation"] = json.dumps(pronunciations(pronunciation), ensure_ascii=False)
        request = self._pipeline.rules.request(
            text,
            reference_wav=reference,
            reference_sample_rate=None if reference is None else reference_sample_rate,
            reference_text=reference_text,
            speaker=voice,
            instruct_text=instruct_text,
            source_wav=source,
            source_sample_rate=source_sample_rate,
            pieces=pieces,
            parameters=parameters,
            on_warning=on_warning,
        )
        return dataclasses.replace(request, voice=self._default) if request.voice is None else request

    def _default_voice(self) -> str | None:
        """Return the voice of requests without one: None for what a server has, else the first registered one."""
        try:
            self._pipeline.voices.get()
            return None
        except ValueError:
            return next(iter(self.voices), None)


def _log_warning(warning: str) -> None:
    logger.warning("%s", warning)
