"""What README.md and the messages promise exists: files of the tree, make targets, options of the scripts."""

import json
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.support.explaining import SCRIPTS

README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def test_every_file_of_the_tree_exists_and_every_module_is_in_it() -> None:
    tree = README.split("## Tree")[1].split("```")[1]
    named = set(re.findall(r"\b[a-z_0-9]+\.py\b", tree))
    present = {path.name for path in (ROOT / "common").glob("*.py")} - {"__init__.py"}
    assert named & present == present
    assert named <= present | {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    sources = [README, *(path.read_text() for path in (ROOT / "scripts").glob("*.py"))]
    sources += [path.read_text() for path in (ROOT / "common").glob("*.py")]
    named = {match for source in sources for match in re.findall(r"(?:`|run: |\n)make ([a-z-]+)", source)}
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


def test_options_of_the_documented_commands_are_known() -> None:
    blocks = re.sub(r"\\\n\s*", " ", README + (ROOT / "docs" / "benchmark.md").read_text())
    commands = re.findall(r"\.venv/bin/python (?:-m scripts\.|scripts/)(\w+)(?:\.py)?([^`\n]*)", blocks)
    assert commands
    for script, arguments in commands:
        options = set(re.findall(r"--[a-z-]+", arguments)) - {"--help"}
        files = [
            ROOT / "scripts" / f"{script}.py",
            ROOT / "common" / "client.py",
            *(ROOT / "scripts" / "load").glob("*.py"),
        ]
        source = "".join(path.read_text() for path in files)
        assert [option for option in options if f'"{option}"' not in source] == [], script
