"""Short training of flows and vocoder on noise, and loading of the results as in serving."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cosyvoice_triton.constants import HOP_SAMPLES, MEL_BINS, SPEAKER_DIM, SPEECH_VOCAB
from cosyvoice_triton.networks.flow import load_dit_flow, load_unet_flow
from cosyvoice_triton.networks.hift import HiFTGenerator, load_hift

from demo_voice.training import flow, flow_dit, flow_unet, vocoder
from demo_voice.training.dataset import TOKEN_PHONES, TOKEN_SAMPLES
from demo_voice.training.training import trained

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


@pytest.mark.parametrize("stage", [flow_dit, flow_unet])
def test_a_flow_is_trained_and_can_be_served(work: Path, stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "BATCH_TOKENS", 60)
    stage.train(work, 0.5, "cpu")
    flow.export(stage.FILE, work, work / "flow.pt")
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
        expected = network.decode(mel, network.m_source(f0, noise)[0])
        found = served.decode(mel, served.m_source(f0, noise)[0])
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
    torch.testing.assert_close(served.f0_predictor(mel), network.f0_predictor(mel).detach(), atol=1.0, rtol=5e-3)
