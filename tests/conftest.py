"""Fixtures: the fake of Triton's Python API, models loaded by their path, and the real server over the demo weights."""

import filecmp
import importlib.util
import json
import random
import shutil
import signal
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from tests.support import fake_triton
from tests.support.shared import made_once

ROOT = Path(__file__).resolve().parent.parent
# They use one server, the default of `serve`: one worker runs these files, one after another, and starts it once.
SAME_SERVER = (
    "tests/client/test_grpc.py",
    "tests/speaker/test_speaker.py",
    "tests/speech_service/test_end_to_end.py",
    "tests/speech_service/test_page.py",
    "tests/system/test_end_to_end.py",
)

# A shell that starts the tests in the background may have set SIGINT to be ignored, and the servers would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before any test module imports the library; inside tritonserver the real module is already loaded.
sys.modules.setdefault("triton_python_backend_utils", fake_triton.as_module())


def pytest_configure(config: pytest.Config) -> None:
    """Each of several workers has ports of its own: a server binds its port long after it was found to be free."""
    if worker := getattr(config, "workerinput", None):
        from cosyvoice_triton.server import tritonserver

        ports, number, count = sorted(tritonserver.usable_ports()), int(worker["workerid"][2:]), worker["workercount"]
        # One range, not every second port: some servers need two adjacent ones.
        ports = ports[len(ports) * number // count : len(ports) * (number + 1) // count]
        first = random.randrange(len(ports))
        tritonserver._ports = cycle(ports[first:] + ports[:first])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, the files that take longest start first, so that all workers end at about the same time.
    Tests on a GPU are skipped where there is none."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip("needs a CUDA device; run on a machine with a GPU"))
    if hasattr(config, "workerinput"):
        same_server = {ROOT / file for file in SAME_SERVER}
        server, slow = ({item.path for item in items if item.get_closest_marker(name)} for name in ("server", "slow"))
        items.sort(key=lambda item: [item.path not in files for files in (same_server, server, slow)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return SAME_SERVER[0] if file in SAME_SERVER else file

    return ByServer(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The serial tests are in few files, and importing the others takes ten seconds."""
    if config.option.markexpr == "serial" and collection_path.name.startswith("test_"):
        return "mark.serial" not in collection_path.read_text(encoding="utf-8") or None
    return None


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The loop of tests that are coroutines. Those that use grpc.aio in it are none: it hands events of loops that are
    closed to a later one, whose exceptions the plugin takes for the test's."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def float32_on_every_cpu() -> Iterator[None]:
    """Flows compute in float32 on every CPU, unless a test chooses otherwise. In bfloat16, which "auto" selects on CPUs
    that have it, the other streams of a batch change the rounding, and with random weights even the pitch.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "get_capabilities", dict)
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """httpx reads them for every client, and so for every request of its own, which takes longer than most answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx2._transports.default.create_ssl_context", cache(httpx2.create_ssl_context))
        yield


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a process that reads what this one publishes."""
    from cosyvoice_triton.monitoring.environment import METRICS_DIRECTORY

    monkeypatch.setenv(METRICS_DIRECTORY, str(tmp_path))
    return tmp_path


@pytest.fixture
def triton_models() -> Iterator[dict[str, fake_triton.Callee]]:
    """The models that calls reach, by name; emptied before and after each test."""
    fake_triton.models.clear()
    yield fake_triton.models
    fake_triton.models.clear()


@pytest.fixture
def triton_grpc(triton_models: dict[str, fake_triton.Callee], monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A gRPC server for the same models, see tests/support/fake_grpc_server.py."""
    from cosyvoice_triton.monitoring.environment import GRPC_ADDRESS

    from tests.support.fake_grpc_server import fake_grpc_server

    with fake_grpc_server() as server:
        monkeypatch.setenv(GRPC_ADDRESS, server.address)
        yield server


def load_model(path: Path) -> types.ModuleType:
    """The module of a model.py, under a unique name: Triton calls all of them `model`."""
    spec = importlib.util.spec_from_file_location(f"model_{path.parent.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def initialized_model(path: Path, decoupled: bool = False, instances: int = 1, **parameters: str) -> Any:
    """The model of a model.py, with these parameters of its config.pbtxt, as Triton initializes it on a CPU."""
    name = path.parent.parent.name
    config = {
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
        "model_transaction_policy": {"decoupled": decoupled},
        "instance_group": [{"count": instances}],
    }
    args = {"model_name": name, "model_instance_name": f"{name}_0", "model_instance_kind": "CPU"}
    model = load_model(path).TritonPythonModel()
    model.initialize(args | {"model_config": json.dumps(config)})
    return model


@pytest.fixture(scope="session")
def demo_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints with random weights and an LLM converted for the CPU engine; this worker's own copy.

    Its utterances last about three seconds by construction, whatever the text; tests that listen for words use the
    trained checkpoint.
    """
    from tests.random_weights.checkpoint import make as make_random_weights
    from tests.support.llm_fixtures import shared_genai, shared_llm

    def make(directory: Path) -> None:
        make_random_weights(directory)
        weights = Path("cosyvoice2_llm", "model.safetensors")
        assert filecmp.cmp(directory / weights, shared_llm(tmp_path_factory).parent / weights, shallow=False)
        shutil.copytree(shared_genai(tmp_path_factory), directory / "cosyvoice2_llm_genai")

    made = made_once(tmp_path_factory, "demo_models", make)
    return shutil.copytree(made, tmp_path_factory.mktemp("demo") / "models")  # tests register voices in it


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained checkpoint as it is copied out of the package; it must not be changed."""
    from cosyvoice_triton.prepare.demo import copy_demo

    def copy(directory: Path) -> None:
        directory.mkdir()
        copy_demo(directory)

    return made_once(tmp_path_factory, "demo_files", copy)


@pytest.fixture(scope="session")
def demo_voice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained checkpoint as `cosyvoice-triton prepare demo` leaves it; it must not be changed."""
    from cosyvoice_triton.prepare import steps

    return made_once(tmp_path_factory, "demo_voice", steps.demo)


@pytest.fixture(scope="session")
def serve(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., object]]:
    """`serve(stack="dit", decoupled=True, **options)`: the real server with that stack, ready.

    To bound the memory, each worker runs one server at a time: asking for another stack stops the previous server. Its
    idle streams keep their slots, of which there are STREAMS, so that one that is not given back is missed.
    """
    from cosyvoice_triton.server.options import StackOptions
    from cosyvoice_triton.server.rendering import render
    from cosyvoice_triton.server.tritonserver import Ports, TritonServer

    from tests.support.server_requests import STREAMS

    running: list[tuple[StackOptions, TritonServer]] = []

    def start(stack: str = "dit", decoupled: bool = True, **options: Any) -> TritonServer:
        # See `float32_on_every_cpu`, and `demo_models`: repetition-aware sampling would change the utterances' lengths.
        # A machine that runs tests may be too slow for the few listeners that a test needs at once.
        defaults = {"flow_precision": "float32", "sampling": "triton"}
        defaults |= {"profile": "unlimited", "model_timeout": "60"}
        defaults |= {"max_streams": str(STREAMS), "idle_seconds": "600", "text_timeout": "5"}
        options["settings"] = defaults | options.get("settings", {})
        wanted = StackOptions(models_dir=demo_models, stack=stack, decoupled=decoupled, device="cpu", **options)
        current = next((server for known, server in running if known == wanted), None)
        if current is not None and current.model_processes():  # a test may have killed it
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
def speech_url(serve: Callable[..., Any], demo_models: Path) -> Iterator[str]:
    """The URL of the speech service in front of the real server, see tests/support/speech_fixtures.py."""
    from tests.support.speech_fixtures import speech_over

    with speech_over(serve().grpc_url, demo_models / "voices") as url:
        yield url


def _stop(running: list) -> None:
    while running:
        server = running.pop()[1]
        server.kill()  # unloading takes 4 s and is tested in test_server.py
        server.stop()
