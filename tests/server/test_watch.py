"""What is noticed of models that die, hang or fail, from the files that they publish."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from cosyvoice_triton.errors import FatalError
from cosyvoice_triton.monitoring import health as process_health
from cosyvoice_triton.monitoring.environment import METRICS_DIRECTORY
from cosyvoice_triton.monitoring.health import SUCCESS_AGE, Health, has_failed, report_failure
from cosyvoice_triton.monitoring.metrics import ENDING, QUEUED, MetricsFile, MetricsPublisher, page, sum_of, to_bytes
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


class Model:
    """A model that has published its files once. `publish` renews them, as its thread does four times a second."""

    def __init__(self, name: str) -> None:
        self.now = 0.0
        self.health = Health(lambda: self.now)
        self._labels = {"model": name, "model_instance": f"{name}_0"}
        directory = Path(os.environ[METRICS_DIRECTORY])
        self._file = MetricsFile(directory / f"{name}_0{ENDING}", to_bytes(self._labels, self.health.values()))

    def publish(self, success_age: float = 0.0) -> None:
        self.now = success_age
        self._file.write(to_bytes(self._labels, self.health.values()))


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


def test_a_model_that_fails_its_test_is_not_ready_until_something_succeeds(published: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no audio")

    model, watch = Model("m"), ModelWatch(published)
    model.health.suspect()
    model.health.test_if_due(fail, "m")
    model.publish()
    assert watch.check() == {} and watch.why_not_ready() == "m fails its own test"
    model.publish(USELESS_SECONDS)
    assert watch.check() != {}
    model.health.succeeded()
    model.publish()
    assert watch.check() == {} and watch.why_not_ready() == ""


def test_a_failure_that_a_model_reports_ends_the_server(published: Path) -> None:
    Model("m")
    watch = ModelWatch(published)
    report_failure("m", FatalError("the engine is dead"))
    assert watch.check() == {"m": "model m has failed and cannot recover: the engine is dead"}


def test_a_lost_model_is_published_as_failing_and_no_longer_a_fault(published: Path) -> None:
    lost, sound, watch = Model("lost"), Model("sound"), ModelWatch(published)
    lost.publish(STUCK_SECONDS)
    (reason,) = watch.check().values()
    watch.lose("lost", reason)
    assert watch.lost == {"lost": reason} and has_failed(published, "lost") and not has_failed(published, "sound")
    for _ in range(int(HUNG_SECONDS / WATCH_SECONDS) + 2):
        sound.publish()
        assert watch.check() == {} and watch.why_not_ready() == ""
    assert 'tts_model_failing{model="lost",model_instance="lost_0"} 1' in page(published)
    assert SUCCESS_AGE.name + '{model="lost"' not in page(published)


def test_files_of_other_metrics_are_no_model(published: Path) -> None:
    MetricsPublisher(dict, {"model_name": "m", "model_instance_name": "m_0"}).close()
    watch = ModelWatch(published)
    for _ in range(int(HUNG_SECONDS / WATCH_SECONDS) + 2):
        assert watch.check() == {} and watch.why_not_ready() == ""


def test_a_monitor_tests_its_model_and_publishes_the_result(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_health, "health", health := Health())
    monkeypatch.setattr(process_health, "POLL_SECONDS", 0.01)
    tested = threading.Event()
    args = {"model_name": "m", "model_instance_name": "m_0"}
    monitor = process_health.ModelMonitor(args, test=tested.set, read=lambda: {QUEUED: 3})
    health.suspect()
    assert tested.wait(5)
    monitor.close()
    assert sum_of(page(published), QUEUED.name) == 3 and SUCCESS_AGE.name in page(published)


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
