import re
from pathlib import Path

import pytest
import torch
from cosyvoice_triton import stacks
from cosyvoice_triton.checkpoint import read_state
from cosyvoice_triton.networks.flow import (
    DiTConfig,
    DiTFlow,
    DiTFlowConfig,
    EncoderConfig,
    UNetConfig,
    UNetFlow,
    UNetFlowConfig,
    load_dit_flow,
    load_unet_flow,
)

ENCODER = EncoderConfig(width=32, heads=2, feed_forward=48, blocks=2, up_blocks=1)
UNET = UNetFlowConfig(
    vocab=50, speaker_dim=24, encoder=ENCODER, estimator=UNetConfig(channels=16, heads=2, blocks=1, mid_stages=2)
)
DIT = DiTFlowConfig(
    vocab=50,
    speaker_dim=24,
    encoder=ENCODER,
    estimator=DiTConfig(width=32, depth=2, heads=2, head_dim=16, feed_forward=64),
)
FLOWS = pytest.mark.parametrize(
    ("network", "config", "load"), [(UNetFlow, UNET, load_unet_flow), (DiTFlow, DIT, load_dit_flow)]
)


def saved(flow: torch.nn.Module, folder: Path, **changes: torch.Tensor | None) -> Path:
    """Path of the flow's checkpoint; `changes` replace or add tensors, None removes one."""
    state = flow.state_dict() | changes
    path = folder / "flow.pt"
    torch.save({key: tensor for key, tensor in state.items() if tensor is not None}, path)
    return path


@FLOWS
def test_sizes_are_read_from_the_checkpoint_and_weights_are_unchanged(network, config, load, tmp_path):
    flow = network(config)
    loaded = load(saved(flow, tmp_path))
    assert loaded.config == config
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    for key, tensor in flow.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key


@FLOWS
def test_every_difference_is_named(network, config, load, tmp_path):
    changes = {
        "encoder.after_norm.bias": None,
        "encoder_proj.bias": torch.zeros(3),
        "decoder.estimator.extra.weight": torch.zeros(1),
    }
    path = saved(network(config), tmp_path, **changes)
    with pytest.raises(ValueError) as caught:
        load(path)
    message = str(caught.value)
    assert "missing: encoder.after_norm.bias" in message
    assert "mismatched: encoder_proj.bias is [3], not [80]" in message
    assert "unexpected: decoder.estimator.extra.weight" in message


@FLOWS
def test_a_missing_tensor_that_gives_a_size_is_named(network, config, load, tmp_path):
    path = saved(network(config), tmp_path, **{"encoder.encoders.0.self_attn.pos_bias_u": None})
    with pytest.raises(ValueError, match=r"encoder\.encoders\.0\.self_attn\.pos_bias_u"):
        load(path)


def test_the_checkpoint_of_the_other_flow_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"decoder\.estimator\.blocks"):
        load_dit_flow(saved(UNetFlow(UNET), tmp_path))
    with pytest.raises(ValueError, match=r"decoder\.estimator\.down_blocks"):
        load_unet_flow(saved(DiTFlow(DIT), tmp_path))


def test_the_stack_of_a_flow_is_read_from_its_tensor_names(tmp_path):
    assert stacks.of_flow(read_state(saved(UNetFlow(UNET), tmp_path)), "flow.pt") is stacks.UNET
    assert stacks.of_flow(read_state(saved(DiTFlow(DIT), tmp_path)), "flow.pt") is stacks.DIT
    torch.save({"spk_embed_affine_layer.weight": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="other.pt is the flow of no stack .dit: Step-Audio2's DiT flow; unet: Cosy"):
        stacks.of_flow(read_state(tmp_path / "other.pt"), tmp_path / "other.pt")


@pytest.mark.parametrize("content", [{"a": torch.nn.Linear(2, 2)}, {"a": object}, b"root:x:0:0:root", b"PK\3\4", b""])
def test_a_file_of_something_else_is_named_without_torch_s_advice_to_run_it(tmp_path, content):
    path = tmp_path / "flow.pt"
    with pytest.raises(ValueError, match="flow.pt does not exist"):
        read_state(path)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match="flow.pt is not a file of tensors: ") as error:
        read_state(path)
    assert not {"weights_only", "trust", "Weights"} & set(re.findall(r"\w+", str(error.value)))
