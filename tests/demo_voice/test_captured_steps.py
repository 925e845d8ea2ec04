"""What is captured as a CUDA graph: a replay would not repeat a copy from the host, nor wait for a value.

The device `meta` has no values to wait for.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, MEL_BINS, SPEAKER_DIM, SPEECH_VOCAB, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow import CosyVoice3Flow, DiTFlow, UNetFlow
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from demo_voice.training import flow, flow_cosyvoice3, flow_dit, flow_unet

META = torch.device("meta")


class NoHostTensors(TorchDispatchMode):
    def __torch_dispatch__(
        self, operation: Callable[..., Any], types: Any, given: Iterable[Any] = (), named: dict | None = None
    ) -> Any:
        made = operation(*given, **(named or {}))
        tensors = [leaf for leaf in tree_leaves((given, named, made)) if isinstance(leaf, torch.Tensor)]
        assert all(tensor.device == META for tensor in tensors), operation
        return made


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("network", "stage"), [(DiTFlow, flow_dit), (UNetFlow, flow_unet), (CosyVoice3Flow, flow_cosyvoice3)]
)
def test_a_flows_losses_stay_on_the_device(network, stage, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "autocast", lambda device: nullcontext())
    with META:
        trained = network(stage.CONFIG).requires_grad_(True)
        tokens, mel = (
            torch.randint(SPEECH_VOCAB, (2, 60 + LOOKAHEAD_TOKENS)),
            torch.rand(2, MEL_BINS, 60 * TOKEN_MEL_RATIO),
        )
        batch = flow.Batch(tokens, mel, mel, torch.rand(2, SPEAKER_DIM), torch.randint(40, (2,)))
    flow.losses(trained, stage.view, batch, streaming)  # before a capture, which may make constants
    with NoHostTensors():
        sum(flow.losses(trained, stage.view, batch, streaming)).backward()
    assert all(parameter.grad is not None for parameter in trained.parameters())
