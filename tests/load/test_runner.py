"""The load generator: against a stub that sends chunks on a schedule, so that the expected latencies are known; and
through each door: a speech service whose Triton is a stub, that stub itself, a speaker in this process."""

import asyncio
import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from cosyvoice_triton import samples, stacks
from cosyvoice_triton.bench import load as benchmark
from cosyvoice_triton.cli import client_grpc
from cosyvoice_triton.client.failures import ClientError
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.errors import OverloadedError
from cosyvoice_triton.load import runner
from cosyvoice_triton.load.doors import SpeakerDoor
from cosyvoice_triton.load.plan import Load, LoadJob
from cosyvoice_triton.load.runner import measured

from tests.conftest import ROOT
from tests.support.speech_fixtures import StubbedService, service_with_stub
from tests.support.triton_stub import StubProcess, stub_process, texts_of
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
    assert "RTF: " in (tmp_path / "log" / "rtf-texts.txt").read_text()
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
    assert "| token2wav_num_gpu | concurrent_task_per_instance | concurrent_tasks_per_gpu | avg (ms)" in tables
    sweep = json.loads((tmp_path / "a.json").read_text())
    row = f"| 2 | 2 | 1.33 | {sweep['rows'][1]['first_chunk_ms']['mean']:.2f} |"
    assert row in tables, "2 tasks on each of 2 servers with 2 GPUs, and 1 GPU for the LLM"
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


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubbedService]:
    with service_with_stub(tmp_path_factory.mktemp("voices")) as running:
        yield running


def row_of(service: StubbedService, output: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the figures of an open loop of ten requests, sent without a warm-up."""
    loop = ("--open-loop", "20", "--duration", "0.5", "--warmup-requests", "0", "--output", str(output))
    code = benchmark.main(["--server", service.url, *loop, *options])
    return code, json.loads(output.with_suffix(".json").read_text())["rows"][0]


def test_an_open_loop_over_http_has_the_chunks_of_the_stub_and_when_they_are_audible(service, tmp_path) -> None:
    code, row = row_of(service, tmp_path / "out", "--parameter", "max_tokens=50", "--new-voices")
    assert (code, row["requests"], row["errors"], row["refused"], row["inaudible"]) == (0, 10, 0, 0, 0)
    assert row["audio_seconds"] == pytest.approx(10 * service.stub.chunks * service.stub.samples / SAMPLE_RATE)
    assert row["audible_ms"]["p99"] >= row["first_chunk_ms"]["p50"] and 1 <= row["peak_in_flight"] <= 10
    assert "| Requests per Second | Requests |" in (tmp_path / "out.md").read_text()
    assert (tmp_path / "out.png").stat().st_size > 20_000
    received = list(service.stub.requests)[-10:]
    assert len({request.raw_input_contents[0] for request in received}) == 10, "each has a recording of its own"
    rows = [json.loads(line) for line in samples.MANIFEST.read_text(encoding="utf-8").splitlines()]
    assert texts_of(received[0])["reference_text"] in {row["prompt_text"] for row in rows}
    assert received[0].parameters["max_tokens"].int64_param == 50 and "timeline" not in received[0].parameters


def test_a_duration_without_rates_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--duration", "60"])
    assert "--request-rates, which is missing" in capsys.readouterr().err


def test_a_registered_voice_is_named_and_a_full_server_refuses(service: StubbedService, tmp_path: Path) -> None:
    code, row = row_of(service, tmp_path / "known", "--speaker", "anna")
    assert (code, row["requests"]) == (0, 10) and texts_of(service.stub.requests[-1])["speaker"] == "anna"
    service.stub.places = 0
    code, row = row_of(service, tmp_path / "full")
    service.stub.places = 1 << 30
    assert (code, row["refused"], row["errors"], row["refusal_ms"]["max"] > 0) == (0, 10, 0, True)


def test_a_failed_answer_is_an_error_in_the_words_of_the_service(service: StubbedService, tmp_path: Path) -> None:
    for text, words in (("refuse it", "is refused"), ("break it", "cannot answer")):
        code, row = row_of(service, tmp_path / "out", "--target-text", text)
        assert (code, row["errors"]) == (1, 10) and words in row["failures"][0]


def test_an_open_loop_over_a_websocket_has_as_much_audio(service: StubbedService, tmp_path: Path) -> None:
    over = dataclasses.replace(service, url=service.url.replace("http", "ws"))
    code, row = row_of(over, tmp_path / "out", "--target-text", "Hello.", "--speaker", "anna", "--seed", "3")
    assert (code, row["requests"], row["errors"]) == (0, 10, 0)
    assert row["audio_seconds"] == pytest.approx(10 * service.stub.chunks * service.stub.samples / SAMPLE_RATE)
    assert service.stub.requests[-1].parameters["seed"].int64_param == 3
    code, row = row_of(over, tmp_path / "out", "--target-text", "refuse it")
    assert (code, row["errors"]) == (1, 10) and "is refused" in row["failures"][0]


class EchoSpeaker:
    """Yields its options as they come in, and refuses a voice for which it has no place."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def astream(self, text: str, **options: Any) -> AsyncGenerator[np.ndarray, None]:
        self.asked.append({"text": text, **options})
        if options["voice"] == "late":
            raise OverloadedError("listeners: 9", 3.0)
        yield np.full(SAMPLE_RATE, 0.1, np.float32)


def test_a_speaker_in_this_process_is_a_server_like_others() -> None:
    speaker, names = EchoSpeaker(), ("anna", "late")
    jobs = [LoadJob(name, Utterance("Hi.", speaker=name, parameters={"seed": 2, "timeline": True})) for name in names]
    run = measured(Load(["here"], "", "streaming", jobs=jobs), "speaker", {"here": SpeakerDoor(speaker)})
    assert [each.id for each in run.good] == ["anna"] and [each.id for each in run.refused] == ["late"]
    voice = {"voice": "anna", "reference": None, "reference_text": None, "instruct_text": None}
    assert speaker.asked[0] == {"text": "Hi.", "seed": 2, "reference_sample_rate": PROMPT_SAMPLE_RATE, **voice}


async def test_a_speaker_that_hangs_is_an_error_in_time() -> None:
    class Silent:
        async def astream(self, text: str, **options: object) -> AsyncGenerator[np.ndarray, None]:
            yield np.zeros(1, np.float32)
            await asyncio.Event().wait()

    async with aclosing(SpeakerDoor(Silent()).stream(Utterance("Hi."), 0.05)) as parts:
        assert (await anext(parts)).waveform.size == 1
        with pytest.raises(ClientError, match="no complete answer from this process within 0.05 s"):
            await anext(parts)


@pytest.mark.parametrize("over", ["grpc", "http", "ws"])
def test_a_cancelled_request_ends_at_the_server_and_is_no_error(service: StubbedService, over: str) -> None:
    stub = service.stub
    server = stub.address if over == "grpc" else service.url.replace("http", over)
    cancelled, arrived = stub.cancelled, stub.asked
    job = LoadJob("left", Utterance("endless"), cancel_after=1.0)
    run = measured(Load([server], stacks.DEFAULT.orchestrator, "streaming", jobs=[job]), "cancelled")
    assert run.complete and run.figures()["cancelled"] == 1 and not run.good
    # On a busy machine one may be cancelled before it arrives.
    until(lambda: not stub.live and stub.cancelled - cancelled == stub.asked - arrived)


def test_a_service_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--server", "http://127.0.0.1:9", "--open-loop", "1"]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err
