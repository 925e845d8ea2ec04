"""Rules of the design: allowed imports, file lengths, and constants defined in one file."""

import ast
import graphlib
import io
import re
import tokenize
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = sorted((ROOT / "common").rglob("*.py"))
MODELS = sorted(ROOT.glob("model_repo*/*/1/*.py"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))
SOURCES = [*LIBRARY, *MODELS, *SCRIPTS, *TOOLS]

TRITON = "triton_python_backend_utils"
# Token id and rates, as strings; only common/cosyvoice_triton/constants.py may have them as numbers.
NUMBERS = {"151663", "24000", "16000", "480", "3840"}

# The rooms of the library by floor, lowest first. A room imports only itself and rooms of lower floors.
FLOORS = (
    {"constants", "errors", "tasks", "checkpoint", "device", "kernels", "playback", "profiles", "replicas"},
    {"batches", "config", "stacks", "process", "flow", "hift", "text"},
    {"accel", "llm"},
    {"voice", "server"},
    {"token2wav", "triton_io", "client"},
    {"orchestrator", "speech_service"},
)
# Files with further limits: the pipeline is tested without Triton, so it does not import the modules that call it.
FORBIDDEN = {
    "common/cosyvoice_triton/orchestrator/synthesis.py": (
        "cosyvoice_triton.triton_io",
        "cosyvoice_triton.orchestrator.ports",
    ),
    "common/cosyvoice_triton/orchestrator/chunking.py": (
        "cosyvoice_triton.triton_io",
        "cosyvoice_triton.orchestrator.ports",
    ),
    "common/cosyvoice_triton/orchestrator/first_hops.py": (
        "cosyvoice_triton.triton_io",
        "cosyvoice_triton.orchestrator.ports",
    ),
    "common/cosyvoice_triton/token2wav/policy/scheduler.py": ("cosyvoice_triton.token2wav", "torch"),
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, at the top level or in functions."""
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


def test_the_lists_of_source_files_are_not_empty():
    assert len(LIBRARY) > 20 and len(MODELS) >= 7 and len(SCRIPTS) > 5


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_the_library_imports_no_scripts_tools_tests_or_models(path):
    above = ("scripts", "tools", "tests", "model_repo")
    assert {m for m in imports_of(path) if any(begins_with(m, package) for package in above)} == set()


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_the_library_names_no_script_or_tool(path):
    """Including strings and comments: the library reports errors, and its caller adds the command that fixes them."""
    lines = enumerate(path.read_text().splitlines(), start=1)
    named = re.compile(r"(?<!triton\.)\b(scripts|tools)[./]")
    assert [f"line {number}: {line}" for number, line in lines if named.search(line)] == []


def test_tools_do_not_import_launchers():
    assert {(name_of(p), m) for p in TOOLS for m in imports_of(p) if begins_with(m, "scripts")} == set()


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "common").parts[0].removesuffix(".py")


def test_every_room_is_on_one_floor():
    rooms = [room for floor in FLOORS for room in floor]
    assert sorted(rooms) == sorted({room_of(path) for path in LIBRARY} - {"__init__"})


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_rooms_import_downward_only(path):
    below: set[str] = set()
    for floor in FLOORS:
        if room_of(path) in floor:
            break
        below |= floor
    imported = {m.split(".")[1] for m in imports_of(path) if begins_with(m, "common") and m != "common"}
    assert imported - below - {room_of(path)} == set()


@pytest.mark.parametrize("file", FORBIDDEN)
def test_some_files_import_less_than_their_room(file):
    modules = imports_of(ROOT / file)
    assert {m for m in modules if any(begins_with(m, package) for package in FORBIDDEN[file])} == set()


@pytest.mark.parametrize("package", ["common", "scripts", "tools"])
def test_there_are_no_circular_imports(package):
    """Imports inside functions count too."""
    files = {module_of(path): path for path in sorted((ROOT / package).rglob("*.py"))}
    imports = {module: set(modules_of(path, files)) - {module} for module, path in files.items()}
    try:
        list(graphlib.TopologicalSorter(imports).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def modules_of(path: Path, modules: Container[str]) -> Iterator[str]:
    """Those of `modules` that a file imports; `from package import name` is `package.name` if that is a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if (found := name if name in modules else str(node.module)) in modules:
                    yield found


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_models_and_triton_io_import_the_python_backend(path):
    if path not in MODELS and not name_of(path).startswith("common/cosyvoice_triton/triton_io/"):
        assert not any(begins_with(module, TRITON) for module in imports_of(path))


@pytest.mark.parametrize("path", MODELS, ids=name_of)
def test_models_have_at_most_150_lines(path):
    assert len(path.read_text().splitlines()) <= 150


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_have_at_most_450_lines(path):
    assert len(path.read_text().splitlines()) <= 450


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_rates_and_token_ids_are_defined_in_one_file(path):
    if name_of(path) == "common/cosyvoice_triton/constants.py":
        return
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    found = [
        f"line {token.start[0]}: {token.string}"
        for token in tokens
        if token.type == tokenize.NUMBER and token.string.replace("_", "").removesuffix(".0") in NUMBERS
    ]
    assert found == []


def test_class_names_are_unique():
    names: dict[str, list[str]] = {}
    for path in [*LIBRARY, *SCRIPTS, *TOOLS]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names.setdefault(node.name, []).append(name_of(path))
    assert {name: files for name, files in names.items() if len(files) > 1} == {}
