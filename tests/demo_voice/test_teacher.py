"""The teacher with stand-ins for its networks: batches, labels, clips, files; and its weights from a small graph."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from demo_voice.training import kokoro, kokoro_weights, speech
from demo_voice.training.dataset import TOKEN_PHONES, TOKEN_SAMPLES
from demo_voice.training.kokoro import FRAME_SAMPLES, FRAME_STEP, SAMPLE_RATE, STYLE, VOICES, Spoken, Teacher, Utterance
from demo_voice.training.phonemes import PHONES, letter_labels, sampled

LETTERS = " .,abkˈː"


class FakePredictor(nn.Module):
    """As many frames for a letter as its id; its features are its id."""

    def forward(self, context, style, counts, alignment, padding):
        frames = context[:, 0]  # (B, N)
        logits = torch.full((*frames.shape, 50), -100.0)
        logits[torch.arange(50) < frames[..., None]] = 100.0
        assert (counts == (~padding).sum(1)).all()
        return logits, context.repeat(1, 640, 1)

    def F0Ntrain(self, prosody, style):  # noqa: N802
        return prosody[:, 0], prosody[:, 0]


class FakeDecoder(nn.Module):
    """A wave whose samples are the ids of their letters, divided by 100."""

    def forward(self, sounds, f0, energy, style):
        if (style[:, 0] == 13).any():
            raise RuntimeError("out of memory")
        return (sounds[:, :1] / 100).repeat_interleave(FRAME_SAMPLES, dim=2)


@pytest.fixture
def teacher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Teacher:
    networks = nn.ModuleDict({"predictor": FakePredictor(), "decoder": FakeDecoder(), "bert_encoder": nn.Identity()})
    ids = {name: nn.Identity() for name in ("bert", "text_encoder")}
    networks.update(ids)
    networks["bert"].forward = lambda ids, attention_mask: SimpleNamespace(last_hidden_state=ids.float()[..., None])
    networks["text_encoder"].forward = lambda ids, counts, padding: ids.float()[:, None].repeat(1, 512, 1)
    monkeypatch.setattr(kokoro, "_networks", lambda folder: networks)
    tables = {f"j{name}": np.full((510, 1, 2 * STYLE), index, np.float32) for index, name in enumerate(
        ("f_nezumi", "m_kumo", "f_gongitsune", "f_alpha", "f_tebukuro"))}  # fmt: skip
    np.savez(tmp_path / "voices.npz", **tables)
    vocab = ", ".join(f'"{letter}": {index + 1}' for index, letter in enumerate(LETTERS))
    (tmp_path / "vocab.json").write_text("{" + vocab + "}", encoding="utf-8")
    return Teacher(tmp_path, "cpu")


def said(teacher: Teacher, texts: Sequence[str], speed: float = 1.0) -> dict[int, Spoken]:
    utterances = [Utterance(teacher.ids(text), 0, speed) for text in texts]
    return {spoken.index: spoken for spoken in teacher.speak(utterances)}


def test_utterances_of_different_lengths_come_out_as_each_alone(teacher: Teacher) -> None:
    texts = ["ab.", "kab, ba", "b", "ˈaːk"] * 3
    together = said(teacher, texts)
    assert sorted(together) == list(range(len(texts)))
    for index, text in enumerate(texts):
        spoken = together[index]
        ids = teacher.ids(text)
        assert spoken.frames[:-1].tolist() == [max(1, known) for known in ids[:-1]]
        assert 1 <= spoken.frames[-1] <= FRAME_STEP and spoken.frames.sum() % FRAME_STEP == 0
        np.testing.assert_allclose(
            spoken.wave, np.repeat(np.array(ids) / 100, spoken.frames * FRAME_SAMPLES), atol=1e-6
        )


def test_a_failed_batch_does_not_end_the_others(teacher: Teacher, caplog: pytest.LogCaptureFixture) -> None:
    teacher._styles[1, 1, 0] = 13
    utterances = [Utterance(teacher.ids("ab"), 1, 1.0), Utterance(teacher.ids("abk"), 0, 1.0)]
    assert [spoken.index for spoken in teacher.speak(utterances)] == [1]
    assert "1 utterances of" in caplog.text


def test_voices_are_those_of_the_package_then_mixtures(teacher: Teacher) -> None:
    styles = teacher._styles
    assert styles.shape == (len(VOICES), 510, 2 * STYLE)
    assert styles[:5, 0, 0].tolist() == [0, 1, 2, 3, 4]
    rng = np.random.default_rng(0)
    tables = [rng.normal(size=(2, 2 * STYLE)).astype(np.float32) for _ in range(5)]
    mixtures = kokoro.mixed(tables)[5:]
    for index, mixture in enumerate(mixtures):
        weights = np.linalg.lstsq(
            np.stack([table[0] for table in tables])[:, :STYLE].T, mixture[0, :STYLE], rcond=None
        )[0]
        assert weights.sum() == pytest.approx(1, abs=1e-4) and weights.min() > -0.1
        assert not index % 2 or weights.argmax() == 1  # a man's


def test_labels_follow_the_letters() -> None:
    k, a, b = (PHONES.index(letter) for letter in "kɑb")
    assert letter_labels(".ˈkaː b, b.").tolist() == [0, k, k, a, a, a, b, 0, 0, b, 0]
    labels, seconds = np.array([0, a, b], np.uint8), np.array([0.025, 0.03, 0.02])
    assert sampled(labels, seconds, 0.0, 9).tolist() == [0, 0, a, a, a, b, b, 0, 0]
    assert sampled(labels, seconds, 0.03, 3).tolist() == [a, a, b]


def test_a_clip_begins_at_speech_and_has_the_level(teacher: Teacher) -> None:
    quiet, loud = np.zeros(12 * FRAME_SAMPLES), 0.1 * np.sin(np.arange(20 * FRAME_SAMPLES) / 7)
    spoken = Spoken(0, np.concatenate([quiet, loud, quiet, quiet]).astype(np.float32), np.array([12, 20, 24]))
    clip = speech.clipped(spoken, ".a.")
    assert clip
    samples, phones = clip
    assert len(samples) % TOKEN_SAMPLES == 0 and len(phones) == len(samples) // TOKEN_SAMPLES * TOKEN_PHONES
    first, last = np.flatnonzero(np.abs(samples) > 300)[[0, -1]] / SAMPLE_RATE
    assert 0.01 < first < 0.03 and 0.07 < len(samples) / SAMPLE_RATE - last < 0.13
    voiced = samples[round(first * SAMPLE_RATE) : round(last * SAMPLE_RATE)] / 32767
    assert np.sqrt(np.mean(voiced**2)) == pytest.approx(speech.LEVEL, rel=0.03)
    step = TOKEN_SAMPLES / TOKEN_PHONES / SAMPLE_RATE
    assert np.flatnonzero(phones)[0] * step == pytest.approx(first, abs=0.015)
    assert speech.clipped(Spoken(0, np.zeros(6000, np.float32), np.array([10])), ".") is None
    assert speech.clipped(Spoken(0, np.full(6000, np.nan, np.float32), np.array([10])), ".") is None


def test_a_loud_peak_is_not_clipped() -> None:
    wave = np.full(6000, 0.01, np.float32)
    wave[3000] = 1.0
    clip = speech.clipped(Spoken(0, wave, np.array([10])), ".")
    assert clip and np.abs(clip[0]).max() <= speech.LOUDEST * 32768


def test_speech_is_written_by_voice_and_more_of_it_has_other_lines(teacher: Teacher, tmp_path: Path) -> None:
    (tmp_path / "phonemes.txt").write_text("ab kab.\nkaː\n" * 30, encoding="utf-8")
    shards = speech._scratch(tmp_path / "speech")
    count = iter(range(1000))
    for index, chunks in enumerate(([np.arange(20), np.arange(20, 40)], [np.arange(40, 60)])):
        speech.write_shard(shards / str(index), tmp_path, teacher, chunks, 0.75, lambda: next(count) == 9)
    speech._join(shards, tmp_path)
    utterances = np.load(tmp_path / "utterances.npy")
    assert len(utterances) == 10 + 20 and len(set(utterances[:, 0].tolist())) == len(utterances)
    assert (np.diff(utterances[:, 1]) >= 0).all()
    voices, speeds = speech.planned(60, 0.75)
    assert (voices[utterances[:, 0]] == utterances[:, 1]).all()
    assert speeds.min() >= speech.SLOWEST and speeds.max() <= speech.FASTEST
    audio, phones = np.load(tmp_path / "audio.npy"), np.load(tmp_path / "phones.npy")
    assert audio.dtype == np.int16 and len(audio) == utterances[:, 2].sum() * TOKEN_SAMPLES
    assert phones.dtype == np.uint8 and len(phones) == utterances[:, 2].sum() * TOKEN_PHONES
    assert set(phones.tolist()) <= {0, *(PHONES.index(letter) for letter in "ɑbk")}


def test_three_quarters_of_the_lines_are_in_the_voices_of_the_demo() -> None:
    voices, _ = speech.planned(40_000, 0.75)
    shares = np.bincount(voices, minlength=len(VOICES)) / len(voices)
    assert shares[:4] == pytest.approx([0.1875] * 4, abs=0.01)
    assert shares[4:] == pytest.approx([0.25 / 17] * 17, abs=0.005)


def node(kind: str, name: str, *inputs: str) -> onnx.NodeProto:
    return onnx.helper.make_node(kind, inputs, ["out"], name=name)


def test_weights_have_the_names_and_layouts_of_torch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lstm = nn.LSTM(6, 4, batch_first=True, bidirectional=True)
    inputs, recurrent = (rng.integers(-20, 20, (2, n, 16)).astype(np.int8) for n in (6, 4))
    held = {
        "encoder.predictor.F0.1.pool.bias": rng.normal(size=5).astype(np.float32),
        "decode/Mul_quantized": rng.integers(0, 255, (3, 5, 3)).astype(np.uint8),
        "decode/Mul_scale": np.float32(0.5), "zero": np.uint8(7),
        "onnx::MatMul_1_quantized": rng.integers(-9, 9, (4, 3)).astype(np.int8),
        "onnx::MatMul_1_scale": np.array([1, 2, 3], np.float32), "zeros": np.zeros(3, np.int8),
        "inputs": inputs, "recurrent": recurrent, "biases": rng.normal(size=(2, 32)).astype(np.float32),
        "scales": np.array([0.01, 0.02], np.float32), "none": np.zeros(2, np.int8),
        "decoder.decoder.generator.stft.window": np.ones(4, np.float32),
    }  # fmt: skip
    quantisation = ("scales", "none", "scales", "none")
    graph = onnx.helper.make_graph(
        [
            node("ConvInteger", "/decoder/decoder/encode/conv1/Conv", "x", "decode/Mul_quantized", "s", "zero"),
            node("MatMulInteger", "/encoder/bert_encoder/MatMul", "x", "onnx::MatMul_1_quantized", "s", "zeros"),
            node("MatMulInteger", "/encoder/bert_encoder_2/MatMul", "x", "onnx::MatMul_1_quantized", "s", "zeros"),
            node("DynamicQuantizeLSTM", "/encoder/shared/LSTM", "x", "inputs", "recurrent", "biases", "", "", "", "",
                 *quantisation),
        ], "g", [], [], [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()],
    )  # fmt: skip
    np.savez_compressed(tmp_path / kokoro_weights.FILE, **kokoro_weights.weights_of(graph))
    weights = kokoro_weights.load(tmp_path)
    np.testing.assert_array_equal(weights.pop("predictor.F0.1.pool.bias"), held["encoder.predictor.F0.1.pool.bias"])
    convolution = (held["decode/Mul_quantized"].astype(np.float32) - 7) * 0.5
    np.testing.assert_array_equal(weights.pop("decoder.encode.conv1.weight"), convolution)
    matrix = held["onnx::MatMul_1_quantized"].T * np.array([[1], [2], [3]], np.float32)
    np.testing.assert_array_equal(weights.pop("bert_encoder.weight"), matrix)
    shared = {name.removeprefix("predictor.shared."): torch.tensor(value) for name, value in weights.items()}
    lstm.load_state_dict(shared)
    x = torch.randn(1, 7, 6, generator=torch.Generator().manual_seed(0))
    scales = held["scales"][:, None, None]
    expected = onnx_lstm(x.numpy(), inputs * scales, recurrent * scales, held["biases"])
    torch.testing.assert_close(lstm(x)[0], torch.from_numpy(expected), atol=1e-5, rtol=1e-5)


def onnx_lstm(x: np.ndarray, inputs: np.ndarray, recurrent: np.ndarray, biases: np.ndarray) -> np.ndarray:
    """ONNX's operator: x (1, T, n) -> (1, T, 2 h)."""
    weights = {"w": inputs.transpose(0, 2, 1), "r": recurrent.transpose(0, 2, 1), "b": biases}
    lstm = onnx.helper.make_node("LSTM", ["x", *weights], ["y"], direction="bidirectional", hidden_size=4)
    held = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy"]
    graph = onnx.helper.make_graph([lstm], "g", values[:1], values[1:], held)
    opsets = [onnx.helper.make_opsetid("", 14)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    (y,) = onnxruntime.InferenceSession(model).run(None, {"x": x.transpose(1, 0, 2)})  # (T, directions, 1, h)
    return y.reshape(1, len(y), -1)
