"""Short training of flows and vocoder on noise, and loading of the results as in serving."""

from functools import partial
from pathlib import Path

import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import HOP_SAMPLES, MEL_BINS
from cosyvoice_triton.networks.flow import load_cosyvoice3_flow, load_dit_flow, load_unet_flow
from cosyvoice_triton.networks.hift import HiFTGenerator, fuse_weight_norm, load_causal_hift, load_hift
from cosyvoice_triton.networks.hift.causal import WITHHELD_FRAMES
from cosyvoice_triton.voice import features

from demo_voice.training import (
    flow,
    flow_cosyvoice3,
    flow_dit,
    flow_unet,
    llm,
    llm_data,
    qwen2,
    training,
    vocoder,
    vocoder_causal,
)
from demo_voice.training.__main__ import PREPARATION, parse_args, prepare
from demo_voice.training.training import trained
from demo_voice.training.vocoder_causal import CAUSAL

pytestmark = pytest.mark.slow  # each test trains a network


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> set[float]:
    """The upper limits, in Hz, of the mels that are computed."""
    found, compute = set(), features.mel_spectrogram

    def recorded(wave: torch.Tensor, config: features.MelConfig) -> torch.Tensor:
        found.add(config.max_hz)
        return compute(wave, config)

    monkeypatch.setattr(features, "mel_spectrogram", recorded)
    return found


@pytest.mark.parametrize(
    ("stage", "write", "load", "stack"),
    [
        (flow_dit, partial(flow.export, flow_dit.FILE), load_dit_flow, stacks.DIT),
        (flow_unet, partial(flow.export, flow_unet.FILE), load_unet_flow, stacks.UNET),
        (flow_cosyvoice3, flow_cosyvoice3.export, load_cosyvoice3_flow, stacks.COSYVOICE3),
    ],
)
def test_a_flow_is_trained_and_can_be_served(work: Path, stage, write, load, stack, limits, monkeypatch) -> None:
    monkeypatch.setattr(flow, "BATCH_TOKENS", 60)
    stage.train(work, 0.5, "cpu")
    assert limits == {stack.mel_max_hz}
    write(work, work / "flow.pt")
    served = load(work / "flow.pt").state_dict()
    for name, tensor in trained(work / stage.FILE).items():
        torch.testing.assert_close(served[name], tensor, atol=1e-6, rtol=1e-3)


def test_the_given_vocoders_are_taken_and_can_be_served(tmp_path: Path) -> None:
    for name in PREPARATION.values():
        (tmp_path / name).touch()
    prepare(parse_args(["--work", str(tmp_path), "--teacher", str(tmp_path)]))
    vocoder.export(vocoder.HIFT, tmp_path, tmp_path / "out.pt")
    assert load_hift(tmp_path / "out.pt").f0_predictor.classifier.bias.item() > 20  # Hz, with none of the mel
    vocoder.export(CAUSAL, tmp_path, tmp_path / "causal.pt")
    assert load_causal_hift(tmp_path / "causal.pt").f0_predictor.classifier.bias.item() > 20
    assert {path.name for path in (tmp_path / "done").iterdir()} == {"vocoder", "vocoder_causal"}


def test_attention_is_guided_to_the_text_that_is_spoken() -> None:
    places = torch.tensor([[llm_data.ABSENT, 1.0, 2.0, 3.0]])  # of a row without a place nothing is asked
    identity, first = (torch.full((1, 1, 4, 4), -torch.inf) for _ in range(2))
    identity[0, 0].diagonal().zero_()
    first[:, :, :, 0] = 0.0
    assert llm.guidance(identity, places).item() == 0.0
    torch.testing.assert_close(llm.guidance(first, places).item(), (1 + 4 + 9) / 3 / 2 / llm.NEAR**2)
    query, key = torch.randn(2, 1, 1, 5, 8).unbind()
    attention = qwen2.log_attention(query, key).exp()
    torch.testing.assert_close(
        attention @ key, torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True)
    )


def test_the_vocoder_is_trained_and_can_be_served(work: Path, limits, monkeypatch) -> None:
    monkeypatch.setattr(vocoder, "BATCH", 1)
    vocoder.train(work, 1.0, "cpu")
    assert limits == {stacks.DIT.mel_max_hz}
    vocoder.export(vocoder.HIFT, work, work / "out.pt")
    served = load_hift(work / "out.pt")
    network = vocoder.build(vocoder.HIFT)
    network.load_state_dict(vocoder.generator(work / vocoder.FILE))
    assert network.state_dict().keys() == HiFTGenerator(vocoder.CONFIG).state_dict().keys()
    mel = torch.randn(1, MEL_BINS, 20, generator=torch.Generator().manual_seed(0)) - 5
    f0 = torch.full((1, 20), 150.0)
    noise = torch.zeros(1, 20 * HOP_SAMPLES, vocoder.CONFIG.harmonics + 1)
    with torch.no_grad():
        expected = network.decode(mel, network.m_source(f0, noise)[0])
        found = served.decode(mel, served.m_source(f0, noise)[0])
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
    torch.testing.assert_close(served.f0_predictor(mel), network.f0_predictor(mel).detach(), atol=1.0, rtol=5e-3)


def test_the_causal_vocoder_is_trained_and_its_streams_are_what_was_trained(work: Path, limits, monkeypatch) -> None:
    monkeypatch.setattr(vocoder, "BATCH", 1)
    vocoder_causal.train(work, 1.0, "cpu")
    assert limits == {stacks.COSYVOICE3.mel_max_hz}
    vocoder.export(CAUSAL, work, work / "out.pt")
    served = load_causal_hift(work / "out.pt")
    network = vocoder.build(CAUSAL)
    network.load_state_dict(fuse_weight_norm(torch.load(work / "out.pt")))
    mel = torch.randn(1, MEL_BINS, 60, generator=torch.Generator().manual_seed(0)) - 5
    noise = torch.rand(1, 62 * HOP_SAMPLES, vocoder.CONFIG.harmonics + 1, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(torch, "rand", lambda *sizes, device: noise[:, : sizes[1]])
    with torch.no_grad():
        trained_on = CAUSAL.render(network, mel, CAUSAL.pitch(network, mel))
        past, heard = None, []
        for begin, end in ((0, 20), (20, 33), (33, 60)):
            first = 0 if past is None else (begin - WITHHELD_FRAMES + 1) * HOP_SAMPLES
            speech, past = served(
                mel[..., begin:end],
                lambda samples, first=first: noise[:, first : first + samples],
                torch.tensor([end - begin]),
                torch.tensor([end == 60]),
                past,
                ending=end == 60,
            )
            heard.append(speech[:, : served.samples(end - begin, begins=begin == 0, ends=end == 60)])
    torch.testing.assert_close(torch.cat(heard, dim=1), trained_on, atol=2e-4, rtol=0)


def test_weights_are_kept_while_a_stage_runs_and_it_goes_on_with_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(training, "REPORT_STEPS", 1)
    file, first, second = tmp_path / "x.pt", torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    steps = iter(training.TrainingRun(file, 600.0, first, []))
    next(steps)
    assert not file.exists()
    next(steps)
    torch.testing.assert_close(trained(file)["weight"], first.weight.detach())
    training.TrainingRun(file, 600.0, second, [])
    torch.testing.assert_close(second.weight, first.weight)
