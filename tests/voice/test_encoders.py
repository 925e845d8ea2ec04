"""The speech tokenizer and the speaker encoder: the official files' values, the ids of package s3tokenizer, and a batch
equals its recordings alone. The models audio_tokenizer and speaker_embedding: their tensors, batches and errors."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from cosyvoice_triton import samples, stacks
from cosyvoice_triton.constants import OFFICIAL_FIRST_SPEECH_ID, PROMPT_SAMPLE_RATE, SPEAKER_DIM, SPEECH_VOCAB
from cosyvoice_triton.llm.speech_tokens import read_first_speech_id
from cosyvoice_triton.runtimes import tensorrt
from cosyvoice_triton.runtimes.signatures import speaker
from cosyvoice_triton.voice import features
from cosyvoice_triton.voice.audio import load_audio
from cosyvoice_triton.voice.encoders import AudioTokenizer, ReferenceEncoder, SpeakerEncoder
from cosyvoice_triton.voice.prompt import Recording

from tests.conftest import ROOT, initialized_model
from tests.random_weights.checkpoint import OFFICIAL, SMALL, parts
from tests.random_weights.speech_tokenizer import random_weights, write_speech_tokenizer
from tests.support import fake_tensorrt, fake_triton
from tests.support.checkpoints import DIT_DIR, LLM_DIR, UNET_DIR


def references() -> list[np.ndarray]:
    return [load_audio(samples.FOLDER / f"reference_{name}.wav", PROMPT_SAMPLE_RATE) for name in ("en", "zh")]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for name in ("speech_tokenizer_v2_25hz.onnx", "campplus.onnx"):
        parts(SMALL, 0, leading_silence=False)[f"{DIT_DIR}/{name}"](directory / name)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> AudioTokenizer:
    return AudioTokenizer(model_dir)


@pytest.fixture(scope="module")
def encoder(model_dir: Path) -> SpeakerEncoder:
    return SpeakerEncoder(model_dir)


def test_long_recordings_are_encoded_in_several_batches_without_another_result(tokenizer, monkeypatch) -> None:
    """A batch of 16 recordings of 30 s would take 2 GB of a GPU."""
    first, second = references()
    waves = [second, first[:16_000], second[:24_000], first]
    expected = tokenizer(waves)
    batches: list[int] = []
    encode = tokenizer._encode
    monkeypatch.setattr(tokenizer, "_encode", lambda batch: batches.append(len(batch)) or encode(batch))
    monkeypatch.setattr("cosyvoice_triton.voice.encoders.SECONDS_AT_ONCE", 3.0)
    for tokens, wanted in zip(tokenizer(waves), expected, strict=True):
        np.testing.assert_array_equal(tokens, wanted)
    assert batches == [2, 1, 1]


def test_tokenizer_directory_needs_exactly_one_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"speech_tokenizer_v\[23\]\*\.onnx, found \[\]"):
        AudioTokenizer(tmp_path)
    for name in ("speech_tokenizer_v2.onnx", "speech_tokenizer_v2_25hz.onnx"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"found \['speech_tokenizer_v2.onnx', 'speech_tokenizer_v2_25hz.onnx'\]"):
        AudioTokenizer(tmp_path)


def test_speaker_vector_ignores_loudness(encoder: SpeakerEncoder) -> None:
    """Features are normalised by their mean over time; a gain is a constant in their logarithm."""
    wave = np.random.default_rng(0).normal(0, 0.1, PROMPT_SAMPLE_RATE).astype(np.float32)
    np.testing.assert_allclose(encoder([wave])[0], encoder([wave * 0.5])[0], atol=1e-3)


@pytest.mark.slow
def test_a_known_recording_has_the_transcript_and_the_instruction_of_now(model_dir: Path) -> None:
    encode, (wav, _) = ReferenceEncoder(stacks.DIT, model_dir), references()
    first, second = (encode(Recording(wav, *of)) for of in (("One.", PROMPT_SAMPLE_RATE, "Slow."), ("Two.",)))
    assert (first.text, first.instruction, second.text, second.instruction) == ("One.", "Slow.", "Two.", "")
    assert second.tokens is first.tokens


def test_a_speech_tokenizer_of_another_versions_depth_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "speech_tokenizer_v3.onnx"
    width, layers = OFFICIAL.tokenizers["v3"]
    write_speech_tokenizer(path, random_weights(0, width, 1), "one layer")
    with pytest.raises(ValueError, match=rf"v3.onnx has 1 layers, but v3 of the tokenizer has {layers}: .* again"):
        AudioTokenizer(tmp_path)
    path.unlink()
    write_speech_tokenizer(tmp_path / "speech_tokenizer_v2.onnx", random_weights(0, width, 1), "one layer")
    with pytest.raises(ValueError, match=f"has 1 layers, but v2 of the tokenizer has {OFFICIAL.tokenizers['v2'][1]}"):
        AudioTokenizer(tmp_path)


def test_a_damaged_speech_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "speech_tokenizer_v2.onnx").write_bytes(b"half a file")
    with pytest.raises(ValueError, match="speech_tokenizer_v2.onnx is not a speech tokenizer, or is damaged"):
        AudioTokenizer(tmp_path)


@pytest.mark.parametrize(
    ("network", "file"), [(AudioTokenizer, "speech_tokenizer_v2_25hz.onnx"), (SpeakerEncoder, "campplus.onnx")]
)
def test_a_file_with_values_that_are_no_numbers_is_named(network, file, model_dir, tmp_path) -> None:
    model = onnx.load(model_dir / file)
    weights = next(weights for weights in model.graph.initializer if len(weights.dims) == 3)
    values = onnx.numpy_helper.to_array(weights).copy()
    values[0] = np.nan
    weights.CopyFrom(onnx.numpy_helper.from_array(values, weights.name))
    onnx.save(model, tmp_path / file)
    with pytest.raises(ValueError, match=rf"{file}.* not finite"):
        network(tmp_path)


def test_a_plan_encodes_recordings_as_the_onnx_file_does(model_dir, encoder, tmp_path, monkeypatch) -> None:
    fake_tensorrt.install(monkeypatch)
    monkeypatch.setattr(tensorrt, "machine", lambda device: "here")
    (tmp_path / "campplus.onnx").write_bytes((model_dir / "campplus.onnx").read_bytes())
    plan = tensorrt.plan_file(speaker(), tmp_path, "here")
    tensorrt.write_plan(plan, fake_tensorrt.plan(tmp_path / "campplus.onnx", speaker()))
    for found, wanted in zip(SpeakerEncoder(tmp_path, "tensorrt")(references()), encoder(references()), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


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
    english, chinese = references()
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
    return references()[0][None]  # (1, T)


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
