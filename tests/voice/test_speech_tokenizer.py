"""Our speech tokenizer gives the ids of package s3tokenizer, over the same weights: in batches and alone."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from cosyvoice_triton import samples
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.voice import audio, features
from cosyvoice_triton.voice.encoders import AudioTokenizer

from tests.random_weights.speech_tokenizer import random_weights, write_speech_tokenizer


@pytest.fixture(scope="module")
def s3() -> Any:
    """The package, which imports torchaudio and uses it for files only."""
    names = ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, ModuleType(name))
        import s3tokenizer
        from s3tokenizer import model_v2, model_v3
    return s3tokenizer, model_v2, model_v3


def ids_of(s3: Any, model: Any, waves: list[np.ndarray]) -> list[np.ndarray]:
    mels, lengths = s3[0].padding([s3[0].log_mel_spectrogram(torch.from_numpy(wave)) for wave in waves])
    return [row[:length].numpy() for row, length in zip(*model.quantize(mels, lengths), strict=True)]


def recordings(seconds: float) -> list[np.ndarray]:
    """Speech of different lengths, the longest of `seconds`."""
    english, chinese = (audio.load_audio(path, PROMPT_SAMPLE_RATE) for path in sorted(samples.FOLDER.glob("*.wav"))[:2])
    long = np.tile(np.concatenate([english, chinese]), 4)[: int(seconds * PROMPT_SAMPLE_RATE)]
    return [long, english[:8_000], chinese, english[2_001:40_004]]


def test_log_mels_are_the_same(s3: Any) -> None:
    for wave in map(torch.from_numpy, recordings(10)):
        torch.testing.assert_close(features.log_mel(wave), s3[0].log_mel_spectrogram(wave), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("version", "seed"), [("v2", 0), ("v2", 1), ("v3", 2), ("v3", 3)])
def test_ids_of_random_weights_equal_those_of_the_package(s3: Any, version: str, seed: int, tmp_path: Path) -> None:
    path = tmp_path / f"speech_tokenizer_{version}.onnx"
    write_speech_tokenizer(path, random_weights(seed, 128, 2), "two layers")
    (tmp_path / f"{path.stem}.batch.onnx").touch()  # as in the official repositories
    package, v2, v3 = s3
    sizes = {"n_audio_state": 128, "n_audio_head": 2, "n_audio_layer": 2}
    if version == "v3":
        model = v3.S3TokenizerV3("speech_tokenizer_v3", v3.ModelConfigV3(**sizes)).eval()
        model.load_state_dict(package.onnx2torch_v3(str(path)), strict=True)
    else:
        model = v2.S3TokenizerV2("speech_tokenizer_v2_25hz", v2.ModelConfig(**sizes)).eval()
        model.load_state_dict(package.onnx2torch(str(path)), strict=True)
    tokenizer, waves = AudioTokenizer(tmp_path), recordings(30)
    wanted = ids_of(s3, model, waves)
    assert len(set(np.concatenate(wanted).tolist())) > 50
    for found in (tokenizer(waves), [tokenizer([wave])[0] for wave in waves]):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
