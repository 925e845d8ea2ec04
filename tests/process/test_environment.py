"""The variables that the server's process sets for the models' processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.monitoring import faults
from cosyvoice_triton.monitoring.environment import TEST_FAULTS, ModelEnvironment, tritonserver_environment
from cosyvoice_triton.monitoring.health import DrainFile

FULL = ModelEnvironment(
    metrics_directory=Path("/m"), drain_file=Path("/d"), grpc_address="10.0.0.1:9001", faults=Path("/")
)


def test_models_read_what_the_server_wrote_in_variables_whose_names_are_a_contract() -> None:
    for environment in (FULL, ModelEnvironment()):
        assert ModelEnvironment.read(environment.variables()) == environment
    assert FULL.variables() == {
        "TTS_METRICS_DIR": "/m",
        "TTS_DRAIN_FILE": "/d",
        "TTS_GRPC_ADDRESS": "10.0.0.1:9001",
        "TTS_TEST_FAULTS": "/",
    }


@pytest.mark.parametrize("variables", [{}, {"TTS_METRICS_DIR": "", "TTS_DRAIN_FILE": "", "TTS_GRPC_ADDRESS": ""}])
def test_without_variables_models_publish_nothing_and_call_tritons_default_port(variables: dict[str, str]) -> None:
    environment = ModelEnvironment.read(variables)
    assert (environment.metrics_directory, environment.drain_file, environment.faults) == (None, None, None)
    assert environment.grpc_address == "127.0.0.1:8001"


def test_tritonserver_gets_this_interpreter_the_libraries_and_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("LD_PRELOAD", "/my/malloc.so")
    environment = tritonserver_environment(FULL, [Path("/lib/a"), Path("/lib/b")], Path("/tmp/ours.so"))
    assert environment["LD_PRELOAD"] == "/my/malloc.so /tmp/ours.so"
    assert environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == environment["LRU_CACHE_CAPACITY"] == "256"
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert environment["LD_LIBRARY_PATH"] == "/lib/a:/lib/b:/mine"
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert environment["OMP_WAIT_POLICY"] == "ACTIVE"  # the caller's choice wins
    assert environment.items() >= FULL.variables().items()


def test_requests_are_refused_once_the_drain_file_exists(tmp_path: Path) -> None:
    drain = DrainFile(tmp_path / "draining")
    drain.reserve()
    drain.check()
    drain.create()
    with pytest.raises(UnavailableError, match="shutting down"):
        DrainFile(tmp_path / "draining").check()
    DrainFile(None).check()  # of a server that is never drained


def test_a_fault_happens_once_for_each_file_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEST_FAULTS, str(tmp_path))
    assert not faults.take("nan_mel")
    (tmp_path / "nan_mel").touch()
    assert not faults.take("nan_logits")
    assert faults.take("nan_mel") and not faults.take("nan_mel")
    monkeypatch.setattr(Path, "iterdir", lambda directory: iter([directory / "nan_mel"]))
    assert not faults.take("nan_mel"), "another process that has seen the file was faster"


def test_unknown_faults_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEST_FAULTS, str(tmp_path))
    (tmp_path / "earthquake").touch()
    with pytest.raises(ValueError, match="no fault 'earthquake'; there are gpu_error, "):
        faults.take("nan_mel")
    with pytest.raises(ValueError, match="TTS_TEST_FAULTS=/nowhere is not a directory"):
        ModelEnvironment.read({"TTS_TEST_FAULTS": "/nowhere"})


def test_without_a_collector_nothing_is_imported() -> None:
    code = """
import sys
from cosyvoice_triton.monitoring import tracing
with tracing.span("a"), tracing.child("b", {"traceparent": "00"}) as b:
    b.event("c")
    assert tracing.carried() == {} and not tracing.is_on()
tracing.flush()
assert not any(name.startswith("opentelemetry") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"OTEL_SDK_DISABLED": "true", "PATH": ""})
