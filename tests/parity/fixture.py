"""One golden fixture on disk: `<name>.json` describes it and `<name>.safetensors` holds its tensors."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from cosyvoice_triton.checkpoint import load_strict, shapes_of
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from tests.parity.weight_rule import generate_weights

Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class Tolerance:
    """Bounds on the difference of a computed tensor; both zero means equal in every element."""

    atol: float = 0.0  # largest absolute difference
    rms: float | None = None  # root mean square of the difference


# Bounds of an engine that computes in float16: relative to the largest magnitude, and to the RMS, of the result.
PRECISION = {torch.float16: Tolerance(1e-2, 3e-3)}


class Fixture:
    """Inputs, expected results, weights and description of one fixture.

    `fixture["in/xs"]` is a stored tensor, `"in/xs" in fixture` whether it exists, `fixture.meta` the JSON.
    """

    def __init__(self, json_path: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        """device, dtype: of the engine that computes it; networks alone are computed on the CPU in float32.

        ValueError, KeyError or safetensors' own error if a file of the pair is malformed.
        """
        self.device = torch.device(device)
        self.dtype = dtype
        self.computed_by = "network"  # what computes the next results, set by checks
        self.folder = json_path.parent
        self.meta: dict[str, Any] = json.loads(json_path.read_text())
        self.name = json_path.stem
        self.described: dict[str, dict[str, Any]] = self.meta["tensors"]
        if self.meta["name"] != self.name:
            raise ValueError(f"unknown fixture: the file describes {self.meta['name']!r}")
        # Output -> tolerance family, set by checks of fixtures whose tolerances are given per family.
        self.families: dict[str, str] = {}
        self._tensors_path = json_path.with_suffix(".safetensors")
        with safe_open(self._tensors_path, framework="pt") as file:
            self.keys = list(file.keys())

    @property
    def precision(self) -> str:
        """The engine's precision as the results' names show it; nothing for float32."""
        return "" if self.dtype == torch.float32 else f" {str(self.dtype).removeprefix('torch.')}"

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self._tensors_path)

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    @property
    def outputs(self) -> set[str]:
        """Keys of all results, including those that are only described or only stored."""
        return {key for key in (*self.keys, *self.described) if key.startswith("out/")}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self:
            raise ValueError(f"{key} is not stored")
        return self._tensors[key]

    def weights(self, file: str | None = None) -> dict[str, torch.Tensor]:
        """The state_dict that the fixture was made with, also if it is of a part of the network.

        file: name of one of several weights files; default: the fixture's "weights_file".
        """
        return load_file(self._beside(file or self.meta["weights_file"]))

    def weights_meta(self, file: str | None = None) -> dict[str, Any]:
        """The JSON next to the weights file: constructor arguments of every sub-module under "config"."""
        file = file or self.meta["weights_file"]
        return json.loads(self._beside(str(Path(file).with_suffix(".json"))).read_text())

    def _beside(self, file: str) -> Path:
        path = self.folder / file
        if not path.is_file():
            raise ValueError(f"{file} is missing")
        return path

    def generated_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """The state_dict of a fixture whose weights are generated from key names.

        shapes: {key: shape} of the network in the official checkpoint. ValueError if the weights differ from the
        fixture's "weight_check".
        """
        return generate_weights(shapes, self.meta["weight_check"])

    def full_size(self, network: Callable[[], Network]) -> Network:
        """A network of official sizes with generated weights."""
        with torch.device("meta"):
            made = network()
        shapes = {key: tuple(shape) for key, shape in shapes_of(made.state_dict()).items()}
        return load_strict(made, self.generated_weights(shapes), "cpu", torch.float32)

    def tolerance(self, key: str) -> Tolerance:
        """Tolerance of the stored tensor `key`, or what the engine's precision allows. ValueError if there is none."""
        given = self._stored_tolerance(key)
        relative = PRECISION.get(self.dtype)
        if relative is None or relative.rms is None or not self[key].is_floating_point():
            return given
        reference = self[key].double()
        rms = relative.rms * reference.square().mean().sqrt().item()
        return Tolerance(relative.atol * reference.abs().max().item(), rms)

    def _stored_tolerance(self, key: str) -> Tolerance:
        tensor = self.described.get(key, {})
        if "atol" in tensor:
            return Tolerance(tensor["atol"], tensor.get("rms_tol"))
        if tensor.get("compare") == "exact" or not self[key].is_floating_point():
            return Tolerance()
        tolerance = self.meta["tolerance"]
        if isinstance(tolerance, dict) and key in self.families:
            tolerance = tolerance.get(self.families[key])
        if not isinstance(tolerance, dict):
            raise ValueError(f"no tolerance is given for {key}")
        return Tolerance(tolerance["atol"])


def outputs_of(call: Mapping[str, Any]) -> list[str]:
    """Keys of the results of a call, which has one ("output") or several ("outputs")."""
    return call["outputs"] if "outputs" in call else [call["output"]]


# Computes a fixture's results: yields (key of the stored tensor, such as "out/full/xs", computed tensor).
Check = Callable[[Fixture], Iterator[tuple[str, torch.Tensor]]]
