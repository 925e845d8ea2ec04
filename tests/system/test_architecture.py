"""What neither ruff nor the import linter can say of the sources. `make check` runs both."""

import ast
import graphlib
import io
import tokenize
from pathlib import Path

import grimp

from tests.conftest import ROOT
from tests.mutations.__main__ import read

LIBRARY = sorted((ROOT / "common").rglob("*.py"))
MODELS = sorted(ROOT.glob("model_repo*/*/1/*.py"))
SOURCES = [*LIBRARY, *MODELS, *sorted((ROOT / "scripts").rglob("*.py"))]

CONSTANTS = "common/cosyvoice_triton/constants.py"
NUMBERS = {"151663", "24000", "16000", "480", "3840"}  # token id and rates, which only that file may have


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCES}
    assert {name_of(path): lines for path, lines in lengths.items() if lines > (150 if path in MODELS else 450)} == {}


def test_there_are_no_circular_imports() -> None:
    """Imports inside functions count too."""
    graph = grimp.build_graph("cosyvoice_triton", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        list(graphlib.TopologicalSorter(imports).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_rates_and_token_ids_are_defined_in_one_file() -> None:
    found = [
        f"{name_of(path)} line {token.start[0]}: {token.string}"
        for path in SOURCES
        if name_of(path) != CONSTANTS
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.NUMBER and token.string.replace("_", "").removesuffix(".0") in NUMBERS
    ]
    assert found == []


def test_class_names_are_unique() -> None:
    names: dict[str, list[str]] = {}
    for path in LIBRARY:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names.setdefault(node.name, []).append(name_of(path))
    assert {name: files for name, files in names.items() if len(files) > 1} == {}


def test_every_mutation_applies_to_the_code_and_names_tests_that_exist() -> None:
    stale = []
    for mutation in read():
        path = ROOT / mutation.file
        named = [ROOT / word.partition("::")[0] for word in mutation.tests.split() if word.startswith("tests/")]
        if not path.exists() or mutation.applied(path.read_text()) is None or not all(test.exists() for test in named):
            stale.append(f"{mutation.package}: {mutation.what}")
    assert stale == []
