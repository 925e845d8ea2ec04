"""token2wav_dit: speech tokens to 24 kHz audio, Step-Audio2's DiT flow and HiFT."""

from threading import Thread
from typing import Any

from cosyvoice_triton import stacks, triton_io
from cosyvoice_triton.config import Token2WavConfig
from cosyvoice_triton.llm.speech_tokens import read_first_speech_id
from cosyvoice_triton.monitoring.health import ModelMonitor
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.serving.requests import PROMPT_TENSORS, read_request
from cosyvoice_triton.token2wav.serving.service import Token2WavService
from cosyvoice_triton.voice.encoders import ReferenceEncoder
from cosyvoice_triton.voice.model import reference

REFERENCE = ("reference_wav", "reference_wav_len")
INPUTS = ("target_speech_tokens", *PROMPT_TENSORS, *REFERENCE, "finalize", "speed", "audio_left")


class TritonPythonModel:
    """Requests are queued; the service's thread renders and answers them."""

    stack = stacks.DIT

    def initialize(self, args: dict[str, str]) -> None:
        config = Token2WavConfig.from_triton(args)
        self._name = args["model_name"]
        self._first_speech_id = read_first_speech_id(config.llm_tokenizer_dir)
        # Loads its networks at the first request with a recording; the orchestrator sends tensors instead.
        self._reference = ReferenceEncoder(self.stack, config.model_dir, config.device)
        engine = Token2Wav.from_config(self.stack, config)
        self._service = Token2WavService(
            engine,
            idle_seconds=config.idle_seconds,
            admission=config.admission,
            max_start_wait_seconds=config.max_start_wait_seconds,
        )
        self._monitor = ModelMonitor(
            args, test=self._service.test, read=lambda: {**self._service.stats().values(), **engine.counts}
        )

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            answer = triton_io.answer_later(request, "waveform", model=self._name)
            if triton_io.read(request, "reference_wav") is None:
                self._accept(request, answer)
            else:  # encoding a recording takes a while and must not hold up the requests of other streams
                Thread(target=self._accept, args=(request, answer), daemon=True).start()

    def _accept(self, request: Any, answer: triton_io.DeferredAnswer) -> None:
        with answer:
            tensors = triton_io.read_all(request, INPUTS)
            prompt = self._reference(reference(request)) if "reference_wav" in tensors else None
            chunk = read_request(tensors, self._first_speech_id, **triton_io.origin(request), prompt=prompt)
            self._service.submit(chunk, answer, answer.is_cancelled)

    def finalize(self) -> None:
        self._monitor.close()
        self._service.close()
