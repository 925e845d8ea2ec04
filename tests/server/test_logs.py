"""The log of tritonserver is kept over restarts and bounded."""

import os
from pathlib import Path

from cosyvoice_triton.server import logs
from cosyvoice_triton.server.logs import KEPT, LogRotation, failure


def test_the_log_of_an_earlier_server_is_kept_and_the_oldest_one_goes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    rotation = LogRotation(log)
    rotation.rotate()
    with log.open("ab", buffering=0) as written:
        for run in range(KEPT + 2):
            written.write(b"crash %d" % run)
            rotation.rotate()
            assert log.stat().st_size == 0  # the open file goes on at its beginning
    kept = [log.with_name(f"log.{number}").read_text() for number in range(1, KEPT + 1)]
    assert kept == [f"crash {run}" for run in range(KEPT + 1, 1, -1)]
    assert len(list(tmp_path.iterdir())) == KEPT + 1


def test_a_log_below_its_limit_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("abc")
    LogRotation(log).rotate(above=3)
    assert log.read_text() == "abc" and list(tmp_path.iterdir()) == [log]
    LogRotation(log).rotate(above=2)
    assert log.read_text() == "" and log.with_name("log.1").read_text() == "abc"


def test_after_a_failed_copy_the_next_is_tried_when_the_log_has_grown_by_its_limit(tmp_path, monkeypatch, caplog):
    """As on a full disk: nothing is lost, and the earlier log stays."""
    log, earlier, attempts = tmp_path / "log", tmp_path / "log.1", list[int]()
    earlier.write_text("earlier")

    def full(log: Path, copy: Path) -> None:
        attempts.append(log.stat().st_size)
        copy.write_bytes(b"a part")
        raise OSError("No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    monkeypatch.setattr(logs, "MAX_BYTES", 100)
    rotation = LogRotation(log)
    for size in (150, 151, 249, 250, 251):
        log.touch()
        os.truncate(log, size)
        rotation.rotate(above=100)
    assert attempts == [150, 250]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert log.stat().st_size == 251 and earlier.read_text() == "earlier"
    assert sorted(tmp_path.iterdir()) == [log, earlier]


def test_of_a_failed_start_the_last_line_is_why_a_model_was_not_loaded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        'E1129 09:26:47.586767 1 server.cc:241] "CudaDriverHelper has not been initialized."\n'
        'I1129 09:26:48.000000 1 server.cc:1] "loading"\n'
        'E1129 09:27:37.240651 1 backend_model.cc:692] "ERROR: Failed to create: ValueError: no\\n\\nAt:\\n  a.py"\n'
        "E1129 09:27:37.240785 1 model_lifecycle.cc:642] \"failed to load 'a' version 1: Internal: ValueError: no\"\n"
        "| a     | 1       | UNAVAILABLE: Internal: ValueError: no |\n"
        "error: creating server: Internal - failed to load all models\n"
    )
    shown = failure(log).splitlines()
    assert len(shown) == 5 and shown[2] == "At:" and shown[-1] == "a: ValueError: no"
    log.write_text("terminate called\n  what():  std::bad_alloc\n")
    assert failure(log) == "  what():  std::bad_alloc"
