"""16 kHz reference recordings -> prompt speech tokens, as ids of the LLM's vocabulary."""

from typing import Any

import numpy as np
import torch
from cosyvoice_triton import triton_io
from cosyvoice_triton.config import AudioTokenizerConfig
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.llm.speech_tokens import read_first_speech_id
from cosyvoice_triton.monitoring.health import ModelMonitor
from cosyvoice_triton.voice.encoders import AudioTokenizer


class TritonPythonModel:
    """`reference_wav` FP32 [1, T], `reference_wav_len` INT32 [1, 1] -> `prompt_speech_tokens` INT32 [1, n]."""

    def initialize(self, args: dict[str, str]) -> None:
        self._name = args["model_name"]
        config = AudioTokenizerConfig.from_triton(args)
        if config.device != "cpu":
            torch.set_num_threads(1)  # only the mels are computed on the CPU
        self._tokenizer = AudioTokenizer(config.model_dir, config.device)
        self._first_speech_id = read_first_speech_id(config.llm_tokenizer_dir)
        second = np.zeros(PROMPT_SAMPLE_RATE, np.float32)
        self._monitor = ModelMonitor(args, test=lambda: self._compute([second]))

    def execute(self, requests: list[Any]) -> list[Any]:
        return triton_io.respond_batch(requests, triton_io.reference, self._compute, model=self._name)

    def finalize(self) -> None:
        self._monitor.close()

    def _compute(self, waves: list[np.ndarray]) -> list[dict[str, np.ndarray]]:
        tokens = self._tokenizer(waves)
        return [{"prompt_speech_tokens": (ids + self._first_speech_id).astype(np.int32)[None]} for ids in tokens]
