"""Fixtures of the LLM's tests: the demo's random LLM, as HuggingFace directory and converted for the CPU engine.

Each is made once a session, however many modules import the fixture.
"""

from pathlib import Path

import pytest

from scripts.convert_genai import convert
from scripts.demo_model.llm import make_llm


@pytest.fixture(scope="session")
def llm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.getbasetemp() / "cosyvoice2_llm"
    if not directory.exists():
        make_llm(directory)
    return directory


@pytest.fixture(scope="session")
def genai_dir(llm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.getbasetemp() / "cosyvoice2_llm_genai"
    if not directory.exists():
        convert(llm_dir, directory, "fp32")
    return directory
