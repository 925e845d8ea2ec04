"""Shared by checks: intermediate results by module name, and parsing of the text of fixtures' calls."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.fixture import Fixture


@contextmanager
def intermediates(module: nn.Module, fixture: Fixture, tag: str) -> Iterator[dict[str, Tensor]]:
    """Collect the outputs of submodules for the fixture's `mid/<tag>/<submodule>` tensors, under those keys.

    Of a submodule that runs more than once, the first output; of `<submodule>_first_N_frames`, the first N frames.
    """
    found: dict[str, Tensor] = {}
    handles = []
    prefix = f"mid/{tag}/"
    modules = dict(module.named_modules())
    for key in fixture.keys:
        name, _, frames = key.removeprefix(prefix).removesuffix("_frames").partition("_first_")
        if key.startswith(prefix) and name in modules:
            handles.append(modules[name].register_forward_hook(_keep(found, key, int(frames) if frames else None)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded(owner: object, method: str) -> Iterator[list[Tensor]]:
    """Collect copies of what a method of `owner` returns. Unlike a hook, it also sees what a CUDA graph computes."""
    original, results = getattr(owner, method), []

    def call(*args: Any, **kwargs: Any) -> Tensor:
        result = original(*args, **kwargs)
        results.append(result.clone())
        return result

    setattr(owner, method, call)
    try:
        yield results
    finally:
        delattr(owner, method)


def _keep(found: dict[str, Tensor], key: str, frames: int | None):
    def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
        found.setdefault(key, output[..., :frames])

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
