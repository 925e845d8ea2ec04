"""`audio_tokenizer` and `speaker_embedding` as Triton models: one answer for each recording of a batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from cosyvoice_triton import triton_io
from cosyvoice_triton.config import AudioTokenizerConfig, SpeakerEmbeddingConfig
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.llm.speech_tokens import read_first_speech_id
from cosyvoice_triton.monitoring.health import ModelMonitor
from cosyvoice_triton.voice.encoders import AudioTokenizer, SpeakerEncoder
from cosyvoice_triton.voice.prompt import Recording, validate_reference

Encoder = Callable[[Sequence[np.ndarray]], list[np.ndarray]]  # waves (N_i,) float32 -> the output of each, (n_i,)


def reference(request: Any, may_be_silent: bool = False) -> Recording:
    """Return the validated recording in `reference_wav`, without the padding after `reference_wav_len`.

    ValueError if it is missing or invalid.
    """
    wav = triton_io.require(request, "reference_wav")
    sent = triton_io.read_all(request, ["reference_wav_len", "reference_sample_rate"])
    rate = triton_io.scalar(sent, "reference_sample_rate")
    rate = PROMPT_SAMPLE_RATE if rate is None else rate
    length = triton_io.scalar(sent, "reference_wav_len")
    return Recording(validate_reference(wav, length, rate, may_be_silent=may_be_silent), rate=rate)


class RecordingModel(ABC):
    """Base class: `reference_wav` FP32 (1, T) and optionally `reference_wav_len` INT32 (1, 1) -> `output` (1, n)."""

    output: str  # set by each model.py's base class
    may_be_silent = False

    @abstractmethod
    def load(self, args: dict[str, str]) -> Encoder:
        """Return what computes the outputs of a batch."""

    def initialize(self, args: dict[str, str]) -> None:
        self._name = args["model_name"]
        self._encode = self.load(args)
        second = np.zeros(PROMPT_SAMPLE_RATE, np.float32)
        self._monitor = ModelMonitor(args, test=lambda: self._compute([second]))

    def execute(self, requests: list[Any]) -> list[Any]:
        return triton_io.respond_batch(
            requests, lambda request: reference(request, self.may_be_silent).wav, self._compute, model=self._name
        )

    def finalize(self) -> None:
        self._monitor.close()

    def _compute(self, waves: list[np.ndarray]) -> list[dict[str, np.ndarray]]:
        return [{self.output: values[None]} for values in self._encode(waves)]


class AudioTokenizerModel(RecordingModel):
    """Answers with speech tokens as ids of the LLM's vocabulary, INT32."""

    output = "prompt_speech_tokens"
    may_be_silent = True  # part of a recording that is converted

    def load(self, args: dict[str, str]) -> Encoder:
        config = AudioTokenizerConfig.from_triton(args)
        if config.device != "cpu":
            torch.set_num_threads(1)  # only the mels are computed on the CPU
        tokenizer = AudioTokenizer(config.model_dir, config.device)
        first_speech_id = read_first_speech_id(config.llm_tokenizer_dir)
        return lambda waves: [(tokens + first_speech_id).astype(np.int32) for tokens in tokenizer(waves)]


class SpeakerEmbeddingModel(RecordingModel):
    """Answers with the x-vector of the speaker, FP16 (1, 192)."""

    output = "prompt_spk_embedding"

    def load(self, args: dict[str, str]) -> Encoder:
        config = SpeakerEmbeddingConfig.from_triton(args)
        encoder = SpeakerEncoder(config.model_dir, config.runtime, config.device)
        return lambda waves: [vector.astype(np.float16) for vector in encoder(waves)]
