"""The model audio_tokenizer: its tensors, batches and errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton import samples
from cosyvoice_triton.constants import OFFICIAL_FIRST_SPEECH_ID, PROMPT_SAMPLE_RATE, SPEECH_VOCAB
from cosyvoice_triton.llm.speech_tokens import read_first_speech_id
from cosyvoice_triton.voice.audio import load_audio

from tests.conftest import ROOT, load_model
from tests.support import fake_triton
from tests.support.checkpoints import LLM_DIR, UNET_DIR

INPUTS = frozenset(("reference_wav", "reference_wav_len"))


def initialized(demo_models: Path, **parameters: str) -> Any:
    parameters = {"model_dir": str(demo_models / UNET_DIR)} | parameters
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    model = load_model(ROOT / "model_repo/audio_tokenizer/1/model.py").TritonPythonModel()
    args = {"model_name": "audio_tokenizer", "model_instance_name": "audio_tokenizer_0"}
    model.initialize(args | {"model_config": json.dumps(config)})
    return model


@pytest.fixture(scope="module")
def model(demo_models: Path) -> Any:
    return initialized(demo_models, llm_tokenizer_dir=str(demo_models / LLM_DIR))


@pytest.fixture(scope="module")
def recording() -> np.ndarray:
    return load_audio(samples.FOLDER / "reference_en.wav", PROMPT_SAMPLE_RATE)[None]  # (1, T)


def request(wav: np.ndarray, length: int) -> fake_triton.InferenceRequest:
    inputs = {"reference_wav": wav, "reference_wav_len": np.array([[length]], np.int32)}
    return fake_triton.InferenceRequest.from_client(inputs, declared=INPUTS)


def test_tokens_carry_ids_of_the_llm(model: Any, demo_models: Path, recording: np.ndarray) -> None:
    (response,) = model.execute([request(recording, recording.shape[1])])
    tokens = response.arrays()["prompt_speech_tokens"]
    first_speech_id = read_first_speech_id(str(demo_models / LLM_DIR))
    assert tokens.shape == (1, 134) and tokens.dtype == np.int32
    assert first_speech_id <= tokens.min() and tokens.max() < first_speech_id + SPEECH_VOCAB

    (response,) = initialized(demo_models).execute([request(recording, recording.shape[1])])
    official = response.arrays()["prompt_speech_tokens"]
    np.testing.assert_array_equal(official - OFFICIAL_FIRST_SPEECH_ID, tokens - first_speech_id)


def test_a_batch_equals_its_recordings_alone_in_order(model: Any, recording: np.ndarray) -> None:
    requests = [request(recording[:, start:], recording.shape[1] - start) for start in (0, 30_000, 8_000)]
    together = [response.arrays()["prompt_speech_tokens"] for response in model.execute(requests)]
    assert [tokens.shape for tokens in together] == [(1, 134), (1, 87), (1, 122)]
    for one, tokens in zip(requests, together, strict=True):
        (alone,) = model.execute([one])
        np.testing.assert_array_equal(alone.arrays()["prompt_speech_tokens"], tokens)


def test_padding_after_the_recording_is_ignored(model: Any, recording: np.ndarray) -> None:
    length = recording.shape[1]
    padded = np.concatenate([recording, np.full((1, 50_000), np.nan, np.float32)], axis=1)
    bare, with_padding = model.execute([request(recording, length), request(padded, length)])
    np.testing.assert_array_equal(with_padding.arrays()["prompt_speech_tokens"], bare.arrays()["prompt_speech_tokens"])


def test_a_bad_recording_gets_its_own_error_and_the_others_are_answered(model: Any, recording: np.ndarray) -> None:
    length = recording.shape[1]
    first, silent, too_long, last = model.execute(
        [
            request(recording, length),
            request(np.zeros_like(recording), length),
            request(recording, length + 1),
            request(recording, length),
        ]
    )
    assert silent.error().code() == fake_triton.TritonError.INVALID_ARG
    assert "reference_wav is silent" in silent.error().message()
    assert f"reference_wav_len {length + 1} is not in 1..{length}" in too_long.error().message()
    np.testing.assert_array_equal(first.arrays()["prompt_speech_tokens"], last.arrays()["prompt_speech_tokens"])
