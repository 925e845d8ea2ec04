"""The fake TensorRT fails like the real one, so that tests that pass with it are meaningful."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.runtimes.workloads import Span, speaker

from tests.support import fake_tensorrt as trt
from tests.support import tiny_onnx


class Log(trt.ILogger):
    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []

    def log(self, severity: trt.Severity, message: str) -> None:
        self.errors.append(message)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    trt.install(monkeypatch)
    return Log()


@pytest.fixture
def plan(tmp_path: Path) -> bytes:
    tiny_onnx.write_speaker(tmp_path / "campplus.onnx")
    profile = {"batch": Span(1, 1, 2), "frames": Span(4, 4, 9)}
    return trt.plan(tmp_path / "campplus.onnx", replace(speaker(), profile=profile))


@pytest.fixture
def context(log: Log, plan: bytes) -> Any:
    engine = trt.Runtime(log).deserialize_cuda_engine(plan)
    assert engine is not None
    return engine.create_execution_context()


def test_a_context_needs_a_profile_and_shapes_and_addresses_of_all_tensors(context: Any, log: Log) -> None:
    x, y = np.random.default_rng(0).random((1, 5, 80), np.float32), np.zeros((1, 192), np.float32)
    assert not context.set_input_shape("input", (1, 5, 80))  # no profile yet
    assert context.set_optimization_profile_async(0, 0) and not context.set_optimization_profile_async(1, 0)
    assert context.set_optimization_profile_async(0, 0)
    assert context.infer_shapes() == ["input"]
    for shape in ((1, 3, 80), (1, 10, 80), (1, 5, 81), (5, 80)):
        assert not context.set_input_shape("input", shape)
    assert context.set_input_shape("input", (1, 5, 80)) and not context.set_input_shape("other", (1, 5, 80))
    assert context.infer_shapes() == [] and context.get_tensor_shape("output") == (1, 192)

    assert context.set_tensor_address("input", x.ctypes.data) and not context.set_tensor_address("other", 1)
    assert not context.execute_async_v3(0) and "the address of output is not set" in log.errors[-1]
    assert context.set_tensor_address("output", 0)
    assert not context.execute_async_v3(0)
    assert context.set_tensor_address("output", y.ctypes.data) and context.execute_async_v3(0)
    assert np.abs(y).max() > 0.01


def test_use_of_a_context_by_two_threads_at_once_is_an_error(context: Any) -> None:
    context.set_optimization_profile_async(0, 0)
    caught: list[BaseException] = []

    def use() -> None:
        try:
            context.set_input_shape("input", (1, 5, 80))
        except AssertionError as error:
            caught.append(error)

    with context._alone():
        thread = threading.Thread(target=use)
        thread.start()
        thread.join(timeout=10)
    assert "two threads" in str(caught[0])


def test_a_plan_of_another_version_or_machine_is_refused(
    log: Log, plan: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trt.Runtime(log).deserialize_cuda_engine(plan) is not None
    monkeypatch.setattr(trt, "__version__", "10.12.0")
    assert trt.Runtime(log).deserialize_cuda_engine(plan) is None
    assert "version 10.11.0.33, expecting 10.12.0" in log.errors[-1]
    assert trt.Runtime(log).deserialize_cuda_engine(b"\0\1") is None


def test_the_base_class_of_loggers_has_to_be_initialised() -> None:
    class WithoutInit(trt.ILogger):
        def __init__(self) -> None:
            pass

    for logger in (WithoutInit(), print):
        with pytest.raises(TypeError, match="__init__ was called"):
            trt.Runtime(logger)  # type: ignore[arg-type]  # wrong on purpose


def test_only_the_first_logger_is_used(log: Log) -> None:
    other = Log()
    kept = trt.Runtime(log), trt.Runtime(other)
    assert kept[1].deserialize_cuda_engine(b"") is None
    assert len(log.errors) == 1 and other.errors == []
