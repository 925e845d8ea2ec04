"""Short training of flows on noise, and loading of the results as in serving."""

from functools import partial
from pathlib import Path

import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.networks.flow import load_cosyvoice3_flow, load_dit_flow, load_unet_flow
from cosyvoice_triton.voice import features

from demo_voice.training import flow, flow_cosyvoice3, flow_dit, flow_unet, llm, llm_data, qwen2, training
from demo_voice.training.training import trained

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


def test_weights_are_kept_while_a_stage_runs_and_it_goes_on_with_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(training, "REPORT_STEPS", 1)
    file, first, second = tmp_path / "x.pt", torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizers = [training.adamw(each.parameters(), 1e-3) for each in (first, second)]
    steps = iter(training.TrainingRun(file, 600.0, first, optimizers[0]))
    next(steps)
    assert not file.exists()
    next(steps)
    torch.testing.assert_close(trained(file)["weight"], first.weight.detach())
    training.TrainingRun(file, 600.0, second, optimizers[1])
    torch.testing.assert_close(second.weight, first.weight)
