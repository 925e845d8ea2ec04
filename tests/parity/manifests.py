"""Listings of official checkpoints, {key: shape} as JSON, compared with the networks that load them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from cosyvoice_triton.checkpoint import Shapes, shape_differences, shapes_of
from cosyvoice_triton.networks.flow.checkpoint import with_rotary
from cosyvoice_triton.networks.flow.config import CosyVoice3FlowConfig, DiTFlowConfig, UNetFlowConfig
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.networks.flow.unet import UNetFlow
from cosyvoice_triton.networks.hift import (
    CausalHiFTGenerator,
    HiFTConfig,
    HiFTGenerator,
    fuse_weight_norm,
    split_weight_norm,
)
from torch import nn

from tests.parity.runner import ParityResult, one_line


def _on_meta(build: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    """A network's state_dict on the meta device, without memory."""
    with torch.device("meta"):
        return build().state_dict()


def _vocoder(listed: Shapes, network: Callable[[HiFTConfig], nn.Module]) -> Shapes:
    empty = {key: torch.empty(shape, device="meta") for key, shape in listed.items()}
    config = HiFTConfig.from_shapes(shapes_of(fuse_weight_norm(empty)))
    return shapes_of(split_weight_norm(_on_meta(lambda: network(config))))


def _cosyvoice3_flow(listed: Shapes) -> Shapes:
    config = CosyVoice3FlowConfig.from_shapes(listed)
    return shapes_of(with_rotary(_on_meta(lambda: CosyVoice3Flow(config)), config))


# Keys and shapes of our network of the listed sizes, by the manifest's file name.
NETWORKS: dict[str, Callable[[Shapes], Shapes]] = {
    "cosyvoice2_hift_pt.json": lambda listed: _vocoder(listed, HiFTGenerator),
    "cosyvoice2_flow_pt.json": lambda listed: shapes_of(_on_meta(lambda: UNetFlow(UNetFlowConfig.from_shapes(listed)))),
    "stepaudio2_token2wav_flow_pt.instantiated.json": lambda listed: shapes_of(
        _on_meta(lambda: DiTFlow(DiTFlowConfig.from_shapes(listed)))
    ),
    "cosyvoice3_hift_pt.instantiated.json": lambda listed: _vocoder(listed, CausalHiFTGenerator),
    "cosyvoice3_flow_pt.instantiated.json": _cosyvoice3_flow,
}
# Not loaded by any network of ours: the LLM is served from its Hugging Face form by an engine.
NOT_OURS = ("cosyvoice2_llm_pt.json", "cosyvoice3_llm_pt.instantiated.json")


def run_manifests(folder: Path) -> Iterator[ParityResult]:
    """One result per listing; none if the folder does not exist. A listing without a network is a miss."""
    for path in sorted(folder.glob("*.json")):
        name = f"manifests/{path.name}"
        if path.name in NOT_OURS:
            yield ParityResult(name, "SKIP", "not compared: no network of ours loads this file")
        elif path.name not in NETWORKS:
            yield ParityResult(name, "MISS", "unknown listing: no network has this name")
        else:
            yield _compare(name, path)


def _compare(name: str, path: Path) -> ParityResult:
    try:
        listed = {key: torch.Size(shape) for key, shape in json.loads(path.read_text()).items()}
        differences = shape_differences(NETWORKS[path.name](listed), listed)
    except Exception as error:  # the other listings are still compared
        return ParityResult(name, "MISS", one_line(error))
    if differences:
        return ParityResult(name, "MISS", f"{len(differences)} differences, the first: {'; '.join(differences[:5])}")
    return ParityResult(name, "PASS", f"{len(listed)} keys and shapes equal")
