"""Fixtures: the fake of Triton's Python API, models loaded by their path, and the real server over the demo weights."""

import importlib.util
import os
import shutil
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support import fake_triton
from tests.support.shared import made_once

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE = ROOT / "tests" / "deployment" / "test_stages.py"

# Before any test module imports the library; inside tritonserver the real one is there already.
sys.modules.setdefault("triton_python_backend_utils", fake_triton.as_module())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, the files that take longest start first, so that all workers end at about the same time."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (item.path != LONGEST_FILE, item.get_closest_marker("server") is None))


@pytest.fixture(scope="session", autouse=True)
def every_cpu_alike() -> Iterator[None]:
    """Flows compute in float32 on every CPU, unless a test says otherwise. In bfloat16, which "auto" takes where a CPU
    has it, the rest of a batch changes a stream's rounding, and random weights make another pitch of that.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "get_capabilities", dict)
        yield


@pytest.fixture
def triton_models() -> Iterator[dict[str, fake_triton.Callee]]:
    """The models that calls reach, by name; empty at the start and at the end of a test."""
    fake_triton.models.clear()
    yield fake_triton.models
    fake_triton.models.clear()


@pytest.fixture
def triton_door(triton_models: dict[str, fake_triton.Callee], monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """gRPC before the same models, see tests/support/fake_door.py."""
    from common.process.environment import GRPC_ADDRESS
    from tests.support.fake_door import fake_door

    with fake_door() as door:
        monkeypatch.setenv(GRPC_ADDRESS, door.address)
        yield door


def load_model(path: Path) -> types.ModuleType:
    """The module of a model.py, under a name of its own: all of them are called `model`."""
    spec = importlib.util.spec_from_file_location(f"model_{path.parent.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def demo_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint with random weights and its LLM converted for the CPU engine; this worker's own copy.

    Its utterances last about three seconds by construction, whatever the text; tests that listen for words use the
    trained checkpoint.
    """
    from tools.demo_model import make as make_demo_model
    from tools.prepare.genai import convert

    def make(directory: Path) -> None:
        assert make_demo_model.main([str(directory), "--weights", "random"]) == 0
        convert(directory / "cosyvoice2_llm", directory / "cosyvoice2_llm_genai", "fp32")

    made = made_once(tmp_path_factory, "demo_models", make)
    return shutil.copytree(made, tmp_path_factory.mktemp("demo") / "models")  # tests register voices in it


@pytest.fixture(scope="session")
def serve(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., object]]:
    """`serve(stack="dit", decoupled=True, **options)`: the real server over that stack, ready.

    One server runs at a time, to bound the memory: asking for another stack stops the one before.
    """
    from common.server.rendering import StackOptions, render
    from common.server.tritonserver import Ports, TritonServer

    running: list[tuple[StackOptions, TritonServer]] = []

    def start(stack: str = "dit", decoupled: bool = True, **options: object) -> TritonServer:
        options["settings"] = {"flow_precision": "float32"} | options.get("settings", {})  # see `every_cpu_alike`
        wanted = StackOptions(models_dir=demo_models, stack=stack, decoupled=decoupled, device="cpu", **options)
        current = next((server for known, server in running if known == wanted), None)
        if current is not None:
            return current
        _stop(running)
        directory = tmp_path_factory.mktemp("stack")
        render(wanted, directory / "repository")
        server = TritonServer(directory / "repository", ports=Ports(0, 0, 0), log_file=directory / "server.log")
        server.__enter__()
        running.append((wanted, server))
        return server

    yield start
    _stop(running)


@pytest.fixture(scope="module")
def speech_stack(serve: Callable[..., object], demo_models: Path) -> Iterator[object]:
    """The speech service before the real server, see tests/support/speech_fixtures.py."""
    from tests.support.speech_fixtures import PLACES, speech_stack_over

    # No stream is forgotten by itself: one that kept its place would be felt.
    triton = serve(settings={"max_streams": str(PLACES), "idle_seconds": "600"})
    with speech_stack_over(triton, demo_models / "voices") as stack:
        yield stack


def _stop(running: list) -> None:
    while running:
        server = running.pop()[1]
        os.killpg(server._process.pid, signal.SIGKILL)  # unloading takes 4 s, and is test_server.py's matter
        server.stop()
