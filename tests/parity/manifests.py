"""Listings of official checkpoints, {key: shape} as JSON, compared with the networks that load them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from cosyvoice_triton.checkpoint import shape_differences, shapes_of
from cosyvoice_triton.networks.flow.checkpoint import with_rotary
from cosyvoice_triton.networks.flow.config import CosyVoice3FlowConfig, DiTFlowConfig, UNetFlowConfig
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.networks.flow.unet import UNetFlow
from cosyvoice_triton.networks.hift import CausalHiFTGenerator, HiFTConfig, HiFTGenerator, split_weight_norm
from torch import Tensor

from tests.parity.runner import ParityResult

# The state_dict of our network of the official sizes, by the manifest's file name.
NETWORKS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "cosyvoice2_hift_pt.json": lambda: split_weight_norm(HiFTGenerator(HiFTConfig()).state_dict()),
    "cosyvoice2_flow_pt.json": lambda: UNetFlow(UNetFlowConfig()).state_dict(),
    "stepaudio2_token2wav_flow_pt.instantiated.json": lambda: DiTFlow(DiTFlowConfig()).state_dict(),
    "cosyvoice3_hift_pt.instantiated.json": lambda: split_weight_norm(CausalHiFTGenerator(HiFTConfig()).state_dict()),
    "cosyvoice3_flow_pt.instantiated.json": lambda: with_rotary(
        CosyVoice3Flow(CosyVoice3FlowConfig()).state_dict(), CosyVoice3FlowConfig()
    ),
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
    listed = {key: torch.Size(shape) for key, shape in json.loads(path.read_text()).items()}
    with torch.device("meta"):
        differences = shape_differences(shapes_of(NETWORKS[path.name]()), listed)
    if differences:
        return ParityResult(name, "MISS", f"{len(differences)} differences, the first: {'; '.join(differences[:5])}")
    return ParityResult(name, "PASS", f"{len(listed)} keys and shapes equal")
