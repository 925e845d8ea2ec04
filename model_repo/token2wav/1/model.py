"""token2wav: speech tokens to 24 kHz audio, CosyVoice2's UNet flow and HiFT. A stream is a sequence."""

from typing import Any

from common import triton_io
from common.config import Token2WavConfig
from common.llm.speech_tokens import read_first_speech_id
from common.process.metrics import MetricsPublisher
from common.token2wav.engine import Precision, Token2Wav
from common.token2wav.requests import CONTROLS, PROMPT_TENSORS, chunk_request
from common.token2wav.service import Token2WavService

INPUTS = ("target_speech_tokens", *PROMPT_TENSORS, "token_offset", "finalize", "speed", *CONTROLS)


class TritonPythonModel:
    """Requests are queued; the service's thread renders and answers them."""

    def initialize(self, args: dict[str, str]) -> None:
        config = Token2WavConfig.from_triton(args)
        self._name = args["model_name"]
        self._first_speech_id = read_first_speech_id(config.llm_tokenizer_dir)
        engine = Token2Wav.load_unet(
            config.model_dir,
            device=config.device,
            steps=config.n_timesteps,
            max_streams=config.max_streams,
            precision=Precision.named(
                config.flow_precision, config.vocoder_precision, config.device, config.flow_runtime
            ),
            runtime=config.flow_runtime,
        )
        self._service = Token2WavService(engine, max_streams=config.max_streams, idle_seconds=config.idle_seconds)
        self._publisher = MetricsPublisher(lambda: self._service.stats().values(), args)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            with triton_io.answer_later(request, "waveform", model=self._name) as answer:
                tensors = triton_io.read_all(request, INPUTS)
                self._service.submit(chunk_request(tensors, self._first_speech_id), answer, answer.is_cancelled)

    def finalize(self) -> None:
        self._publisher.close()
        self._service.close()
