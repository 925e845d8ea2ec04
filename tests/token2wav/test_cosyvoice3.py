"""CosyVoice3's flow and vocoder over streams; tests/assets/golden_cosyvoice3 has upstream's values of both."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import HOP_SAMPLES
from cosyvoice_triton.networks.flow import load_cosyvoice3_flow
from cosyvoice_triton.networks.flow.checkpoint import ROTARY_KEY
from cosyvoice_triton.networks.hift import load_causal_hift, split_weight_norm
from cosyvoice_triton.networks.hift.causal import WITHHELD_FRAMES
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.precision import Precision
from torch import Tensor

from tests.support.streams import ids, prompt, saved, vocoded

LIMITS = BatchLimits(max_streams=4)
AUDIO = 1e-4  # largest difference of streamed audio from the whole's, which is in -0.99..0.99


FLOAT32 = Precision(torch.float32, torch.float32)


def mels(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(80, length, generator=generator) for length in lengths]


@pytest.mark.parametrize(
    "schedules",
    [
        ((30, 50, 100, 28), (60, 3, 1, 2, 44)),  # batches of rows of other lengths; one ends while the other goes on
        ((8, 1, 1, 70), (7, 1, 2, 5)),  # as early as possible, and too early
        ((40, 0), (3,)),  # nothing new at the end; shorter than what is withheld
    ],
)
def test_audio_in_chunks_equals_that_of_the_whole_mel(causal_vocoder, schedules):
    whole = mels(*map(sum, schedules))
    for parts, expected in zip(vocoded(causal_vocoder, whole, schedules), causal_vocoder.whole(whole), strict=True):
        assert len(expected) % HOP_SAMPLES == 0 and expected.abs().max() > 0.01
        torch.testing.assert_close(torch.cat(parts), expected, atol=AUDIO, rtol=0)


def test_a_chunk_gives_all_but_the_audio_that_later_frames_change(causal_vocoder):
    (parts,) = vocoded(causal_vocoder, mels(60), [(20, 10, 30)])
    half = causal_vocoder._network.config.n_fft // 2
    assert [len(part) for part in parts] == [
        HOP_SAMPLES * (20 - WITHHELD_FRAMES) - half,
        HOP_SAMPLES * 10,
        HOP_SAMPLES * (30 + WITHHELD_FRAMES) + half,
    ]


def test_long_audio_in_chunks_keeps_the_phase_of_the_whole(causal_vocoder):
    """Pitch is integrated into phase over the whole stream, which no rounding may move."""
    (whole,) = mels(600)
    (parts,) = vocoded(causal_vocoder, [whole], [(30, *[50] * 11, 20)])
    end, expected = (audio[-100 * HOP_SAMPLES :] for audio in (torch.cat(parts), causal_vocoder.whole([whole])[0]))
    torch.testing.assert_close(end, expected, atol=AUDIO, rtol=0)


def test_the_pitch_is_computed_in_float64(causal_vocoder, tmp_path):
    causal_hift = causal_vocoder._network
    assert {parameter.dtype for parameter in causal_hift.f0_predictor.parameters()} == {torch.float64}
    state = split_weight_norm(causal_hift.state_dict())
    torch.save({f"generator.{key}": tensor.float() for key, tensor in state.items()}, tmp_path / "hift.pt")
    loaded = load_causal_hift(tmp_path / "hift.pt").body_to(torch.float16)
    assert {parameter.dtype for parameter in loaded.f0_predictor.parameters()} == {torch.float64}
    assert loaded.conv_pre.weight.dtype == torch.float16
    torch.testing.assert_close(loaded.f0_predictor.classifier.weight, causal_hift.f0_predictor.classifier.weight)


@pytest.fixture
def checkpoint(cosyvoice3_network, causal_vocoder, tmp_path):
    return saved(tmp_path, cosyvoice3_network, copy.deepcopy(causal_vocoder._network).float())


def test_the_flow_is_loaded_strictly_and_its_positions_stay_exact_in_every_precision(cosyvoice3_network, checkpoint):
    path = checkpoint / "flow.pt"
    loaded, state = load_cosyvoice3_flow(path, dtype=torch.bfloat16), torch.load(path)
    assert loaded.config == cosyvoice3_network.config
    assert loaded.decoder.estimator.proj_out.weight.dtype == torch.bfloat16
    for change, message in (
        ({"stray": torch.zeros(1)}, "unexpected: stray"),
        ({ROTARY_KEY: torch.ones(4)}, r"inv_freq is not 10000\^"),
    ):
        torch.save(state | change, path)
        with pytest.raises(ValueError, match=message):
            load_cosyvoice3_flow(path)


@pytest.fixture
def load(checkpoint):
    return partial(Token2Wav.load, stacks.COSYVOICE3, checkpoint, device="cpu", limits=LIMITS, steps=2)


def test_the_engine_of_the_stack_loads_the_official_files(load, cosyvoice3):
    audio, expected = (each.whole(prompt(3), ids(3, 40)) for each in (load(precision=FLOAT32), cosyvoice3))
    np.testing.assert_allclose(audio, expected, atol=1e-3)


def test_the_engine_keeps_keys_and_values_in_eight_bits(load):
    kept, rounded = (load(precision=FLOAT32, kv_cache_dtype=of).cache_bytes for of in ("auto", "int8"))
    assert 0.25 < rounded / kept < 0.5


def test_another_runtime_than_torch_is_refused(load):
    with pytest.raises(ValueError, match="flow_runtime 'onnxruntime': the flow of the stack 'cosyvoice3' runs in tor"):
        load(precision=FLOAT32, runtime="onnxruntime")
