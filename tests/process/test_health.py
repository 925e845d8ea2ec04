"""Whether a model does its work: its own test, what it publishes, and the failure that it reports; the numbers that it
counts, the page over all models, and the variables of its process; what the server notices of models that die, hang or
fail, from the files that they publish."""

import asyncio
import ctypes
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from cosyvoice_triton.errors import FatalError, ModelCallError, OverloadedError, UnavailableError, is_fatal
from cosyvoice_triton.monitoring import faults, metrics
from cosyvoice_triton.monitoring import health as process_health
from cosyvoice_triton.monitoring.environment import (
    METRICS_DIRECTORY,
    TEST_FAULTS,
    grpc_address,
    path_of,
    tritonserver_environment,
)
from cosyvoice_triton.monitoring.health import (
    FAILING,
    SUCCESS_AGE,
    TEST_SECONDS,
    Health,
    ModelMonitor,
    failure_of,
    report_failure,
)
from cosyvoice_triton.monitoring.metrics import ENDING, MetricsFile, RequestStats, samples_of
from cosyvoice_triton.server.serving import drain
from cosyvoice_triton.server.watch import (
    HUNG_SECONDS,
    IDLE_SECONDS,
    SILENT_SECONDS,
    STUCK_SECONDS,
    USELESS_SECONDS,
    WATCH_SECONDS,
    ModelWatch,
)

from tests.support.waiting import Clock, until


@pytest.fixture
def clock() -> Clock:
    return Clock()


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


def test_a_model_that_is_full_has_neither_passed_nor_failed_its_test(clock: Clock) -> None:
    health = Health(clock)
    clock.now += TEST_SECONDS
    health.test_if_due(Mock(side_effect=UnavailableError("all streams are taken")), "m")
    assert health.values() == {SUCCESS_AGE: TEST_SECONDS, FAILING: 0}


def test_a_test_that_finds_the_engine_dead_reports_it_which_ends_the_server(clock, published, caplog) -> None:
    health = Health(clock)
    clock.now += TEST_SECONDS
    health.test_if_due(Mock(side_effect=FatalError("the engine's thread has ended\nwith details")), "m")
    reported = {"m": "model m has failed and cannot recover: the engine's thread has ended"}
    assert ModelWatch(published).check() == reported
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


def own_mib() -> float:
    return psutil.Process().memory_full_info().uss / 2**20


# The monitor collects garbage, also what tests of other files left behind, an event loop for example.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_model_gives_freed_memory_back(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 MiB in blocks of 64 KiB, each beside one that stays, so that `free` alone gives nothing back."""
    monkeypatch.setattr(process_health, "RETURN_SECONDS", 0.0)
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(64 << 10) for _ in range(3200)]
    for block in blocks:
        ctypes.memset(block, 1, 64 << 10)
    full = own_mib()
    for block in blocks[::2]:
        libc.free(block)
    assert own_mib() > full - 20
    monitor = ModelMonitor({"model_name": "m", "model_instance_name": "m_0"}, test=dict)
    until(lambda: own_mib() < full - 80, 90, every=0.1)
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


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (ValueError("a bad value"), "invalid"),
        (UnavailableError("full"), "unavailable"),
        (OverloadedError("9 listeners", 1.0), "refused"),
        (asyncio.CancelledError(), "cancelled"),
        (RuntimeError("a bug"), "error"),
    ],
)
def test_a_request_is_counted_by_its_outcome(error: BaseException | None, outcome: str) -> None:
    stats = RequestStats()
    try:
        with stats.request() as live:
            assert stats.values()[metrics.LIVE] == 1
            live.sent(1.0, 0.0)
            if error:
                raise error
    except BaseException as raised:
        assert raised is error
    values = stats.values()
    assert values[metrics.LIVE] == 0 and values[metrics.AUDIO] == 1
    assert {line.labels[0][1]: value for line, value in values.items() if line.name == metrics.ENDED.name} == {
        name: int(name == outcome) for name in metrics.OUTCOMES
    }


def test_histogram_buckets_are_cumulative() -> None:
    stats = RequestStats()
    for seconds in (0.01, 0.2, 99.0):
        with stats.request() as live:
            live.first_chunk = seconds
    values = stats.values()
    of_chunks = (line for line in values if line.name == metrics.FIRST_CHUNK.name and line.suffix == "_bucket")
    buckets = {line.labels[0][1]: values[line] for line in of_chunks}
    assert (buckets["0.05"], buckets["0.15"], buckets["0.2"], buckets["10.0"], buckets["+Inf"]) == (1, 1, 2, 2, 3)
    assert values[metrics.FIRST_CHUNK.sample("_count")] == 3
    assert values[metrics.FIRST_CHUNK.sample("_sum")] == pytest.approx(99.21)


def test_leading_silence_counts_until_the_first_audible_sample() -> None:
    stats = RequestStats()
    with stats.request() as live:
        live.sent(1.0, None)
        live.sent(2.0, 1.0)
        assert live.first_chunk is not None and live.first_audible == pytest.approx(live.first_chunk + 2, abs=0.02)
        live.sent(1.0, 0.0)
    values = stats.values()
    assert values[metrics.FIRST_AUDIBLE.sample("_count")] == 1
    assert values[metrics.FIRST_AUDIBLE.sample("_bucket", le="1.5")] == 0


def test_the_page_has_each_family_once_with_a_sample_per_instance(published) -> None:
    for name in ("m_0", "m_1"):
        samples = samples_of({"model": "m", "model_instance": name}, {metrics.QUEUED: 3, metrics.CHUNKS: 7})
        MetricsFile(published / f"{name}{ENDING}", samples).close()
    page = metrics.page(published)
    assert page.count("# TYPE tts_token2wav_chunks_queued gauge\n") == 1
    assert 'tts_token2wav_chunks_total{model="m",model_instance="m_1"} 7\n' in page
    assert metrics.sum_of(page, metrics.QUEUED.name) == 6 and metrics.sum_of(page, "tts_other") == 0
    watch = ModelWatch(published)  # to which files without a health are no models
    for _ in range(int(HUNG_SECONDS / WATCH_SECONDS) + 2):
        assert watch.check() == {} and watch.why_not_ready() == ""


def test_a_writer_that_ends_in_the_middle_leaves_what_it_wrote_before(tmp_path, monkeypatch) -> None:
    path, write = tmp_path / "m", os.pwrite
    file = MetricsFile(path, [["first"]])
    file.write([["second"]])
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda descriptor, data, at: write(descriptor, data[:12], at))
        file.write([["third"]])
    file.close()
    assert metrics.read(path) == (2, [["second"]])
    MetricsFile(path, [["of the next process"]]).close()
    assert metrics.read(path) == (3, [["of the next process"]])


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, directory, address in (("", None, "127.0.0.1:8001"), ("10.0.0.1:9", Path("10.0.0.1:9"), "10.0.0.1:9")):
        monkeypatch.setenv("TTS_METRICS_DIR", value)
        monkeypatch.setenv("TTS_GRPC_ADDRESS", value)
        assert path_of(METRICS_DIRECTORY) == directory and grpc_address() == address


def test_tritonserver_gets_this_interpreter_the_libraries_and_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("LD_PRELOAD", "/my/malloc.so")
    environment = tritonserver_environment(
        {METRICS_DIRECTORY: "/m"}, [Path("/lib/a"), Path("/lib/b")], Path("/tmp/ours.so")
    )
    assert environment["LD_PRELOAD"] == "/my/malloc.so /tmp/ours.so"
    assert environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == environment["LRU_CACHE_CAPACITY"] == "256"
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert environment["LD_LIBRARY_PATH"] == "/lib/a:/lib/b:/mine"
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert environment["OMP_WAIT_POLICY"] == "ACTIVE"  # the caller's choice wins
    assert environment["TTS_METRICS_DIR"] == "/m"


def test_a_fault_happens_once_for_each_file_of_its_name_and_others_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(TEST_FAULTS, str(tmp_path))
    assert not faults.take("nan_mel")
    (tmp_path / "nan_mel").touch()
    assert not faults.take("nan_logits")
    assert faults.take("nan_mel") and not faults.take("nan_mel")
    (tmp_path / "earthquake").touch()
    with pytest.raises(ValueError, match="no fault 'earthquake'; there are gpu_error, "):
        faults.take("nan_mel")
    monkeypatch.setattr(Path, "iterdir", lambda directory: iter([directory / "nan_mel"]))
    assert not faults.take("nan_mel"), "another process that has seen the file was faster"
    monkeypatch.setenv(TEST_FAULTS, "/nowhere")
    with pytest.raises(ValueError, match="TTS_TEST_FAULTS=/nowhere is not a directory"):
        faults.take("nan_mel")


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


class Model:
    """A model that has published its files once. `publish` renews them, as its thread does four times a second."""

    def __init__(self, name: str) -> None:
        self.now = 0.0
        self.health = Health(lambda: self.now)
        self._labels = {"model": name, "model_instance": f"{name}_0"}
        directory = Path(os.environ[METRICS_DIRECTORY])
        self._file = MetricsFile(directory / f"{name}_0{ENDING}", samples_of(self._labels, self.health.values()))

    def publish(self, success_age: float = 0.0) -> None:
        self.now = success_age
        self._file.write(samples_of(self._labels, self.health.values()))


def test_a_process_that_stops_publishing_hangs(published: Path) -> None:
    hung, sound, watch = Model("hung"), Model("sound"), ModelWatch(published)
    silent, faults = 0.0, {}
    assert watch.check() == {} and watch.why_not_ready() == ""
    while not faults:
        silent += WATCH_SECONDS
        sound.publish()
        faults = watch.check()
        assert watch.why_not_ready() == ("hung hangs" if silent >= SILENT_SECONDS else "")
    assert silent == HUNG_SECONDS and "the process of model hung hangs" in faults.pop("hung") and not faults
    hung.publish()
    assert watch.check() == {} and watch.why_not_ready() == ""


def test_a_model_that_completes_nothing_is_not_ready_and_then_useless(published: Path) -> None:
    model, watch = Model("m"), ModelWatch(published)
    for age, reason, useless in (
        (IDLE_SECONDS - 1, "", False),
        (IDLE_SECONDS, "m completes nothing", False),
        (USELESS_SECONDS, "m completes nothing", False),  # perhaps a long utterance on a CPU
        (STUCK_SECONDS, "m completes nothing", True),
    ):
        model.publish(age)
        assert (watch.check() != {}) == useless and watch.why_not_ready() == reason


def test_a_model_that_fails_its_test_repeats_it_and_is_not_ready_until_something_succeeds(published, caplog) -> None:
    model, broken, watch = Model("m"), Mock(side_effect=RuntimeError("no audio")), ModelWatch(published)
    model.health.suspect()
    model.health.test_if_due(broken, "m")
    model.health.test_if_due(broken, "m")
    assert broken.call_count == 2 and "no audio" in caplog.text
    model.publish()
    assert watch.check() == {} and watch.why_not_ready() == "m fails its own test"
    model.publish(USELESS_SECONDS)
    assert watch.check() != {}
    model.health.succeeded()
    model.publish()
    assert watch.check() == {} and watch.why_not_ready() == ""


def test_a_lost_model_is_published_as_failing_and_no_longer_a_fault(published: Path) -> None:
    lost, sound, watch = Model("lost"), Model("sound"), ModelWatch(published)
    lost.publish(STUCK_SECONDS)
    (reason,) = watch.check().values()
    watch.lose("lost", reason)
    assert watch.lost == {"lost": reason}
    assert failure_of(published, "lost").given() and not failure_of(published, "sound").given()
    for _ in range(int(HUNG_SECONDS / WATCH_SECONDS) + 2):
        sound.publish()
        assert watch.check() == {} and watch.why_not_ready() == ""
    assert 'tts_model_failing{model="lost",model_instance="lost_0"} 1' in metrics.page(published)
    assert SUCCESS_AGE.name + '{model="lost"' not in metrics.page(published)


def test_a_monitor_tests_its_model_and_publishes_the_result(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_health, "health", health := Health())
    monkeypatch.setattr(process_health, "POLL_SECONDS", 0.01)
    tested = threading.Event()
    args = {"model_name": "m", "model_instance_name": "m_0"}
    monitor = process_health.ModelMonitor(args, test=tested.set, read=lambda: {metrics.QUEUED: 3})
    health.suspect()
    assert tested.wait(5)
    monitor.close()
    page = metrics.page(published)
    assert metrics.sum_of(page, metrics.QUEUED.name) == 3 and SUCCESS_AGE.name in page


def test_a_request_that_is_accepted_last_is_counted_once_its_model_has_published_it(monkeypatch) -> None:
    published, later = [0], [1, 0]
    monkeypatch.setattr(time, "sleep", lambda seconds: seconds and published.append(later.pop(0)))
    server = SimpleNamespace(refuse_new=dict, check_models=dict, live_requests=lambda: published[-1])
    assert drain(server, SimpleNamespace(), notice=0.0, limit=60.0) == 0 and not later


def test_new_requests_are_accepted_for_the_notice_although_the_page_says_stopping(monkeypatch) -> None:
    page, events = SimpleNamespace(state="ready"), []
    monkeypatch.setattr(time, "sleep", lambda seconds: events.append((page.state, seconds)))
    server = SimpleNamespace(refuse_new=lambda: events.append("refused"), check_models=dict, live_requests=int)
    drain(server, page, notice=7.0, limit=60.0)
    assert events[:2] == [("stopping", 7.0), "refused"]
