"""Whether a model does its work: its own test, what it publishes, and the failure that it reports."""

import ctypes
import gc
import logging
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from cosyvoice_triton.errors import FatalError, ModelCallError, UnavailableError, is_fatal
from cosyvoice_triton.monitoring import health as health_module
from cosyvoice_triton.monitoring.environment import METRICS_DIRECTORY
from cosyvoice_triton.monitoring.health import (
    FAILING,
    SUCCESS_AGE,
    TEST_SECONDS,
    Health,
    ModelMonitor,
    report_failure,
    reported_failures,
)

from tests.support.waiting import Clock, until


@pytest.fixture
def clock() -> Clock:
    return Clock()


def failing(error: Exception) -> Mock:
    """A model's own test that raises this."""
    return Mock(side_effect=error)


def test_a_model_tests_itself_after_some_time_without_a_success_and_after_an_unexpected_error(clock: Clock) -> None:
    health, tests = Health(clock), []

    def tested() -> int:
        health.test_if_due(lambda: tests.append(clock.now), "m")
        return len(tests)

    assert tested() == 0
    clock.now += TEST_SECONDS - 1
    health.succeeded()
    clock.now += TEST_SECONDS - 1
    assert tested() == 0
    clock.now += 1
    assert tested() == 1 and tested() == 1
    health.suspect()
    assert tested() == 2 and tested() == 2


def test_a_failed_test_is_published_and_repeated_until_a_success(clock, caplog) -> None:
    health, broken = Health(clock), failing(RuntimeError("no audio"))
    health.suspect()
    health.test_if_due(broken, "m")
    health.test_if_due(broken, "m")
    assert broken.call_count == 2 and "no audio" in caplog.text
    assert health.values() == {SUCCESS_AGE: 0, FAILING: 1}
    health.succeeded()
    assert health.values() == {SUCCESS_AGE: 0, FAILING: 0}


def test_a_model_that_is_full_has_neither_passed_nor_failed_its_test(clock: Clock) -> None:
    health = Health(clock)
    clock.now += TEST_SECONDS
    health.test_if_due(failing(UnavailableError("all streams are taken")), "m")
    assert health.values() == {SUCCESS_AGE: TEST_SECONDS, FAILING: 0}


def test_a_test_that_finds_the_engine_dead_reports_it(clock, published, caplog) -> None:
    health = Health(clock)
    clock.now += TEST_SECONDS
    health.test_if_due(failing(FatalError("the engine's thread has ended\nwith details")), "m")
    assert reported_failures(published) == {"m": "the engine's thread has ended"}
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL]


def test_without_a_directory_a_failure_is_only_logged(monkeypatch, caplog) -> None:
    monkeypatch.delenv(METRICS_DIRECTORY, raising=False)
    report_failure("m", RuntimeError("CUDA error: unspecified launch failure"))
    assert "m has to be restarted: RuntimeError: CUDA error: unspecified launch failure" in caplog.text


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (FatalError("the engine is dead"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be..."), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("[ONNXRuntimeError] : CUDA failure 700: an illegal memory access was encountered"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (UnavailableError("the LLM server said: CUDA error: an illegal memory access was encountered"), False),
        (ModelCallError("token2wav: CUDA error: an illegal memory access was encountered"), False),
        (ValueError("target_text is 'device-side assert'"), False),
    ],
)
def test_errors_after_which_a_process_cannot_serve(error: Exception, fatal: bool) -> None:
    assert is_fatal(error) == fatal


def anonymous_mib() -> float:
    found = re.search(r"^Anonymous: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) / 1024


# The monitor collects garbage, also what tests of other files left behind, an event loop for example.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_model_gives_freed_memory_back(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 MiB in blocks of 64 KiB, each beside one that stays, so that `free` alone gives nothing back."""
    monkeypatch.setattr(health_module, "RETURN_SECONDS", 0.0)
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(64 << 10) for _ in range(3200)]
    for block in blocks:
        ctypes.memset(block, 1, 64 << 10)
    full = anonymous_mib()
    for block in blocks[::2]:
        libc.free(block)
    assert anonymous_mib() > full - 20
    monitor = ModelMonitor({"model_name": "m", "model_instance_name": "m_0"}, test=dict)
    until(lambda: anonymous_mib() < full - 80, 90, every=0.1)
    monitor.close()
    for block in blocks[1::2]:
        libc.free(block)


def test_what_was_loaded_is_not_scanned_for_garbage_again(published: Path) -> None:
    loaded = [object()]
    try:
        ModelMonitor({"model_name": "m", "model_instance_name": "m_0"}, test=dict).close()
        assert all(each is not loaded for each in gc.get_objects())
    finally:
        gc.unfreeze()
