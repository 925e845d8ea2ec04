"""What the documents and messages name exists: files, links, make targets, options, models, tensors."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.explaining import SCRIPTS
from tests.system.test_architecture import FLOORS, LIBRARY, MODELS, TOOLS, name_of

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [
    ROOT / "deploy" / "nginx" / "gateway.d" / "README.md",
    ROOT / "tools" / "demo_model" / "trained" / "README.md",
]
LAUNCHERS = [path for path in sorted((ROOT / "scripts").iterdir()) if path.suffix in (".py", ".sh")]
MAKEFILE = (ROOT / "Makefile").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()

# A path of this repository as prose names it: with a folder and an ending.
PATH = re.compile(
    r"\b(?:common|deploy|docs|model_repo(?:_dit)?|scripts|tests|tools)/[\w./-]*\.(?:py|md|sh|yml|yaml|conf|dot|proto|json|jsonl|txt|wav)\b"
)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(page))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert [path for path in PATH.findall(text_of(page)) if not (ROOT / path).exists()] == []


def test_every_page_that_code_names_exists() -> None:
    sources = [*LIBRARY, *MODELS, *TOOLS, *LAUNCHERS, *ROOT.glob("*.yml"), *(ROOT / "deploy").rglob("*.y*ml")]
    sources += [ROOT / name for name in (".env.example", "Dockerfile.server", "Makefile", "pyproject.toml")]
    named = {(name_of(path), page) for path in sources for page in re.findall(r"\bdocs/[\w/]+\.\w+", path.read_text())}
    assert named and {(file, page) for file, page in named if not (ROOT / page).exists()} == set()


def test_the_table_of_rooms_has_every_room_on_its_floor() -> None:
    rows = re.findall(r"^\| (\d) \| `(\w+)/?` \|", ARCHITECTURE, re.MULTILINE)
    assert sorted(rows) == sorted((str(number), room) for number, floor in enumerate(FLOORS, start=1) for room in floor)


def test_every_model_is_named_in_the_readme_and_the_architecture() -> None:
    models = {path.parents[1].name for path in MODELS}
    for page in (ROOT / "README.md", ROOT / "docs" / "architecture.md", ROOT / "docs" / "architecture.dot"):
        assert {model for model in models if not re.search(rf"\b{model}\b", text_of(page))} == set(), page


def test_the_table_of_models_has_every_tensor_of_ours() -> None:
    """Of `tensorrt_llm`, whose tensors are those of another backend, it has a selection."""
    section = ARCHITECTURE.split("## Models and tensors")[1].split("\n## ")[0]
    for path in MODELS:
        model = path.parents[1].name
        template = (path.parents[1] / "config.pbtxt").read_text()
        tensors = set(re.findall(r'\{ name: "(\w+)" data_type', template))
        tensors -= {"START", "END", "CORRID"}
        if model != "tensorrt_llm":
            assert {tensor for tensor in tensors if f"`{tensor}`" not in section} == set(), model
        else:
            row = next(line for line in section.splitlines() if line.startswith("| `tensorrt_llm`"))
            assert {name for name in re.findall(r"`(\w+)`", row) if name not in tensors | {model}} == set()


def test_the_picture_is_that_of_its_source() -> None:
    picture = text_of(ROOT / "docs" / "architecture.svg")
    labels = re.findall(r"<b>([^<]+)</b>", text_of(ROOT / "docs" / "architecture.dot"))
    assert len(labels) > 10 and [label for label in labels if f">{label}</text>" not in picture] == []


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    sources = [*PAGES, *LAUNCHERS, *LIBRARY, *TOOLS]
    named = {match for path in sources for match in re.findall(r"(?:`|run: |\n)make ([a-z-]+)", path.read_text())}
    assert named and named <= targets


@pytest.fixture(scope="module")
def explanations() -> list[dict[str, str]]:
    """What `--help` prints, of every script: run as a file, and as a module."""
    ways = [[sys.executable, "-m", "tests.support.explaining", way] for way in ("file", "module")]
    runs = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for command in ways]
    return [json.loads(run.communicate(timeout=120)[0]) for run in runs]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself_as_a_file_and_as_a_module(script: str, explanations: list[dict]) -> None:
    for said in (explanation[script] for explanation in explanations):
        assert "usage:" in said and len(said) > 200, said


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_of_the_documented_commands_are_in_their_help(page: Path, explanations: list[dict]) -> None:
    text = re.sub(r"\\\n\s*", " ", text_of(page))
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    commands = re.findall(r"python3? (?:-m scripts\.|scripts/)(\w+)(?:\.py)?([^`\n]*)", blocks)
    commands += re.findall(r"`\S*python3? -m scripts\.(\w+)([^`]*)`", text)
    for script, arguments in commands:
        options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"&&.*", "", arguments))) - {"--help"}
        assert {option for option in options if option not in explanations[1][script]} == set(), f"{script}{arguments}"
