"""Short training of flows and vocoder on noise, and loading of the results as in serving."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import HOP_SAMPLES, MEL_BINS, SAMPLE_RATE, SPEAKER_DIM, SPEECH_VOCAB
from cosyvoice_triton.demo_checkpoint.llm import LLMSizes
from cosyvoice_triton.networks.flow import load_dit_flow, load_unet_flow
from cosyvoice_triton.networks.hift import HiFTGenerator, load_hift

from demo_voice.training import flow, flow_dit, flow_unet, vocoder
from demo_voice.training.dataset import TOKEN_PHONES, TOKEN_SAMPLES
from demo_voice.training.pitch import fundamental
from demo_voice.training.qwen2 import Qwen2
from demo_voice.training.training import adamw, descend, trained

pytestmark = pytest.mark.slow  # each test trains a network

UTTERANCES, TOKENS = 8, 40


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A working folder with noise instead of speech."""
    rng, count = np.random.default_rng(0), UTTERANCES * TOKENS
    voices = np.arange(UTTERANCES) * 2 // UTTERANCES
    np.save(tmp_path / "audio.npy", rng.normal(0, 2000, count * TOKEN_SAMPLES).astype(np.int16))
    np.save(tmp_path / "phones.npy", np.zeros(count * TOKEN_PHONES, np.uint8))
    rows = np.stack([np.arange(UTTERANCES), voices, np.full(UTTERANCES, TOKENS)], axis=1)
    np.save(tmp_path / "utterances.npy", rows.astype(np.int64))
    np.save(tmp_path / "tokens.npy", rng.integers(0, SPEECH_VOCAB, count).astype(np.int16))
    np.save(tmp_path / "speakers.npy", rng.normal(size=(UTTERANCES, SPEAKER_DIM)).astype(np.float32))
    return tmp_path


@pytest.mark.parametrize("frequency", [80.0, 123.4, 200.0, 300.0])
def test_the_pitch_of_a_harmonic_tone_is_found(frequency: float) -> None:
    time = torch.arange(SAMPLE_RATE) / SAMPLE_RATE
    wave = 0.1 * sum(torch.sin(2 * torch.pi * frequency * k * time) / k for k in range(1, 12))
    f0 = fundamental(wave[None])
    assert f0.shape == (1, SAMPLE_RATE // HOP_SAMPLES)
    torch.testing.assert_close(f0[:, 3:-3], torch.full_like(f0[:, 3:-3], frequency), atol=0.5, rtol=0)


def test_noise_and_silence_have_no_pitch() -> None:
    noise = 0.1 * torch.randn(1, SAMPLE_RATE, generator=torch.Generator().manual_seed(0))
    assert (fundamental(noise) > 0).float().mean() < 0.1
    assert not fundamental(torch.zeros(1, SAMPLE_RATE)).any()


@pytest.mark.parametrize("stage", [flow_dit, flow_unet])
def test_a_flow_is_trained_and_can_be_served(work: Path, stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "BATCH_TOKENS", 60)
    stage.train(work, 0.5, "cpu")
    stage.export(work, work / "flow.pt")
    load = load_dit_flow if stage is flow_dit else load_unet_flow
    served = load(work / "flow.pt").state_dict()
    for name, tensor in trained(work / stage.FILE).items():
        torch.testing.assert_close(served[name], tensor, atol=1e-6, rtol=1e-3)


def test_the_vocoder_is_trained_and_can_be_served(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocoder, "BATCH", 1)
    vocoder.train(work, 1.0, "cpu")
    vocoder.export(work, work / "out.pt")
    served = load_hift(work / "out.pt")
    network = vocoder.build()
    network.load_state_dict(trained(work / vocoder.FILE))
    assert network.state_dict().keys() == HiFTGenerator(vocoder.CONFIG).state_dict().keys()
    mel = torch.randn(1, MEL_BINS, 20, generator=torch.Generator().manual_seed(0)) - 5
    f0 = torch.full((1, 20), 150.0)
    noise = torch.zeros(1, 20 * HOP_SAMPLES, vocoder.CONFIG.harmonics + 1)
    with torch.no_grad():
        expected = network.decode(mel, network.source(f0, noise)[0])
        found = served.decode(mel, served.source(f0, noise)[0])
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
    torch.testing.assert_close(served.f0(mel), network.f0(mel).detach(), atol=1.0, rtol=5e-3)


def test_the_qwen2_for_training_equals_that_of_transformers() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = LLMSizes(hidden=48, layers=2, heads=6, kv_heads=2, mlp=32, tied=True, rope_theta=10_000.0)
    config = Qwen2Config(
        vocab_size=100,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        tie_word_embeddings=sizes.tied,
    )
    ours, theirs = Qwen2(sizes, 100, dropout=0.1).eval(), Qwen2ForCausalLM(config).eval()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    ids = torch.randint(100, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_steps_with_an_infinite_gradient_are_skipped() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = adamw([weight], 0.1)
    descend((weight * torch.nan).sum(), optimizer, clip=1.0)
    assert weight.tolist() == [1, 1, 1]
    optimizer.param_groups[0]["lr"].fill_(0.5)
    descend(weight.sum(), optimizer, clip=1.0)
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.5), atol=0.01, rtol=0)
