"""token2wav of every stack as a Triton model."""

from threading import Thread
from typing import Any

from cosyvoice_triton import triton_io
from cosyvoice_triton.config import Token2WavConfig
from cosyvoice_triton.llm.speech_tokens import read_first_speech_id
from cosyvoice_triton.monitoring.health import ModelMonitor
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.serving.requests import Tensors, read_request
from cosyvoice_triton.token2wav.serving.service import Token2WavService
from cosyvoice_triton.voice.encoders import ReferenceEncoder
from cosyvoice_triton.voice.model import reference
from cosyvoice_triton.voice.prompt import Prompt


class Token2WavModel:
    """Base class of token2wav's `TritonPythonModel`: requests are queued; the service's thread renders and answers."""

    stack: Stack  # set by each model.py

    def initialize(self, args: dict[str, str]) -> None:
        config = Token2WavConfig.from_triton(args)
        self._name = args["model_name"]
        self._first_speech_id = read_first_speech_id(config.llm_tokenizer_dir)
        # Loads its networks at the first request with a recording; the orchestrator sends tensors instead.
        self._reference = ReferenceEncoder(self.stack, config.model_dir, config.device)
        engine = Token2Wav.from_config(self.stack, config)
        self._service = Token2WavService(engine, idle_seconds=config.idle_seconds)
        self._monitor = ModelMonitor(
            args, test=self._service.test, read=lambda: {**self._service.stats(), **engine.counts}
        )

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            with triton_io.answer_later(request, model=self._name) as answer:
                tensors = triton_io.read_all(request)
                if "reference_wav" not in tensors:
                    self._submit(request, tensors, answer)
                else:  # encoding a recording takes a while and must not hold up the requests of other streams
                    Thread(target=self._encode, args=(request, tensors, answer), daemon=True).start()

    def _encode(self, request: Any, tensors: Tensors, answer: triton_io.DeferredAnswer) -> None:
        with answer:
            self._submit(request, tensors, answer, self._reference(reference(request)))

    def _submit(
        self, request: Any, tensors: Tensors, answer: triton_io.DeferredAnswer, prompt: Prompt | None = None
    ) -> None:
        chunk = read_request(tensors, self._first_speech_id, **triton_io.origin(request), prompt=prompt)
        self._service.submit(chunk, answer, answer.is_cancelled)

    def finalize(self) -> None:
        self._monitor.close()
        self._service.close()
