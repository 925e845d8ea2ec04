"""The speech service with the real tritonserver and the demo checkpoint, through its usual clients: OpenAI's SDK, curl,
the WebSocket, clients of the plain runtime. The weights are random, so only lengths are compared, not words."""

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc.aio as triton
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.speech_service.audio.encoding import AudioEncoder
from cosyvoice_triton.speech_service.routes.runtime_grpc import PROTO
from cosyvoice_triton.voice.audio import load_audio
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException
from websockets.sync.client import ClientConnection, connect

from tests.speech_service.test_encoding import decoded
from tests.support.speech_fixtures import MAX_STREAMS, RECORDING, SpeechStack, receive, send, until

pytestmark = pytest.mark.server

TEXT = "Hello there. This is said by a machine."
LONG = "This sentence is one of many that follow each other for quite a while. " * 12
REQUEST = {"model": "tts-1", "voice": "anna", "input": TEXT}
SEED = {"seed": 7}  # gives the same audio each time, so that formats can be compared


@pytest.fixture(scope="module")
def pcm(speech_stack: SpeechStack) -> np.ndarray:
    """The samples that every format should contain, int16."""
    data = speech_stack.client.audio.speech.create(**REQUEST, response_format="pcm", extra_body=SEED).content
    samples = np.frombuffer(data, "<i2")
    assert samples.size > SAMPLE_RATE and np.abs(samples).max() > 100
    return samples


@pytest.mark.parametrize("name", [None, "opus", "wav"])
def test_the_sdk_streams_a_file_of_the_right_length(
    speech_stack: SpeechStack, pcm: np.ndarray, tmp_path: Path, name: Any
) -> None:
    """Its default is an mp3; test_encoding.py has all formats."""
    path = tmp_path / "speech"
    create = speech_stack.client.audio.speech.with_streaming_response.create
    with create(**REQUEST, response_format=name or openai.NOT_GIVEN, extra_body=SEED) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        answer.stream_to_file(path)
    name = name or "mp3"
    wav, rate = decoded(name, path.read_bytes(), AudioEncoder(name).rate)
    assert wav.size / rate == pytest.approx(pcm.size / SAMPLE_RATE, abs=0.15)


def test_the_sdk_lists_models_and_raises_the_right_errors(speech_stack: SpeechStack) -> None:
    listed = [model.id for model in speech_stack.client.models.list()]
    assert listed == ["cosyvoice2_dit", "tts-1", "tts-1-hd", "gpt-4o-mini-tts"]
    assert [speech_stack.client.models.retrieve(name).id for name in listed] == listed
    with pytest.raises(openai.NotFoundError, match="not served"):
        speech_stack.client.audio.speech.create(**{**REQUEST, "model": "unknown"})
    with pytest.raises(openai.BadRequestError, match="unknown speaker 'alice'; known speakers: anna"):
        speech_stack.client.audio.speech.create(**{**REQUEST, "voice": "alice"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        speech_stack.client.audio.speech.create(**REQUEST, extra_body={"temperature": -1.5})


def test_a_part_without_a_voice_is_spoken_by_the_only_one_or_refused_before_any_audio(
    speech_stack: SpeechStack,
) -> None:
    body = {"input": '<speak><voice name="anna">One.</voice> Two, three.</speak>', "response_format": "pcm"}
    url, voices = f"{speech_stack.url}/v1/audio/speech", f"{speech_stack.url}/v1/audio/voices"
    assert httpx.post(url, json=body, timeout=60).status_code == 200
    files = {"audio_sample": (RECORDING.name, RECORDING.read_bytes())}
    assert httpx.post(voices, data={"name": "berta"}, files=files, timeout=60).status_code == 201
    try:
        refused = httpx.post(url, json=body, timeout=60)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert error["message"].startswith("part 2 of input, '<speak> Two, three.</speak>', has no voice: no voice: ")
        assert error["message"].endswith("anna, berta") and error["param"] == "input"
        assert httpx.post(url, json={**body, "voice": "anna"}, timeout=60).status_code == 200
    finally:
        httpx.delete(f"{voices}/berta")


def test_segments_have_exact_times_and_words_inside_them(speech_stack: SpeechStack) -> None:
    body = {**REQUEST, "input": "Hello there. [pause 0.5s] You have 3 days.", "response_format": "pcm"}
    answer = httpx.post(
        f"{speech_stack.url}/v1/audio/speech",
        json={**body, "stream_format": "json", "timestamps": "word", "subtitles": "srt"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    samples = np.frombuffer(base64.b64decode(answer.json()["audio_data"]), "<i2")
    first, second = answer.json()["segments"]
    assert [first["text"].strip(), second["text"].strip()] == ["Hello there.", "You have three days."]
    assert first["start"] == 0.0 and second["end"] == round(samples.size / SAMPLE_RATE, 3)
    assert second["start"] - first["end"] == pytest.approx(0.5, abs=0.0011)
    pause = samples[round(first["end"] * SAMPLE_RATE) : round(second["start"] * SAMPLE_RATE)]
    assert np.abs(pause[24:-24]).max() == 0
    for segment in (first, second):
        assert [word["word"] for word in segment["words"]] == segment["text"].split()
        times = [word[at] for word in segment["words"] for at in ("start", "end")]
        assert [segment["start"], *times, segment["end"]] == sorted([segment["start"], *times, segment["end"]])
    assert answer.json()["subtitles"].splitlines()[2::4] == ["Hello there.", "You have three days."]


def test_clients_that_disconnect_free_their_streams_in_triton(speech_stack: SpeechStack) -> None:
    """token2wav has few slots and no stream in it expires by itself: one that kept its slot would be in the way."""
    create = speech_stack.client.audio.speech.with_streaming_response.create
    before = speech_stack.cancelled()
    with contextlib.ExitStack() as clients:
        for _ in range(MAX_STREAMS):
            answer = clients.enter_context(create(**{**REQUEST, "input": LONG * 4}, response_format="pcm"))
            next(answer.iter_bytes(4096))
    until(lambda: speech_stack.cancelled() == before + MAX_STREAMS, 60)
    assert len(speech_stack.client.audio.speech.create(**REQUEST, response_format="pcm").content) > SAMPLE_RATE


def pieces_of(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


async def speak_sequence(
    address: str, pieces: list[str], sequence: int = 5, heard: asyncio.Event | None = None, end: bool = True
) -> int:
    """The samples of a text in pieces. heard: set at the first audio; until then the text goes on after its pieces.
    InferenceServerException for an error."""

    async def texts() -> AsyncIterator[str]:
        for piece in pieces:
            yield piece
        while heard is not None and not heard.is_set():
            yield " more"
            await asyncio.sleep(0.2)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        position = {"model_name": "cosyvoice2_dit", "sequence_id": sequence, "sequence_start": True}
        async for piece in texts():
            voice = "anna" if position["sequence_start"] else None
            yield position | {"inputs": Utterance(piece, speaker=voice).tensors(InferInput)}
            position["sequence_start"] = False
        if not end:
            await asyncio.Event().wait()
        yield position | {"inputs": Utterance("").tensors(InferInput), "sequence_end": True}

    samples = 0
    async with triton.InferenceServerClient(address) as client:
        answers = client.stream_infer(requests(), stream_timeout=60)
        try:
            async for result, error in answers:
                if error is not None:
                    raise error
                samples += result.as_numpy("waveform").size
                if heard is not None:
                    heard.set()
        finally:
            answers.cancel()
    return samples


@pytest.mark.parametrize("before", [False, True], ids=["whole", "before its end"])
@pytest.mark.parametrize("pieces", [["", "H", "", "i", "."], list(TEXT)], ids=["short", "characters"])
def test_a_sequence_is_spoken_completely_and_begins_before_its_end(
    speech_stack: SpeechStack, pieces: list[str], before: bool
) -> None:
    async def run() -> int:
        return await speak_sequence(speech_stack.grpc_url, pieces, heard=asyncio.Event() if before else None)

    assert asyncio.run(run()) > SAMPLE_RATE  # random weights: about three seconds, whatever the text


def test_a_sequence_with_nothing_to_speak_is_an_error(speech_stack: SpeechStack) -> None:
    with pytest.raises(InferenceServerException, match="target_text has nothing to speak"):
        asyncio.run(speak_sequence(speech_stack.grpc_url, ["", " ?! "]))


def test_a_sequence_is_cancelled_with_its_stream_and_its_id_is_checked(speech_stack: SpeechStack) -> None:
    address = speech_stack.grpc_url

    async def run() -> None:
        heard = asyncio.Event()
        speaking = asyncio.create_task(speak_sequence(address, pieces_of(TEXT, 4), 6, heard, end=False))
        await asyncio.wait_for(heard.wait(), 60)
        with pytest.raises(InferenceServerException, match="sequence id 6 is in use"):
            await speak_sequence(address, ["Hi"], 6)
        speaking.cancel()
        await asyncio.wait({speaking})
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:  # the server polls whether clients have gone
            try:
                assert await speak_sequence(address, ["Hi"], 6)
                break
            except InferenceServerException as error:
                assert "is in use" in str(error)
                await asyncio.sleep(0.1)
        else:
            pytest.fail("a cancelled sequence kept its id")

    asyncio.run(run())


@contextlib.contextmanager
def token_session(stack: SpeechStack) -> Iterator[ClientConnection]:
    """A WebSocket in the mode tokens."""
    with connect(stack.url.replace("http", "ws") + "/v1/audio/speech/stream") as socket:
        send(socket, "session.config", voice="anna", mode="tokens")
        yield socket


def test_the_socket_speaks_tokens_before_the_text_has_ended(speech_stack: SpeechStack) -> None:
    with token_session(speech_stack) as socket:
        for utterance, text in enumerate((TEXT, "Hi")):
            for char in text:
                send(socket, "input.text", text=char)
            (started,) = receive(socket, "audio.start")
            assert started["utterance_index"] == utterance and started["sentence_text"] == ""
            send(socket, "input.text", text=" The rest.")
            send(socket, "input.done")
            *parts, done, end = receive(socket, "session.done")
            audio = [part for part in parts if isinstance(part, bytes)]
            assert all(part["type"] == "warning" for part in parts if part not in audio)  # random weights never end
            assert sum(map(len, audio)) == done["total_bytes"] > SAMPLE_RATE and not done["error"]
            assert end == {"type": "session.done", "utterance_index": utterance, "total_sentences": 1}


def test_the_socket_survives_tokens_that_stop_fail_or_are_cancelled(speech_stack: SpeechStack) -> None:
    with token_session(speech_stack) as socket:
        send(socket, "input.text", text="Then nothing")
        assert "input has not ended" in receive(socket, "error")[-1]["error"]["message"]
        assert receive(socket, "audio.done")[-1]["error"]
        send(socket, "input.text", text=" more")
        assert "the utterance failed" in receive(socket, "error")[-1]["error"]["message"]
        send(socket, "input.done")
        assert receive(socket, "session.done")[-1]["utterance_index"] == 0
        send(socket, "input.text", text=TEXT)
        receive(socket, "audio.start")
        send(socket, "session.config", mode="sentences")
        assert "during an utterance" in receive(socket, "error")[-1]["error"]["message"]
        send(socket, "input.cancel")
        assert receive(socket, "audio.cancelled")[-1]["utterance_index"] == 1
        send(socket, "input.done")
        assert receive(socket, "session.done")[-1] == {
            "type": "session.done",
            "utterance_index": 2,
            "total_sentences": 0,
        }


@pytest.mark.parametrize(
    ("method", "route", "fields"),
    [
        ("GET", "sft", {"spk_id": "anna"}),
        ("GET", "zero_shot", {"prompt_text": "Your call.", "prompt_wav": True}),
        ("GET", "cross_lingual", {"prompt_wav": True}),
        ("GET", "instruct", {"spk_id": "anna", "instruct_text": "Speak slowly."}),
        ("POST", "instruct2", {"instruct_text": "Speak slowly.", "prompt_wav": True}),
    ],
)
def test_the_plain_runtimes_http_clients_work(
    speech_stack: SpeechStack, method: str, route: str, fields: dict[str, Any]
) -> None:
    """Raw samples, as its server sends them; an error if any field is missing."""
    texts = {"tts_text": "Hello.", **{name: value for name, value in fields.items() if name != "prompt_wav"}}
    files = {"prompt_wav": ("prompt_wav", RECORDING.read_bytes())} if "prompt_wav" in fields else {}
    url = f"{speech_stack.url}/inference_{route}"
    answer = httpx.request(method, url, data=texts, files=files, timeout=60)
    assert answer.status_code == 200, answer.text
    assert np.abs(np.frombuffer(answer.content, "<i2")).max() > 100
    for name in texts:
        partly = {other: value for other, value in texts.items() if other != name}
        rejected = httpx.request(method, url, data=partly, files=files, timeout=60)
        assert rejected.status_code == 400 and rejected.json()["error"]["param"] == name
    if files:
        assert httpx.request(method, url, data=texts, timeout=60).status_code == 400


def test_the_plain_runtimes_grpc_clients_work(speech_stack: SpeechStack) -> None:
    messages, services = grpc.protos_and_services(PROTO)
    wav = (load_audio(RECORDING, PROMPT_SAMPLE_RATE) * (1 << 15)).astype("<i2").tobytes()
    text = {"tts_text": "Hello."}
    requests = [
        messages.Request(sft_request={**text, "spk_id": "anna"}),
        messages.Request(zero_shot_request={**text, "prompt_text": "Your call.", "prompt_audio": wav}),
        messages.Request(cross_lingual_request={**text, "prompt_audio": wav}),
        messages.Request(instruct_request={**text, "spk_id": "anna", "instruct_text": "Speak slowly."}),
    ]
    with grpc.insecure_channel(f"127.0.0.1:{speech_stack.runtime_port}") as channel:
        client = services.CosyVoiceStub(channel)
        for request in requests:
            parts = [response.tts_audio for response in client.Inference(request, timeout=60)]
            assert np.abs(np.frombuffer(b"".join(parts), "<i2")).max() > 100
        for request, words in (
            (messages.Request(), "empty"),
            (messages.Request(sft_request={**text, "spk_id": "unknown"}), "unknown speaker"),
            (messages.Request(cross_lingual_request={**text, "prompt_audio": b"x"}), "whole 16-bit samples"),
        ):
            with pytest.raises(grpc.RpcError) as error:
                list(client.Inference(request, timeout=60))
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT and words in error.value.details()


def test_the_wire_format_is_that_of_the_plain_runtime() -> None:
    """The bytes of requests of its clients."""
    messages, _ = grpc.protos_and_services(PROTO)
    request = messages.Request(zero_shot_request={"tts_text": "a", "prompt_text": "b", "prompt_audio": b"c"})
    assert request.SerializeToString() == b"\x12\x09\x0a\x01a\x12\x01b\x1a\x01c"
    request = messages.Request(sft_request={"spk_id": "a", "tts_text": "b"})
    assert request.SerializeToString() == b"\x0a\x06\x0a\x01a\x12\x01b"
    request = messages.Request(instruct_request={"tts_text": "a", "spk_id": "b", "instruct_text": "c"})
    assert request.SerializeToString() == b"\x22\x09\x0a\x01a\x12\x01b\x1a\x01c"
    assert messages.Response(tts_audio=b"a").SerializeToString() == b"\x0a\x01a"


def test_speech_is_converted_whole_and_while_it_is_spoken(speech_stack: SpeechStack) -> None:
    """Through every model: the source's own tokens, of which there are 25 a second."""
    path, fields = "/v1/audio/voice-conversion", {"voice": "anna", "response_format": "pcm"}
    file = {"audio": (RECORDING.name, RECORDING.read_bytes())}
    whole = httpx.post(speech_stack.url + path, data=fields, files=file, timeout=60)
    wav = load_audio(RECORDING, PROMPT_SAMPLE_RATE)
    expected = -(-len(wav) // 640) * SAMPLE_RATE // 25
    assert whole.status_code == 200, whole.text
    assert len(whole.content) / 2 == pytest.approx(expected, abs=SAMPLE_RATE // 25)
    quiet = np.concatenate([np.zeros(PROMPT_SAMPLE_RATE, np.float32), wav])  # a second of which nothing is heard
    with connect(speech_stack.url.replace("http", "ws") + path + "/stream") as socket:
        send(socket, "session.config", voice="anna")
        for piece in np.array_split((quiet * 32767).astype("<i2"), 60):
            socket.send(piece.tobytes())
        send(socket, "input.done")
        start, *audio, done = receive(socket, "audio.done")
    assert not done["error"] and sum(map(len, audio)) == len(whole.content) + 2 * SAMPLE_RATE
    refused = httpx.post(speech_stack.url + path, data={**fields, "voice": "nobody"}, files=file, timeout=60)
    assert refused.status_code == 400 and "'nobody'" in refused.json()["error"]["message"]
