"""What flow checks share: stored intermediate results by module name, and the small expressions of fixtures' calls."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from scripts.parity.fixture import Fixture


@contextmanager
def intermediates(module: nn.Module, fixture: Fixture, tag: str) -> Iterator[dict[str, Tensor]]:
    """Collect what submodules give for the fixture's `mid/<tag>/<submodule>` tensors, under those keys.

    A submodule that runs more than once counts with its first run.
    """
    found: dict[str, Tensor] = {}
    handles = []
    prefix = f"mid/{tag}/"
    modules = dict(module.named_modules())
    for key in fixture.keys:
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name in modules:
            handles.append(modules[name].register_forward_hook(_keep(found, key)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _keep(found: dict[str, Tensor], key: str):
    def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
        found.setdefault(key, output)

    return hook


def evaluate(fixture: Fixture, expression: str) -> Tensor:
    """`in/token`, `in/token[:, 0:18]`, `in/token[:, :3]` or `cat(..., ...)` of such, joined over the second axis."""
    if match := re.fullmatch(r"\s*cat\((.*)\)\s*", expression):
        return torch.cat([evaluate(fixture, part) for part in re.split(r",(?![^\[]*\])", match[1])], dim=1)
    match = re.fullmatch(r"\s*(in/\w+)(?:\[:,\s*(\d*):(\d*)\])?\s*", expression)
    if match is None:
        raise ValueError(f"{fixture.name}: cannot read the expression {expression!r}")
    name, start, stop = match.groups()
    return fixture[name][:, slice(int(start) if start else None, int(stop) if stop else None)]
