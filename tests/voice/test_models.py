"""The models audio_tokenizer and speaker_embedding: their tensors, batches and errors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton import samples
from cosyvoice_triton.constants import OFFICIAL_FIRST_SPEECH_ID, PROMPT_SAMPLE_RATE, SPEAKER_DIM, SPEECH_VOCAB
from cosyvoice_triton.llm.speech_tokens import read_first_speech_id
from cosyvoice_triton.voice.audio import load_audio

from tests.conftest import ROOT, initialized_model
from tests.support import fake_triton
from tests.support.checkpoints import LLM_DIR, UNET_DIR

INPUTS = frozenset(("reference_wav", "reference_wav_len"))
OUTPUTS = {"audio_tokenizer": "prompt_speech_tokens", "speaker_embedding": "prompt_spk_embedding"}


def initialized(name: str, demo_models: Path, **parameters: str) -> Any:
    return initialized_model(
        ROOT / f"model_repo/{name}/1/model.py", model_dir=str(demo_models / UNET_DIR), **parameters
    )


@pytest.fixture(scope="module")
def models(demo_models: Path) -> dict[str, Any]:
    tokenizer = {"llm_tokenizer_dir": str(demo_models / LLM_DIR)}
    return {name: initialized(name, demo_models, **(tokenizer if "token" in name else {})) for name in OUTPUTS}


@pytest.fixture(scope="module")
def recording() -> np.ndarray:
    return load_audio(samples.FOLDER / "reference_en.wav", PROMPT_SAMPLE_RATE)[None]  # (1, T)


def request(wav: np.ndarray, length: int | None = None) -> fake_triton.InferenceRequest:
    lengths = {} if length is None else {"reference_wav_len": np.array([[length]], np.int32)}
    return fake_triton.InferenceRequest.from_client({"reference_wav": wav} | lengths, declared=INPUTS)


def test_tokens_carry_ids_of_the_llm(models: dict[str, Any], demo_models: Path, recording: np.ndarray) -> None:
    official = initialized("audio_tokenizer", demo_models)
    answers = [model.execute([request(recording)])[0] for model in (models["audio_tokenizer"], official)]
    tokens, of_official = (answer.arrays()["prompt_speech_tokens"] for answer in answers)
    first_speech_id = read_first_speech_id(str(demo_models / LLM_DIR))
    assert tokens.shape == (1, 134) and tokens.dtype == np.int32
    assert first_speech_id <= tokens.min() and tokens.max() < first_speech_id + SPEECH_VOCAB
    np.testing.assert_array_equal(of_official - OFFICIAL_FIRST_SPEECH_ID, tokens - first_speech_id)


def test_the_x_vector_is_in_half_precision(models: dict[str, Any], recording: np.ndarray) -> None:
    vector = models["speaker_embedding"].execute([request(recording)])[0].arrays()["prompt_spk_embedding"]
    assert vector.shape == (1, SPEAKER_DIM) and vector.dtype == np.float16


@pytest.mark.parametrize("name", OUTPUTS)
def test_each_recording_of_a_batch_has_its_own_answer_without_its_padding(name, models, recording) -> None:
    """test_encoders.py compares batches with their recordings alone. A bad recording fails alone."""
    size = recording.shape[1]
    padded = np.concatenate([recording, np.full((1, 50_000), np.nan, np.float32)], axis=1)
    sent = [(recording, None), (padded, size), (0 * recording, None), (recording, size + 1)]
    sent.append((recording[:, 30_000:], None))
    bare, cut, silent, too_long, other = models[name].execute([request(*each) for each in sent])
    whole, alike, part = (answer.arrays()[OUTPUTS[name]] for answer in (bare, cut, other))
    np.testing.assert_allclose(alike, whole, atol=1e-3)
    assert whole.shape != part.shape or np.abs(whole - part).max() > 0.01
    if name == "audio_tokenizer":  # which also reads parts of recordings
        assert silent.arrays()[OUTPUTS[name]].size == whole.size
        silent = too_long
    for answer, message in (silent, "reference_wav"), (too_long, f"reference_wav_len {size + 1} is not in 1"):
        assert answer.error().code() == fake_triton.TritonError.INVALID_ARG and message in answer.error().message()
