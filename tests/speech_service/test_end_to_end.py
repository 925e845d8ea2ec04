"""The speech service before the real tritonserver with the demo checkpoint, asked as its users do: OpenAI's SDK, curl,
the WebSocket, clients of the plain runtime. The weights are random, so lengths are compared and words are not."""

import asyncio
import contextlib
import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import numpy as np
import openai
import pytest
from websockets.sync.client import connect

from common.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from common.speech_service.encoding import FORMATS
from common.speech_service.runtime_grpc import PROTO
from common.voice.audio import load_audio
from tests.speech_service.test_encoding import decoded
from tests.support.speech_fixtures import MAX_STREAMS, RECORDING, SpeechStack, transcript

pytestmark = pytest.mark.server

TEXT = "Hello there. This is said by a machine."
LONG = "This sentence is one of many that follow each other for quite a while. " * 12
SAID = {"model": "tts-1", "voice": "anna", "input": TEXT}
SAME = {"seed": 7}  # the same seed gives the same audio, so that formats can be compared


@pytest.fixture(scope="module")
def pcm(speech_stack: SpeechStack) -> np.ndarray:
    """What every format should hold, int16."""
    data = speech_stack.client.audio.speech.create(**SAID, response_format="pcm", extra_body=SAME).content
    samples = np.frombuffer(data, "<i2")
    assert samples.size > SAMPLE_RATE and np.abs(samples).max() > 100
    return samples


@pytest.mark.parametrize("name", FORMATS)
def test_the_sdk_streams_every_format_to_a_file_of_the_right_length(
    speech_stack: SpeechStack, pcm: np.ndarray, tmp_path: Path, name: Any
) -> None:
    path = tmp_path / "speech"
    create = speech_stack.client.audio.speech.with_streaming_response.create
    with create(**SAID, response_format=name, extra_body=SAME) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        answer.stream_to_file(path)
    wav, rate = decoded(name, path.read_bytes(), SAMPLE_RATE)
    assert wav.size / rate == pytest.approx(pcm.size / SAMPLE_RATE, abs=0.15)


def test_the_sdks_default_is_an_mp3(speech_stack: SpeechStack) -> None:
    wav, rate = decoded("mp3", speech_stack.client.audio.speech.create(**SAID).content, SAMPLE_RATE)
    assert rate == SAMPLE_RATE and wav.size > rate / 2


def test_the_asynchronous_sdk_hears_the_first_chunk_long_before_the_last(speech_stack: SpeechStack) -> None:
    async def listen() -> tuple[float, float, int]:
        async with openai.AsyncOpenAI(base_url=f"{speech_stack.url}/v1", api_key="none") as client:
            begun, first, size = time.monotonic(), 0.0, 0
            async with client.audio.speech.with_streaming_response.create(
                **{**SAID, "input": LONG}, response_format="pcm"
            ) as answer:
                async for part in answer.iter_bytes(4096):
                    first = first or time.monotonic() - begun
                    size += len(part)
            return first, time.monotonic() - begun, size

    first, total, size = asyncio.run(listen())
    assert first < total / 2 and size > 2 * SAMPLE_RATE


def test_the_sdk_lists_models_and_names_errors(speech_stack: SpeechStack) -> None:
    assert [model.id for model in speech_stack.client.models.list()] == ["cosyvoice2_dit"]
    with pytest.raises(openai.NotFoundError, match="not served"):
        speech_stack.client.audio.speech.create(**{**SAID, "model": "nobody"})
    with pytest.raises(openai.BadRequestError, match="unknown speaker 'alloy'; known speakers: anna"):
        speech_stack.client.audio.speech.create(**{**SAID, "voice": "alloy"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        speech_stack.client.audio.speech.create(**SAID, extra_body={"temperature": -1.5})


def test_events_by_the_sdk(speech_stack: SpeechStack) -> None:
    with speech_stack.client.audio.speech.with_streaming_response.create(**SAID, stream_format="sse") as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    assert [event["type"] for event in events[-2:]] == ["speech.audio.delta", "speech.audio.done"]
    assert events[-1]["usage"]["output_tokens"] > 10


def test_speed_and_rate_while_streaming(speech_stack: SpeechStack, pcm: np.ndarray) -> None:
    body = {**SAME, "sample_rate": PROMPT_SAMPLE_RATE}
    data = speech_stack.client.audio.speech.create(**SAID, response_format="pcm", speed=2.0, extra_body=body).content
    assert len(data) / 2 / PROMPT_SAMPLE_RATE == pytest.approx(pcm.size / SAMPLE_RATE / 2, abs=0.1)


def test_curl_uploads_a_recording_and_gets_a_wav(speech_stack: SpeechStack, tmp_path: Path) -> None:
    path = tmp_path / "said.wav"
    fields = {"input": TEXT, "response_format": "wav", "ref_audio": f"@{RECORDING}", "ref_text": transcript(RECORDING)}
    forms = [part for name, value in fields.items() for part in ("-F", f"{name}={value}")]
    command = ["curl", "-sS", "--fail-with-body", "-o", str(path), f"{speech_stack.url}/v1/audio/speech", *forms]
    subprocess.run(command, check=True, timeout=60)
    assert load_audio(path, SAMPLE_RATE).size > SAMPLE_RATE / 2


@pytest.mark.serial
def test_clients_that_leave_free_their_places_in_triton_within_a_second(speech_stack: SpeechStack) -> None:
    """The vocoder has two places and no stream there is forgotten by itself: one that kept its place would be felt."""

    create = speech_stack.client.with_options(max_retries=0).audio.speech.with_streaming_response.create

    def first_byte(text: str) -> tuple[contextlib.ExitStack, float]:
        """A listener who has heard the first of it, and how long that took, with every 503 for want of a place."""
        begun = time.monotonic()
        while True:
            with contextlib.suppress(openai.InternalServerError), contextlib.ExitStack() as listening:
                answer = listening.enter_context(create(**{**SAID, "input": text}, response_format="pcm"))
                parts = answer.iter_bytes(4096)
                listening.callback(parts.close)
                next(parts)
                return listening.pop_all(), time.monotonic() - begun

    def freed_after() -> float:
        """What a newcomer waits longer for a place that somebody has just left than for a free one."""
        alone, usual = first_byte("Hi.")
        alone.close()
        for listener in [first_byte(LONG)[0] for _ in range(MAX_STREAMS)]:
            listener.close()
        newcomer, waited = first_byte("Hi.")
        newcomer.close()
        return waited - usual

    assert any(freed_after() < 1.0 for _ in range(3))  # the best of three, since machines are busy at times


def test_the_socket_speaks_a_text_that_comes_in_pieces(speech_stack: SpeechStack) -> None:
    with connect(speech_stack.url.replace("http", "ws") + "/v1/audio/speech/stream") as socket:
        socket.send(json.dumps({"type": "session.config", "voice": "anna"}))
        for word in TEXT.split(" "):
            socket.send(json.dumps({"type": "input.text", "text": f"{word} "}))
        socket.send(json.dumps({"type": "input.done"}))
        heard: list[Any] = []
        while not heard or heard[-1] != {"type": "session.done", "utterance_index": 0, "total_sentences": 2}:
            message = socket.recv(30)
            heard.append(message if isinstance(message, bytes) else json.loads(message))
    audio = b"".join(message for message in heard if isinstance(message, bytes))
    assert len(audio) > SAMPLE_RATE and np.abs(np.frombuffer(audio, "<i2")).max() > 100


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("sft", {"spk_id": "anna"}),
        ("zero_shot", {"prompt_text": "Your call.", "prompt_wav": True}),
        ("cross_lingual", {"prompt_wav": True}),
        ("instruct", {"spk_id": "anna", "instruct_text": "Speak slowly."}),
        ("instruct2", {"instruct_text": "Speak slowly.", "prompt_wav": True}),
    ],
)
def test_the_plain_runtimes_http_clients_are_answered(
    speech_stack: SpeechStack, method: str, route: str, fields: dict[str, Any]
) -> None:
    """Samples alone, as its server sends them; with every field missing in turn, an error."""
    texts = {"tts_text": "Hello.", **{name: value for name, value in fields.items() if name != "prompt_wav"}}
    files = {"prompt_wav": ("prompt_wav", RECORDING.read_bytes())} if "prompt_wav" in fields else {}
    url = f"{speech_stack.url}/inference_{route}"
    answer = httpx.request(method, url, data=texts, files=files, timeout=30)
    assert answer.status_code == 200, answer.text
    assert np.abs(np.frombuffer(answer.content, "<i2")).max() > 100
    for name in texts:
        partly = {other: value for other, value in texts.items() if other != name}
        refused = httpx.request(method, url, data=partly, files=files, timeout=30)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name
    if files:
        assert httpx.request(method, url, data=texts, timeout=30).status_code == 400


def test_the_plain_runtimes_grpc_clients_are_answered(speech_stack: SpeechStack) -> None:
    messages, services = grpc.protos_and_services(PROTO)
    wav = (load_audio(RECORDING, PROMPT_SAMPLE_RATE) * (1 << 15)).astype("<i2").tobytes()
    said = {"tts_text": "Hello."}
    requests = [
        messages.Request(sft_request={**said, "spk_id": "anna"}),
        messages.Request(zero_shot_request={**said, "prompt_text": "Your call.", "prompt_audio": wav}),
        messages.Request(cross_lingual_request={**said, "prompt_audio": wav}),
        messages.Request(instruct_request={**said, "spk_id": "anna", "instruct_text": "Speak slowly."}),
    ]
    with grpc.insecure_channel(f"127.0.0.1:{speech_stack.runtime_port}") as channel:
        client = services.CosyVoiceStub(channel)
        for request in requests:
            parts = [response.tts_audio for response in client.Inference(request, timeout=30)]
            assert np.abs(np.frombuffer(b"".join(parts), "<i2")).max() > 100
        for request, words in (
            (messages.Request(), "empty"),
            (messages.Request(sft_request={**said, "spk_id": "nobody"}), "unknown speaker"),
            (messages.Request(cross_lingual_request={**said, "prompt_audio": b"x"}), "whole 16-bit samples"),
        ):
            with pytest.raises(grpc.RpcError) as error:
                list(client.Inference(request, timeout=30))
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT and words in error.value.details()


def test_the_wire_format_is_that_of_the_plain_runtime() -> None:
    """By field numbers: a request of its clients, byte for byte."""
    messages, _ = grpc.protos_and_services(PROTO)
    asked = messages.Request(zero_shot_request={"tts_text": "a", "prompt_text": "b", "prompt_audio": b"c"})
    assert asked.SerializeToString() == b"\x12\x09\x0a\x01a\x12\x01b\x1a\x01c"
    asked = messages.Request(sft_request={"spk_id": "a", "tts_text": "b"})
    assert asked.SerializeToString() == b"\x0a\x06\x0a\x01a\x12\x01b"
    asked = messages.Request(instruct_request={"tts_text": "a", "spk_id": "b", "instruct_text": "c"})
    assert asked.SerializeToString() == b"\x22\x09\x0a\x01a\x12\x01b\x1a\x01c"
    assert messages.Response(tts_audio=b"a").SerializeToString() == b"\x0a\x01a"


def test_several_listeners_at_once_hear_all_of_it(speech_stack: SpeechStack, pcm: np.ndarray) -> None:
    heard: list[int] = []

    def listen() -> None:
        answer = speech_stack.client.audio.speech.create(**SAID, response_format="pcm", extra_body=SAME)
        heard.append(len(answer.content) // 2)

    threads = [threading.Thread(target=listen) for _ in range(MAX_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == [pcm.size] * MAX_STREAMS
