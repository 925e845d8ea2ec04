"""Models that judge speech. Their weights are files of other packages, which are read here and never imported.

Those packages import libraries that need a compiler or hundreds of megabytes. Every judge takes waves of 16 kHz,
float32 (N,) in -1..1.
"""

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.text.frontend import normalized
from cosyvoice_triton.text.language import Language, language_of
from cosyvoice_triton.voice.features import resample

INSTALL = {  # how pip installs a package
    "moonshine_cpp": "'cosyvoice-triton[evaluate]'",
    "speechmos": "'cosyvoice-triton[evaluate]'",
    "resemblyzer": "--no-deps Resemblyzer",  # what it requires needs a compiler
}
# A character of scripts without spaces is a unit, and so is a word of other scripts.
_UNIT = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|(?:(?![\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af])[^\W_])+"
)

Recogniser = Callable[[Sequence[Path], Sequence[np.ndarray]], list[str]]


class MissingJudgeError(ValueError):
    """A judge's package is not installed. The message is one line with the command that installs it."""


def data_file(package: str, name: str) -> Path:
    """Return a file of a package without importing it. MissingJudgeError if it is not installed."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingJudgeError(f"{package} is not installed: pip install {INSTALL[package]}")
    return Path(spec.submodule_search_locations[0]) / name


def onnx_session(path: Path) -> Any:
    """Return a session of ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # beside a server it only takes its cores
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def at_16k(wave: np.ndarray) -> np.ndarray:
    """Return a wave of 24 kHz as judges take it."""
    resampled: np.ndarray = resample(torch.from_numpy(wave), SAMPLE_RATE, PROMPT_SAMPLE_RATE).numpy()
    return resampled.clip(-1, 1)


# --- words -------------------------------------------------------------------------------------------------------


def units(text: str, language: Language) -> list[str]:
    """Return the words of a text, or characters in Chinese, Japanese and Korean: lower case, numbers in that language's
    words, no punctuation."""
    spoken = normalized(text, language).lower()
    return _UNIT.findall(re.sub(r"['’]", "", spoken))


def errors(text: str, recognised: str) -> tuple[int, int]:
    """Return how many units were inserted, left out or replaced, and how many the text has."""
    language = language_of(text) or "en"  # also of what was recognised, which may be a number alone
    said, heard = units(text, language), units(recognised, language)
    row = list(range(len(heard) + 1))  # distances of the empty text to each prefix of what was recognised
    for count, unit in enumerate(said, 1):
        above, row = row, [count]
        for column, other in enumerate(heard):
            row.append(min(row[column] + 1, above[column + 1] + 1, above[column] + (unit != other)))
    return row[-1], len(said)


class Moonshine:
    """Moonshine's base model for English, greedy."""

    START, END = 1, 2
    TOKENS_PER_SECOND = 6.5  # more are a loop
    HEADS, HEAD_SIZE = 8, 52

    def __init__(self) -> None:
        """Raise MissingJudgeError without the package."""
        self._encoder, self._decoder = (
            onnx_session(data_file("moonshine_cpp", f"models/base-en/{name}.ort"))
            for name in ("encoder_model", "decoder_model_merged")
        )
        self._tokens = _pieces(data_file("moonshine_cpp", "models/base-en/tokenizer.bin").read_bytes())
        self._past = [each.name for each in self._decoder.get_inputs() if each.name.startswith("past_key_values")]

    def __call__(self, paths: Sequence[Path], waves: Sequence[np.ndarray]) -> list[str]:
        """Return what is said in each wave."""
        return [self._recognise(wave) for wave in waves]

    def _recognise(self, wave: np.ndarray) -> str:
        padded = np.pad(wave, (0, PROMPT_SAMPLE_RATE // 4))[None]  # (1, N); the encoder cannot read less than 0.1 s
        (hidden,) = self._encoder.run(None, {"input_values": padded})
        past = {name: np.zeros((1, self.HEADS, 0, self.HEAD_SIZE), np.float32) for name in self._past}
        tokens = [self.START]
        for step in range(int(len(wave) / PROMPT_SAMPLE_RATE * self.TOKENS_PER_SECOND) + 1):
            given = {
                "input_ids": np.array([[tokens[-1]]]),
                "encoder_hidden_states": hidden,
                "use_cache_branch": np.array([step > 0]),
            }
            logits, *present = self._decoder.run(None, given | past)
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] == self.END:
                break
            for name, value in zip(self._past, present, strict=True):
                if step == 0 or "decoder" in name:  # the encoder's are complete after the first step
                    past[name] = value
        return b"".join(self._tokens[token] for token in tokens).decode(errors="replace").replace("▁", " ").strip()


def _pieces(content: bytes) -> list[bytes]:
    """Return the bytes of every token. A length of 128 or more has two bytes, low part first; 0 is no token."""
    pieces, at = [], 0
    while at < len(content):
        size, at = content[at], at + 1
        if size >= 128:
            size, at = size - 128 + 128 * content[at], at + 1
        piece, at = content[at : at + size], at + size
        pieces.append(b"" if piece in (b"<s>", b"</s>", b"<unk>") else piece)
    return pieces


class CommandRecogniser:
    """A program that is called once, with the paths of all files in the place of {wav}, and prints a line for each."""

    def __init__(self, command: str) -> None:
        """Raise ValueError if the command has no {wav}."""
        self._command = shlex.split(command)
        if "{wav}" not in self._command:
            raise ValueError(f"--recogniser {command!r} has no {{wav}}, which becomes the paths of the files")

    def __call__(self, paths: Sequence[Path], waves: Sequence[np.ndarray]) -> list[str]:
        """Return its lines. ValueError if it fails or prints another number of them."""
        at = self._command.index("{wav}")
        command = [*self._command[:at], *map(str, paths), *self._command[at + 1 :]]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if found.returncode:
            raise ValueError(f"the recogniser {self._command[0]} ended with code {found.returncode}")
        if len(texts := found.stdout.splitlines()) != len(paths):
            given = f"{len(texts)} texts for {len(paths)} files"
            raise ValueError(f"the recogniser {self._command[0]} gave {given}: one for each, in order")
        return texts


# --- quality and similarity --------------------------------------------------------------------------------------


class Dnsmos:
    """DNSMOS P.835, its overall score: 1 is bad, 5 excellent; clean recordings have 3 to 3.5."""

    SAMPLES = int(9.01 * PROMPT_SAMPLE_RATE)
    SCALE = np.poly1d([-0.06766283, 1.11546468, 0.04602535])  # its authors', from the network's score

    def __init__(self) -> None:
        """Raise MissingJudgeError without the package."""
        self._network = onnx_session(data_file("speechmos", "dnsmos_models/sig_bak_ovr.onnx"))

    def __call__(self, wave: np.ndarray) -> float:
        """Return the mean score of windows of 9 s, one a second; a shorter wave is repeated."""
        while len(wave) < self.SAMPLES:
            wave = np.concatenate([wave, wave])
        starts = range(0, len(wave) - self.SAMPLES + 1, PROMPT_SAMPLE_RATE)
        scores = [self._network.run(None, {"input_1": wave[None, at : at + self.SAMPLES]})[0][0, 2] for at in starts]
        return float(np.mean(self.SCALE(np.array(scores))))


class Similarity:
    """The cosine between speaker vectors of Resemblyzer (GE2E)."""

    BINS, WINDOW, STEP = 40, 160, 77  # frames of 10 ms, in each window of the LSTM and between two of them
    LEVEL = 10 ** (-30 / 20)  # quieter waves are amplified

    def __init__(self) -> None:
        """Raise MissingJudgeError without the package."""
        from transformers.audio_utils import mel_filter_bank

        weights = torch.load(data_file("resemblyzer", "pretrained.pt"), "cpu", weights_only=True)["model_state"]
        self._lstm, self._linear = torch.nn.LSTM(self.BINS, 256, 3, batch_first=True), torch.nn.Linear(256, 256)
        for name, network in (("lstm.", self._lstm), ("linear.", self._linear)):
            network.load_state_dict({key[len(name) :]: value for key, value in weights.items() if key.startswith(name)})
        filters = mel_filter_bank(
            201, self.BINS, 0, PROMPT_SAMPLE_RATE / 2, PROMPT_SAMPLE_RATE, norm="slaney", mel_scale="slaney"
        )
        self._filters = torch.from_numpy(filters).float()  # (201, 40)

    @torch.inference_mode()
    def vector(self, wave: np.ndarray) -> np.ndarray:
        """Return the speaker vector (256,) of a wave, of unit length."""
        level = float(np.sqrt(np.mean(np.square(wave)))) or 1.0
        samples = torch.from_numpy(wave * max(1.0, self.LEVEL / level))
        spectrum = torch.stft(
            samples, 400, 160, window=torch.hann_window(400), pad_mode="constant", return_complex=True
        )  # (201, T)
        mel = spectrum.abs().square().T @ self._filters  # (T, 40)
        starts = range(0, max(1, len(mel) - self.WINDOW + self.WINDOW // 4), self.STEP)  # the last one may be padded
        mel = torch.nn.functional.pad(mel, (0, 0, 0, max(0, starts[-1] + self.WINDOW - len(mel))))
        _, (hidden, _) = self._lstm(torch.stack([mel[at : at + self.WINDOW] for at in starts]))
        vectors = torch.nn.functional.normalize(self._linear(hidden[-1]).relu(), dim=1)
        return torch.nn.functional.normalize(vectors.mean(0), dim=0).numpy()

    def __call__(self, wave: np.ndarray, reference: np.ndarray) -> float:
        """Return the similarity of two voices, 0 to 1."""
        return float(self.vector(wave) @ self.vector(reference))
