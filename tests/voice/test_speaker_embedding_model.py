"""The model speaker_embedding: its tensors, batches and errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SPEAKER_DIM
from cosyvoice_triton.voice.audio import load_audio

from tests.conftest import ROOT, load_model
from tests.support import fake_triton
from tests.support.checkpoints import UNET_DIR

INPUTS = frozenset(("reference_wav", "reference_wav_len"))


@pytest.fixture(scope="module")
def model(demo_models: Path) -> Any:
    config = {"parameters": {"model_dir": {"string_value": str(demo_models / UNET_DIR)}}}
    model = load_model(ROOT / "model_repo/speaker_embedding/1/model.py").TritonPythonModel()
    args = {"model_name": "speaker_embedding", "model_instance_name": "speaker_embedding_0"}
    model.initialize(args | {"model_config": json.dumps(config)})
    return model


@pytest.fixture(scope="module")
def recordings() -> list[np.ndarray]:
    files = [ROOT / f"tests/assets/reference_{name}.wav" for name in ("en", "zh")]
    return [load_audio(file, PROMPT_SAMPLE_RATE)[None] for file in files]  # (1, T) each


def request(wav: np.ndarray, length: int | None = None) -> fake_triton.InferenceRequest:
    inputs = {"reference_wav": wav}
    if length is not None:
        inputs["reference_wav_len"] = np.array([[length]], np.int32)
    return fake_triton.InferenceRequest.from_client(inputs, declared=INPUTS)


def vectors(responses: list[fake_triton.InferenceResponse]) -> list[np.ndarray]:
    return [response.arrays()["prompt_spk_embedding"] for response in responses]


def test_each_voice_of_a_batch_gets_its_own_vector(model: Any, recordings: list[np.ndarray]) -> None:
    english, mandarin = recordings
    requests = [request(english), request(mandarin), request(english[:, : mandarin.shape[1]])]
    together = vectors(model.execute(requests))
    assert all(vector.shape == (1, SPEAKER_DIM) and vector.dtype == np.float16 for vector in together)
    assert np.abs(together[0] - together[1]).max() > 0.1
    for one, vector in zip(requests, together, strict=True):
        np.testing.assert_allclose(vectors(model.execute([one]))[0], vector, atol=1e-3)


def test_the_length_is_optional_and_padding_is_ignored(model: Any, recordings: list[np.ndarray]) -> None:
    english = recordings[0]
    padded = np.concatenate([english, np.zeros((1, 40_000), np.float32)], axis=1)
    bare, cut, whole = vectors(model.execute([request(english), request(padded, english.shape[1]), request(padded)]))
    np.testing.assert_array_equal(cut, bare)
    assert np.abs(whole - bare).max() > 0.1  # without the length the zeros are part of the recording


def test_a_bad_recording_gets_its_own_error_and_the_others_are_answered(
    model: Any, recordings: list[np.ndarray]
) -> None:
    short, good = model.execute([request(recordings[0][:, :1_000]), request(recordings[1])])
    assert short.error().code() == fake_triton.TritonError.INVALID_ARG
    assert "reference_wav of 1000 samples lasts 0.0625 s" in short.error().message()
    assert good.arrays()["prompt_spk_embedding"].shape == (1, SPEAKER_DIM)
