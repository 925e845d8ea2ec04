"""The load generator against a stub that sends chunks on a schedule, so that the expected latencies are known."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from cosyvoice_triton import samples
from cosyvoice_triton.bench import load as benchmark
from cosyvoice_triton.cli import client_grpc
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.load import runner

from tests.conftest import ROOT
from tests.support.triton_stub import StubProcess, stub_process
from tests.support.waiting import until

VOICE = str(samples.FOLDER / "reference_zh.wav")
FIRST, PAUSE, CHUNKS = 0.15, 0.2, 3
SCHEDULE = [FIRST + index * PAUSE for index in range(CHUNKS)]  # seconds from the request to each chunk
CHUNK_SECONDS = 0.25  # longer than the pause, so that there is no gap
MANIFEST = str(samples.MANIFEST)


def stub_server() -> AbstractContextManager[StubProcess]:
    return stub_process(chunks=CHUNKS, pause=PAUSE, first=FIRST, samples=round(CHUNK_SECONDS * SAMPLE_RATE))


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with stub_server() as server:
        yield server


def manifest(tmp_path: Path, texts: list[str]) -> str:
    path, voice = tmp_path / "texts.jsonl", {"prompt_audio": VOICE, "prompt_text": "你好"}
    rows = [{"id": f"row-{index}", "target_text": text, **voice} for index, text in enumerate(texts)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def command(stub: StubProcess, log_dir: Path, *more: object) -> list[str]:
    host, port = stub.address.split(":")
    return ["--server-addr", host, "--server-port", port, "--log-dir", str(log_dir), *map(str, more)]


def summary(log_dir: Path) -> dict[str, Any]:
    return json.loads((log_dir / "summary.json").read_text())


def lateness(result: dict[str, Any]) -> np.ndarray:
    """Difference of each reported arrival from the schedule, ms."""
    return np.array([np.array(stream["arrivals_ms"]) - 1000 * np.array(SCHEDULE) for stream in result["streams"]])


@pytest.mark.serial
def test_arrival_times_are_reported_and_complete_audio_is_written(stub, tmp_path, capsys) -> None:
    rows = manifest(tmp_path, ["Hello."] * 3)
    more = ("--manifest-path", rows, "--num-tasks", 2, "--warmup-requests", 0)
    assert client_grpc.main(command(stub, tmp_path / "log", *more)) == 0
    result = summary(tmp_path / "log")
    assert (result["requests"], result["errors"], result["warmup_requests"]) == (3, 0, 0)
    assert (lateness(result) > -1).all(), "a chunk arrived before it was sent"
    assert result["share_without_gap"] == 1.0 and result["later_chunk_ms"] is not None
    written = [soundfile.info(tmp_path / "log" / f"row-{index}.wav").frames for index in range(3)]
    assert written == [CHUNKS * CHUNK_SECONDS * SAMPLE_RATE] * 3
    keys = (tmp_path / "log" / "rtf-texts.txt").read_text()
    for key in ("RTF: ", "total_duration: ", "average_first_chunk_latency_ms: ", "second_chunk_latency_99_percentile"):
        assert key in keys
    assert (tmp_path / "log" / "stats_summary-texts.txt").exists()
    assert (tmp_path / "log" / "summary.png").stat().st_size > 10_000
    captured = capsys.readouterr()
    assert "3 requests answered, 0 failed, 0 not sent" in captured.out and "first audible p50" in captured.err


@pytest.mark.serial
def test_a_failing_request_does_not_stop_or_delay_the_others(stub, tmp_path, capsys) -> None:
    rows = manifest(tmp_path, ["Hello.", "fail", "Hello.", "fail", "Hello."])
    more = ("--manifest-path", rows, "--num-tasks", 5, "--warmup-requests", 0)
    assert client_grpc.main(command(stub, tmp_path / "log", *more)) == 1
    result = summary(tmp_path / "log")
    failure = "the server answered with an error: this request fails"
    assert result["failures"] == {"row-1": failure, "row-3": failure}
    assert (result["requests"], result["errors"], result["unsent"]) == (5, 2, 0)
    assert result["total_ms"]["max"] < 1000 * (SCHEDULE[-1] + 5.0)
    captured = capsys.readouterr()
    assert "3 requests answered, 2 failed" in captured.out and "failed: row-1: " in captured.err


@pytest.mark.serial
def test_requests_at_a_rate_are_a_poisson_process_independent_of_answers(stub: StubProcess, tmp_path: Path) -> None:
    rows = manifest(tmp_path, ["Hello."])
    more = ("--manifest-path", rows, "--request-rate", 40, "--num-requests", 80, "--warmup-requests", 0)
    assert client_grpc.main(command(stub, tmp_path / "log", *more)) == 0
    result = summary(tmp_path / "log")
    begun = np.sort([stream["begun_s"] for stream in result["streams"]])
    steps = np.diff(begun)
    assert begun[-1] == pytest.approx(2.0, rel=0.4), "80 requests at 40 a second"
    assert steps.std() == pytest.approx(steps.mean(), rel=0.4), "the intervals of a Poisson process"
    assert result["request_rate"] == 40 and result["num_tasks"] is None


@pytest.mark.serial
def test_a_listener_sends_its_next_request_after_the_audio_has_been_played(stub, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runner, "LISTENERS_SPREAD", 0.0)
    rows = manifest(tmp_path, ["Hello."])
    more = ["--manifest-path", rows, "--num-requests", "2", "--warmup-requests", "0", "--output", str(tmp_path / "out")]
    assert benchmark.main(["--server", stub.address, "--listeners", "1", *more]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    played = SCHEDULE[0] + len(SCHEDULE) * CHUNK_SECONDS
    assert -0.01 < result["rows"][0]["processing_seconds"] - (played + SCHEDULE[-1]) < played, "it waited once"
    assert result["label"] == "Listeners"


def test_a_sweep_over_two_addresses_writes_tables_and_a_plot(stub: StubProcess, tmp_path: Path) -> None:
    servers = ["--server", stub.address, stub.address.replace("127.0.0.1", "localhost"), "--token2wav-gpus", "2"]
    more = ["--llm-gpus", "1", "--num-requests", "4", "--warmup-requests", "1", "--concurrency", "1", "2"]
    assert benchmark.main([*servers, *more, "--output", str(tmp_path / "a")]) == 0
    tables = (tmp_path / "a.md").read_text()
    for title in ("Total Request Latency", "First Chunk Latency", "Playback", "Disaggregated Server"):
        assert f"#### {title}" in tables
    assert "| 2 | 2 | 1.33 |" in tables, "2 tasks on each of 2 servers with 2 GPUs, and 1 GPU for the LLM"
    sweep = json.loads((tmp_path / "a.json").read_text())
    assert [row["label"] for row in sweep["rows"]] == [2, 4] and all(row["errors"] == 0 for row in sweep["rows"])
    assert (tmp_path / "a.png").stat().st_size > 20_000


@pytest.mark.parametrize("sent_signal", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_hangs_ends_the_run_soon_with_a_report(sent_signal, tmp_path, capsys) -> None:
    with stub_server() as stub:
        rows = manifest(tmp_path, ["Hello."])
        more = ("--manifest-path", rows, "--num-tasks", 4, "--num-requests", 500, "--warmup-requests", 0)
        killed = []

        def send_after_the_first_round() -> None:
            until(lambda: len(list((tmp_path / "log").glob("*.wav"))) >= 4)
            killed.append(time.monotonic())
            stub.process.send_signal(sent_signal)

        sender = threading.Thread(target=send_after_the_first_round)
        sender.start()
        assert client_grpc.main(command(stub, tmp_path / "log", *more)) == 1
        assert time.monotonic() - killed[0] < 40  # the 496 requests that are left would take minutes
        sender.join()
    result = summary(tmp_path / "log")
    assert result["requests"] - result["errors"] == 4, "the first round was finished"
    assert result["unsent"] >= 490 and "stopped answering" in result["lost_servers"][stub.address]
    assert "4 requests answered" in capsys.readouterr().out


def test_ctrl_c_ends_the_run_with_a_report(stub: StubProcess, tmp_path: Path) -> None:
    more = ("--manifest-path", manifest(tmp_path, ["Hello."]), "--num-tasks", 2, "--num-requests", 500)
    arguments = command(stub, tmp_path / "log", "--warmup-requests", 0, *more)
    program = [sys.executable, "-m", "cosyvoice_triton", "client-grpc", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, cwd=ROOT, **pipes) as process:
        until((tmp_path / "log" / "row-0.wav").exists)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "requests answered" in out and "Traceback" not in err
    assert summary(tmp_path / "log")["requests"] >= 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--manifest-path", "missing.jsonl"), "cannot read the manifest missing.jsonl"),
        ((), "no text to speak: add --target-text"),
        (("--target-text", "Hello.", "--log-dir", __file__), "cannot write to "),
        (("--manifest-path", MANIFEST, "--target-text", "a"), "--target-text with manifest: each row has its own"),
    ],
)
def test_a_command_line_that_cannot_be_run_is_reported_in_one_line_before_the_first_request(
    more: tuple[object, ...], words: str, stub: StubProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert client_grpc.main(command(stub, tmp_path / "log", *more)) == 1
    message = capsys.readouterr().err
    assert words in message and message.startswith("error: ") and message.count("\n") == 1
