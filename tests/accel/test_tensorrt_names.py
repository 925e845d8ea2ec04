"""Every name of TensorRT that we use exists in the bindings of both editions, of which one cannot be imported here."""

import ast
from pathlib import Path

import pytest
from cosyvoice_triton.runtimes import editions

from tests.conftest import ROOT
from tests.support import fake_tensorrt

NAMES = {
    line
    for line in (ROOT / "tests/assets/tensorrt_names.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
ONLY_RTX = {"num_compute_capabilities", "set_compute_capability"}
SOURCES = [ROOT / "common/cosyvoice_triton/runtimes/tensorrt.py", ROOT / "common/cosyvoice_triton/export/builder.py"]
# Variables that hold TensorRT's objects in those files.
HOLDERS = {"trt", "builder", "network", "parser", "config", "profile", "cache", "context", "_engine", "_runtime"}


def used_in(path: Path) -> set[str]:
    """Names of TensorRT's package and objects that a file uses."""
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            root, names = node, []
            while isinstance(root, ast.Attribute) and root.attr not in HOLDERS:
                names.append(root.attr)
                root = root.value
            holder = root.attr if isinstance(root, ast.Attribute) else getattr(root, "id", "")
            used |= set(names) if holder in HOLDERS else set()
    return used - {"__init__", "__version__", "split"}


def in_fake() -> set[str]:
    """The fake's classes and their public attributes."""
    names = set()
    for name, kind in fake_tensorrt.classes().items():
        names |= {name} | {attribute for attribute in vars(kind) if not attribute.startswith("_")}
    return names


def of_rtx() -> set[str]:
    """The names of the other edition, whose bindings are installed."""
    bindings = editions.RTX.load()
    kinds = [kind for kind in vars(bindings).values() if isinstance(kind, type)]
    return {*vars(bindings), *(name for kind in kinds for name in dir(kind))}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_name_in_our_sources_exists_in_the_bindings_of_both_editions(path: Path) -> None:
    used = used_in(path)
    assert len(used) > 10
    assert used - of_rtx() == set()
    assert used - NAMES - ONLY_RTX == set()


def test_the_fake_has_no_name_that_the_bindings_lack() -> None:
    assert in_fake() - NAMES == set()
