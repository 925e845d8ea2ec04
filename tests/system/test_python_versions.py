"""The package under every Python that it promises and that this machine has."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

PROMISED = ("3.10", "3.11", "3.12")
IMPORT_ALL = Path(__file__).parents[1] / "support" / "import_all.py"


def python(version: str) -> str | None:
    """Returns the path of that Python: one of pyenv's, whose commands fail unless selected, or the one on PATH."""
    found = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    for candidate in (*map(str, found), shutil.which(f"python{version}")):
        if candidate and subprocess.run([candidate, "--version"], capture_output=True).returncode == 0:
            return candidate
    return None


def test_the_promised_versions_are_those_of_the_package() -> None:
    (oldest, above) = re.findall(r"requires-python = \">=3\.(\d+),<3\.(\d+)\"", (ROOT / "pyproject.toml").read_text())[
        0
    ]
    assert tuple(f"3.{minor}" for minor in range(int(oldest), int(above))) == PROMISED


@pytest.mark.parametrize("version", PROMISED)
def test_every_module_can_be_imported(version: str) -> None:
    if (executable := python(version)) is None:
        pytest.skip(f"Python {version} is not installed")
    run = subprocess.run([executable, "-I", "-S", IMPORT_ALL, ROOT / "common"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
