"""The networks that make a Prompt from a recording.

    AudioTokenizer     recordings -> speech tokens   (S3 tokenizer v2 or v3)
    SpeakerEncoder     recordings -> x-vectors       (CAM++, onnxruntime or TensorRT)
    reference_mel      a recording -> the flow's mel
    ReferenceEncoder   a recording -> its Prompt: all of these in one process

Both networks are read from the official ONNX files, of any size. Recordings are expected to have passed
`prompt.validate_reference`.
"""

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from cosyvoice_triton.config import SpeakerRuntime
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.networks.speech_tokenizer import load_speech_tokenizer, token_counts
from cosyvoice_triton.runtimes.network import Network
from cosyvoice_triton.runtimes.signatures import SPEAKER
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.voice import audio, features
from cosyvoice_triton.voice.prompt import Prompt, Recording, RecordingCache

logger = logging.getLogger(__name__)

SESSION_THREADS = 2  # of the CAM++ session: by default onnxruntime would use all cores and slow down other models
SECONDS_AT_ONCE = 60.0  # of recordings in a run of the speech tokenizer, padding included: 0.25 GiB of a GPU
TOKENIZER_FILES = "speech_tokenizer_v[23]*.onnx"


class AudioTokenizer:
    """S3 speech tokenizer v2, or v3 if the file's name says so: 16 kHz recordings to 25 tokens per second."""

    def __init__(self, model_dir: str | Path, device: str = "cpu") -> None:
        self._model = load_speech_tokenizer(_only_file(model_dir, TOKENIZER_FILES), device)
        self._device = device

    def __call__(self, waves: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Encode float32 waves (N_i,) of at most 30 s to int64 ids (P_i,) in 0..6560."""
        order = sorted(range(len(waves)), key=lambda index: len(waves[index]))  # the batches are then padded least
        at_once = int(SECONDS_AT_ONCE * PROMPT_SAMPLE_RATE)
        runs: list[list[int]] = [[]]
        for index in order:
            if runs[-1] and (len(runs[-1]) + 1) * len(waves[index]) > at_once:
                runs.append([])
            runs[-1].append(index)
        tokens: dict[int, np.ndarray] = {}
        for run in runs:
            tokens |= zip(run, self._encode([waves[index] for index in run]), strict=True)
        return [tokens[index] for index in range(len(waves))]

    def _encode(self, waves: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Encode one padded batch, masked by length."""
        mels = [features.log_mel(torch.from_numpy(wave)).T for wave in waves]  # (T_i, 128)
        lengths = torch.tensor([len(mel) for mel in mels], device=self._device)
        mel = pad_sequence(mels, batch_first=True).to(self._device).transpose(1, 2)  # (B, 128, T)
        ids = self._model(mel, lengths).cpu().numpy()  # (B, P)
        return [row[:count] for row, count in zip(ids, token_counts(lengths).tolist(), strict=True)]


class SpeakerEncoder:
    """CAM++ x-vectors of 16 kHz recordings, computed by onnxruntime on the CPU or by a TensorRT plan on `device`."""

    def __init__(self, model_dir: str | Path, runtime: SpeakerRuntime = "onnxruntime", device: str = "cpu") -> None:
        path = _only_file(model_dir, SPEAKER.file)
        self._device = torch.device(device if runtime == "tensorrt" else "cpu")
        # Imported here: each needs a package that the other does without.
        if runtime == "tensorrt":
            from cosyvoice_triton.runtimes.signatures import speaker
            from cosyvoice_triton.runtimes.tensorrt import TensorRTNetwork

            self._network: Network = TensorRTNetwork.load(speaker(), model_dir, device)
        else:
            from cosyvoice_triton.runtimes.onnx import OnnxNetwork

            self._network = OnnxNetwork(path, threads=SESSION_THREADS)
            if torch.device(device).type == "cuda":
                logger.info("the speaker encoder runs on the CPU: a TensorRT plan would be faster (docs/gpu.md)")
        (self._input,) = self._network.limits
        (silence,) = self([np.zeros(PROMPT_SAMPLE_RATE, np.float32)])
        if not np.isfinite(silence).all():
            raise ValueError(f"{path}: its x-vector of a second of silence is not finite")

    def __call__(self, waves: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Encode float32 waves (N_i,) to x-vectors (192,) float32, one after another: the network pools statistics over
        all frames and takes no lengths, so a batch could not be padded."""
        return [self._encode(wave) for wave in waves]

    def _encode(self, wave: np.ndarray) -> np.ndarray:
        bands = features.fbank(torch.from_numpy(wave), mean_normalised=True)[None]  # (1, T, 80)
        (output,) = self._network.run({self._input: bands.to(self._device)}).values()
        vector: np.ndarray = output[0].float().cpu().numpy()
        return vector


def reference_mel(recording: Recording, max_hz: float = features.MelConfig.max_hz) -> np.ndarray:
    """Return the log mel (frames, 80) float32 of a recording's 24 kHz version.

    max_hz: `Stack.mel_max_hz`.
    """
    waveform = torch.from_numpy(audio.at_rate(recording, SAMPLE_RATE))
    mel = features.mel_spectrogram(waveform[None], features.MelConfig(max_hz=max_hz))
    return mel[0].numpy().T  # (80, T) -> (T, 80)


class ReferenceEncoder:
    """A recording to its Prompt for a stack. Loads its networks on first use, because most processes receive finished
    prompts."""

    def __init__(
        self, stack: Stack, model_dir: str | Path, device: str = "cpu", speaker_runtime: SpeakerRuntime = "onnxruntime"
    ) -> None:
        self._mel_max_hz = stack.mel_max_hz
        self._model_dir = model_dir
        self._device = device
        self._speaker_runtime = speaker_runtime
        self._prompts: RecordingCache[Prompt] = RecordingCache()
        self._lock = Lock()  # one recording at a time, also while the networks are loading

    @cached_property
    def _networks(self) -> tuple[AudioTokenizer, SpeakerEncoder]:
        tokenizer = AudioTokenizer(self._model_dir, self._device)
        return tokenizer, SpeakerEncoder(self._model_dir, self._speaker_runtime, self._device)

    def __call__(self, recording: Recording) -> Prompt:
        """Return the prompt of a checked recording, with its transcript."""
        with self._lock:
            if (known := self._prompts.get(recording)) is not None:
                return known.of(recording)
            tokenizer, speaker = self._networks
            mel, wav = reference_mel(recording, self._mel_max_hz), audio.at_rate(recording, PROMPT_SAMPLE_RATE)
            parts = tokenizer([wav])[0], mel, speaker([wav])[0]
            prompt = Prompt.aligned(*parts, recording.text, recording.instruction)
            self._prompts.put(recording, prompt)
            return prompt

    def clear(self) -> None:
        """Forget the prompts of earlier recordings; the networks are loaded."""
        self._prompts = RecordingCache()
        _ = self._networks


def _only_file(model_dir: str | Path, pattern: str) -> Path:
    """Return the one file of a checkpoint directory that matches; official checkpoints name the tokenizer differently.
    Beside it they may have the same network for batches, NAME.batch.onnx, which is not read."""
    found = sorted(path for path in Path(model_dir).glob(pattern) if not path.stem.endswith(".batch"))
    if len(found) != 1:
        raise ValueError(f"{model_dir}: expected one file {pattern}, found {[path.name for path in found]}")
    return found[0]
