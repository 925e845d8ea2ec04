"""Loads through each door: a speech service whose Triton is a stub, that stub itself, a speaker in this process."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton import samples, stacks
from cosyvoice_triton.bench import load as benchmark
from cosyvoice_triton.client.failures import ClientError
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.errors import OverloadedError
from cosyvoice_triton.load.doors import SpeakerDoor
from cosyvoice_triton.load.plan import Load, LoadJob
from cosyvoice_triton.load.runner import measured
from cosyvoice_triton.speech_service.settings import Settings

from tests.support.speech_fixtures import StubbedService, serving, stub_triton, until
from tests.support.triton_stub import TritonStub, texts_of


@dataclass
class Served(StubbedService):
    """With the address of the stub."""

    triton: str


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Any:
    stub, voices = TritonStub(), tmp_path_factory.mktemp("voices")
    with stub_triton(stub) as address, serving(Settings(urls=(address,), voices_dir=voices)) as url:
        yield Served(url, stub, voices, address)


def row_of(service: Served, output: Path, *options: str) -> tuple[int, dict[str, Any]]:
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


def test_a_registered_voice_is_named_and_a_full_server_refuses(service: Served, tmp_path: Path) -> None:
    code, row = row_of(service, tmp_path / "known", "--speaker", "anna")
    assert (code, row["requests"]) == (0, 10) and texts_of(service.stub.requests[-1])["speaker"] == "anna"
    service.stub.places = 0
    code, row = row_of(service, tmp_path / "full")
    service.stub.places = 1 << 30
    assert (code, row["refused"], row["errors"], row["refusal_ms"]["max"] > 0) == (0, 10, 0, True)


def test_a_failed_answer_is_an_error_in_the_words_of_the_service(service: Served, tmp_path: Path) -> None:
    for text, words in (("refuse it", "is refused"), ("break it", "cannot answer")):
        code, row = row_of(service, tmp_path / "out", "--target-text", text)
        assert (code, row["errors"]) == (1, 10) and words in row["failures"][0]


def test_an_open_loop_over_a_websocket_has_as_much_audio(service: Served, tmp_path: Path) -> None:
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
    run = measured(Load(["here"], "", "streaming", jobs=jobs), "speaker", 1, {"here": SpeakerDoor(speaker)})
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
def test_a_cancelled_request_ends_at_the_server_and_is_no_error(service: Served, over: str) -> None:
    stub, server = service.stub, service.triton if over == "grpc" else service.url.replace("http", over)
    cancelled, arrived = stub.cancelled, stub.asked
    job = LoadJob("left", Utterance("endless"), cancel_after=1.0)
    run = measured(Load([server], stacks.DEFAULT.orchestrator, "streaming", jobs=[job]), "cancelled", 1)
    assert run.complete and run.figures()["cancelled"] == 1 and not run.good
    # On a busy machine one may be cancelled before it arrives.
    until(lambda: not stub.live and stub.cancelled - cancelled == stub.asked - arrived)


def test_a_service_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--server", "http://127.0.0.1:9", "--open-loop", "1"]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err
