"""The rules of the design: who imports whom, how long a file may be, where numbers live."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT / "common").rglob("*.py"))
MODELS = sorted(ROOT.glob("model_repo*/*/1/*.py"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
SOURCES = [*LIBRARY, *MODELS, *SCRIPTS]

TRITON = "triton_python_backend_utils"
# 151663 and the rates; written so that this file does not hold what it forbids elsewhere.
NUMBERS = {"151663", "24000", "16000", "480", "3840"}

# Packages of the library that may not import the ones on the right: the flow is one-way.
FORBIDDEN = {
    "common/constants.py": ("common",),
    "common/accel": ("common.token2wav", "common.llm", "common.synthesis", "common.triton_io", "common.hift"),
    "common/flow": (
        "common.accel",
        "common.token2wav",
        "common.llm",
        "common.synthesis",
        "common.triton_io",
        "common.hift",
    ),
    "common/hift": ("common.token2wav", "common.llm", "common.synthesis", "common.triton_io", "common.flow"),
    "common/llm": ("common.token2wav", "common.synthesis", "common.triton_io", "common.flow", "common.hift"),
    "common/token2wav": ("common.llm", "common.synthesis", "common.triton_io"),
    "common/speech_service": (
        *("common.token2wav", "common.llm", "common.synthesis", "common.triton_io", "common.flow", "common.hift"),
        *("common.orchestrator", "common.ports", "common.request"),
    ),
    "common/synthesis.py": ("common.triton_io", "common.ports", "common.token2wav", "common.flow", "common.hift"),
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, at its top or anywhere within."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} line {node.lineno}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def begins_with(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_there_is_something_to_check():
    assert len(LIBRARY) > 20 and len(MODELS) == 7 and len(SCRIPTS) > 5


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_the_library_imports_neither_scripts_nor_tests(path):
    upward = {m for m in imports_of(path) if any(begins_with(m, p) for p in ("scripts", "tests", "model_repo"))}
    assert upward == set()


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_import_downward_only(package):
    files = [path for path in LIBRARY if name_of(path) == package or name_of(path).startswith(f"{package}/")]
    assert files
    upward = {
        (name_of(path), module)
        for path in files
        for module in imports_of(path)
        if any(begins_with(module, above) for above in FORBIDDEN[package])
    }
    assert upward == set()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_models_and_one_adapter_know_triton(path):
    if path not in MODELS and not name_of(path).startswith("common/triton_io/"):
        assert not any(begins_with(module, TRITON) for module in imports_of(path))


@pytest.mark.parametrize("path", MODELS, ids=name_of)
def test_a_model_is_short(path):
    assert len(path.read_text().splitlines()) <= 150


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_file_is_a_giant(path):
    assert len(path.read_text().splitlines()) <= 450


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_rates_and_offsets_live_in_one_file(path):
    if name_of(path) == "common/constants.py":
        return
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    found = [
        f"line {token.start[0]}: {token.string}"
        for token in tokens
        if token.type == tokenize.NUMBER and token.string.replace("_", "").removesuffix(".0") in NUMBERS
    ]
    assert found == []
