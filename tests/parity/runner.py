"""Runs the check of every fixture of a folder and compares its results with the stored ones; compares listings of
official checkpoints, {key: shape} as JSON, with the networks that load them."""

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from cosyvoice_triton.checkpoint import shape_differences, shapes_of
from cosyvoice_triton.networks.flow.checkpoint import with_rotary
from cosyvoice_triton.networks.flow.config import CosyVoice3FlowConfig, DiTFlowConfig, UNetFlowConfig
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.networks.flow.unet import UNetFlow
from cosyvoice_triton.networks.hift import CausalHiFTGenerator, HiFTConfig, HiFTGenerator, split_weight_norm
from torch import Tensor

from tests.parity.fixture import Check, Fixture, Tolerance

# Fixtures that the served engine computes, in whole or in part.
SERVED = frozenset(
    """item4_cosyvoice2_flow_inference item6c_stepaudio2_flow_inference item6d_stepaudio2_flow_streaming
    item8b_dit_streaming_token2wav item8c_cosyvoice2_streaming_token2wav fullsize_cosyvoice2_flow
    fullsize_stepaudio2_flow item3_cosyvoice3_flow_inference item6a_cosyvoice3_streaming_cli
    item6b_cosyvoice3_streaming_script item6c_cosyvoice3_streaming_triton fullsize_cosyvoice3_flow""".split()
)
MODULES = ("hift", "features", "flow_unet", "flow_dit", "streaming", "cosyvoice3", "llm")


@dataclass(frozen=True)
class ParityResult:
    """Comparison of one output, or of a whole fixture if its outputs could not be compared."""

    name: str  # "<fixture> <tensor key>"
    verdict: Literal["PASS", "MISS", "SKIP"]
    detail: str


def all_checks() -> dict[str, Check]:
    """Fixture name -> check, of all modules."""
    checks: dict[str, Check] = {}
    for module in MODULES:
        checks |= importlib.import_module(f"tests.parity.{module}").CHECKS
    return checks


def compare(expected: torch.Tensor, actual: torch.Tensor, tolerance: Tolerance) -> tuple[bool, str]:
    """(within tolerance, figures as text). The relative error is relative to the largest magnitude of `expected`."""
    if expected.shape != actual.shape:
        return False, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    reference = expected.double()
    difference = (actual.detach().cpu().double() - reference).abs()
    largest = difference.max().item() if difference.numel() else 0.0
    magnitude = reference.abs().max().item() if reference.numel() else 0.0
    relative = largest / magnitude if magnitude else largest
    rms = difference.square().mean().sqrt().item() if difference.numel() else 0.0
    # `<=` is false for NaN, so a NaN on either side is a miss.
    passed = largest <= tolerance.atol and (tolerance.rms is None or rms <= tolerance.rms)
    allowed = f"abs {tolerance.atol:.1e}" + ("" if tolerance.rms is None else f" rms {tolerance.rms:.1e}")
    return passed, f"abs {largest:.1e} rel {relative:.1e} rms {rms:.1e} (allowed {allowed})"


def run_fixture(fixture: Fixture, check: Check) -> Iterator[ParityResult]:
    """One result per compared tensor, then one per output of the fixture that the check did not compute.

    An exception in the check ends the fixture with a miss that has its message.
    """
    missing = fixture.outputs
    try:
        with torch.inference_mode():
            for key, actual in check(fixture):
                missing.discard(key)
                yield _compare_stored(fixture, key, actual)
    except Exception as error:  # the other fixtures are still compared
        reason = "; ".join(line.strip() for line in str(error).splitlines())
        yield ParityResult(fixture.name, "MISS", f"{type(error).__name__}: {reason}")
    for key in sorted(missing):
        yield ParityResult(
            f"{fixture.name} {key}", "MISS", "not computed" if key in fixture else "described, but not stored"
        )


def _compare_stored(fixture: Fixture, key: str, actual: torch.Tensor) -> ParityResult:
    name = f"{fixture.name} {key}{fixture.precision}"
    try:
        passed, detail = compare(fixture[key], actual, fixture.tolerance(key))
        detail = f"{detail}  [{fixture.computed_by}]"
    except ValueError as error:
        return ParityResult(name, "MISS", str(error))
    return ParityResult(name, "PASS" if passed else "MISS", detail)


def run_folder(folder: Path, device: torch.device | str = "cpu") -> Iterator[ParityResult]:
    """Results of every fixture of a folder; one without a check or without tensors is a miss.

    device: of the engine; on a GPU its fixtures are computed in float32 and again in float16.
    """
    checks = all_checks()
    described = {path.stem for path in folder.glob("*.json") if not path.stem.endswith(".weights")}
    stored = {path.stem for path in folder.glob("*.safetensors") if not path.stem.endswith(".weights")}
    for stem in sorted(described | stored):
        if stem not in described or stem not in stored:
            yield ParityResult(stem, "MISS", f"{stem}.{'json' if stem in stored else 'safetensors'} is missing")
            continue
        yield from _run_file(folder / f"{stem}.json", checks, device, torch.float32)
        if torch.device(device).type == "cuda" and stem in SERVED:
            yield from _run_file(folder / f"{stem}.json", checks, device, torch.float16)


def _run_file(
    path: Path, checks: dict[str, Check], device: torch.device | str, dtype: torch.dtype
) -> Iterator[ParityResult]:
    if path.stem not in checks:
        yield ParityResult(path.stem, "MISS", "unknown fixture: no check has this name")
        return
    yield from run_fixture(Fixture(path, device, dtype), checks[path.stem])


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
