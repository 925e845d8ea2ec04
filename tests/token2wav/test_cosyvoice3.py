"""CosyVoice3's flow and vocoder over streams; tests/assets/golden_cosyvoice3 has upstream's values of both."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import HOP_SAMPLES
from cosyvoice_triton.networks.flow import CosyVoice3Flow, load_cosyvoice3_flow
from cosyvoice_triton.networks.flow.checkpoint import ROTARY_KEY, with_rotary
from cosyvoice_triton.networks.hift import load_causal_hift, split_weight_norm
from cosyvoice_triton.networks.hift.causal import WITHHELD_FRAMES
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.flow.cosyvoice3_flow import CosyVoice3Streaming
from cosyvoice_triton.token2wav.flow.kv_cache import PromptCaches
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.noise import flow_noise, uniform_noise
from cosyvoice_triton.token2wav.gpu.precision import Precision
from cosyvoice_triton.token2wav.vocoder.causal_hift_vocoder import CausalVocoder
from torch import Tensor

from tests.support.streams import VOICES_BYTES, ids, prompt, vocoded

LIMITS = BatchLimits(max_streams=4)
AUDIO = 1e-4  # largest difference of streamed audio from the whole's, which is in -0.99..0.99


@pytest.fixture(scope="module")
def noise():
    return uniform_noise(9)


@pytest.fixture
def vocoder(causal_hift, noise) -> CausalVocoder:
    return CausalVocoder(causal_hift, noise, limits=LIMITS)


def streaming(network: CosyVoice3Flow, **options: Any) -> CosyVoice3Streaming:
    """With two Euler steps, and room for all frames."""
    given = {"limits": LIMITS, "steps": 2, "cache_frames": 1000, **options}
    return CosyVoice3Streaming(network, flow_noise(), PromptCaches(VOICES_BYTES), **given)


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
def test_audio_in_chunks_equals_that_of_the_whole_mel(vocoder, schedules):
    whole = mels(*map(sum, schedules))
    for parts, expected in zip(vocoded(vocoder, whole, schedules), vocoder.whole(whole), strict=True):
        assert len(expected) % HOP_SAMPLES == 0 and expected.abs().max() > 0.01
        torch.testing.assert_close(torch.cat(parts), expected, atol=AUDIO, rtol=0)


def test_a_chunk_gives_all_but_the_audio_that_later_frames_change(vocoder):
    (parts,) = vocoded(vocoder, mels(60), [(20, 10, 30)])
    half = vocoder._hift.config.n_fft // 2
    assert [len(part) for part in parts] == [
        HOP_SAMPLES * (20 - WITHHELD_FRAMES) - half,
        HOP_SAMPLES * 10,
        HOP_SAMPLES * (30 + WITHHELD_FRAMES) + half,
    ]


def test_long_audio_in_chunks_keeps_the_phase_of_the_whole(vocoder):
    """Pitch is integrated into phase over the whole stream, which no rounding may move."""
    (whole,) = mels(600)
    (parts,) = vocoded(vocoder, [whole], [(30, *[50] * 11, 20)])
    end, expected = (audio[-100 * HOP_SAMPLES :] for audio in (torch.cat(parts), vocoder.whole([whole])[0]))
    torch.testing.assert_close(end, expected, atol=AUDIO, rtol=0)


def test_the_pitch_is_computed_in_float64(causal_hift, tmp_path):
    assert {parameter.dtype for parameter in causal_hift.f0_predictor.parameters()} == {torch.float64}
    state = split_weight_norm(causal_hift.state_dict())
    torch.save({f"generator.{key}": tensor.float() for key, tensor in state.items()}, tmp_path / "hift.pt")
    loaded = load_causal_hift(tmp_path / "hift.pt").body_to(torch.float16)
    assert {parameter.dtype for parameter in loaded.f0_predictor.parameters()} == {torch.float64}
    assert loaded.conv_pre.weight.dtype == torch.float16
    torch.testing.assert_close(loaded.f0_predictor.classifier.weight, causal_hift.f0_predictor.classifier.weight)


def saved(network: CosyVoice3Flow, path, **changes: Tensor):
    torch.save(with_rotary(network.state_dict(), network.config) | changes, path)
    return path


def test_the_flow_is_loaded_strictly_and_its_positions_stay_exact_in_every_precision(cosyvoice3_network, tmp_path):
    loaded = load_cosyvoice3_flow(saved(cosyvoice3_network, tmp_path / "flow.pt"), dtype=torch.bfloat16)
    assert (
        loaded.config == cosyvoice3_network.config and loaded.decoder.estimator.proj_out.weight.dtype == torch.bfloat16
    )
    with pytest.raises(ValueError, match="unexpected: stray"):
        load_cosyvoice3_flow(saved(cosyvoice3_network, tmp_path / "flow.pt", stray=torch.zeros(1)))
    with pytest.raises(ValueError, match=r"inv_freq is not 10000\^"):
        load_cosyvoice3_flow(saved(cosyvoice3_network, tmp_path / "flow.pt", **{ROTARY_KEY: torch.ones(4)}))


@pytest.fixture
def checkpoint(cosyvoice3_network, causal_hift, tmp_path):
    """flow.pt and hift.pt in the official layout."""
    saved(cosyvoice3_network, tmp_path / "flow.pt")
    state = {key: tensor.float() for key, tensor in split_weight_norm(causal_hift.state_dict()).items()}
    torch.save(state, tmp_path / "hift.pt")
    return tmp_path


def test_the_engine_of_the_stack_loads_the_official_files(checkpoint, cosyvoice3_network, causal_hift, noise):
    precision = Precision(torch.float32, torch.float32)
    engine = Token2Wav.load(stacks.COSYVOICE3, checkpoint, device="cpu", limits=LIMITS, precision=precision, steps=2)
    flow = streaming(cosyvoice3_network)
    own = Token2Wav(flow, CausalVocoder(causal_hift, noise, limits=LIMITS))
    audio, expected = (each.whole(prompt(3), ids(3, 40)) for each in (engine, own))
    np.testing.assert_allclose(audio, expected, atol=1e-3)


def test_the_engine_keeps_keys_and_values_in_eight_bits(checkpoint):
    load = partial(Token2Wav.load, stacks.COSYVOICE3, checkpoint, device="cpu", limits=LIMITS, steps=2)
    precision = Precision(torch.float32, torch.float32)
    kept, rounded = (load(precision=precision, kv_cache_dtype=of).cache_bytes for of in ("auto", "int8"))
    assert 0.25 < rounded / kept < 0.5


@torch.inference_mode()
def test_the_engine_in_bfloat16_is_near_the_one_in_float32(checkpoint, cosyvoice3_network, causal_hift, noise):
    """A mel's error moves the pitch, and with it the phase: the vocoder is compared on one mel."""
    precision = Precision(torch.bfloat16, torch.bfloat16)
    engine = Token2Wav.load(stacks.COSYVOICE3, checkpoint, device="cpu", limits=LIMITS, precision=precision, steps=2)
    exact = streaming(cosyvoice3_network)
    mel, expected = (flow.whole([(prompt(3), ids(3, 40))])[0].float() for flow in (engine._flow, exact))
    assert (mel - expected).norm() < 0.05 * expected.norm()
    vocoders = engine._vocoder, CausalVocoder(causal_hift, noise, limits=LIMITS)
    audio, expected = (vocoder.whole(mels(40))[0] for vocoder in vocoders)
    assert (audio - expected).norm() < 0.1 * expected.norm()


def test_another_runtime_than_torch_is_refused(checkpoint):
    precision = Precision(torch.float32, torch.float32)
    load = partial(Token2Wav.load, stacks.COSYVOICE3, checkpoint, device="cpu", limits=LIMITS, steps=2)
    with pytest.raises(ValueError, match="flow_runtime 'onnxruntime': the flow of the stack 'cosyvoice3' runs in tor"):
        load(precision=precision, runtime="onnxruntime")
