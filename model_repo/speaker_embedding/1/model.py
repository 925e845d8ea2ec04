"""16 kHz reference recordings -> x-vectors of their speakers."""

from typing import Any

import numpy as np
from cosyvoice_triton import triton_io
from cosyvoice_triton.config import SpeakerEmbeddingConfig
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.monitoring.health import ModelMonitor
from cosyvoice_triton.voice.encoders import SpeakerEncoder


class TritonPythonModel:
    """`reference_wav` FP32 [1, T], optional `reference_wav_len` INT32 [1, 1] -> `prompt_spk_embedding` FP16 [1, 192]"""

    def initialize(self, args: dict[str, str]) -> None:
        self._name = args["model_name"]
        config = SpeakerEmbeddingConfig.from_triton(args)
        self._encoder = SpeakerEncoder(config.model_dir, config.runtime, config.device, config.speaker_contexts)
        second = np.zeros(PROMPT_SAMPLE_RATE, np.float32)
        self._monitor = ModelMonitor(args, test=lambda: self._compute([second]))

    def execute(self, requests: list[Any]) -> list[Any]:
        return triton_io.respond_batch(requests, triton_io.reference, self._compute, model=self._name)

    def finalize(self) -> None:
        self._monitor.close()

    def _compute(self, waves: list[np.ndarray]) -> list[dict[str, np.ndarray]]:
        return [{"prompt_spk_embedding": vector.astype(np.float16)[None]} for vector in self._encoder(waves)]
