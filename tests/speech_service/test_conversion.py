"""Voice conversion over HTTP and the WebSocket, with a stub Triton."""

import io

import httpx2 as httpx
import numpy as np
import pytest
import soundfile as sf
from cosyvoice_triton.constants import SAMPLE_RATE

from tests.support.sounds import in_base64, recording
from tests.support.speech_fixtures import StubbedService, ask, events_of, receive, send
from tests.support.triton_stub import arrays_of, texts_of

PATH = "/v1/audio/voice-conversion"


def test_an_upload_or_base64_is_converted_in_the_voice_and_answered_like_speech(served: StubbedService) -> None:
    expected, _ = sf.read(io.BytesIO(recording(2.0)), dtype="float32")
    body = {"voice": "zoe", "response_format": "pcm"}
    uploaded = httpx.post(served.url + PATH, data=body, files={"audio": recording(2.0)}, timeout=60)
    assert uploaded.status_code == 200 and len(uploaded.content) == 2 * served.stub.chunks * served.stub.samples
    told = served.post({**body, "audio": in_base64(recording(2.0)), "stream_format": "sse"}, PATH)
    assert [each["type"] for each in events_of(told)][-1] == "speech.audio.done"
    for request in list(served.stub.requests)[-2:]:
        np.testing.assert_array_equal(arrays_of(request)["source_wav"][0], expected)
        assert texts_of(request) == {"target_text": "", "speaker": "zoe"}
    reference = in_base64(recording(1.0))
    served.post({"audio": in_base64(recording(40.0, 8_000)), "ref_audio": reference, "trim_reference": True}, PATH)
    sent = arrays_of(served.stub.requests[-1])
    assert (sent["source_wav"].size, sent["reference_wav"].size) == (40 * 8_000, SAMPLE_RATE)
    assert served.stub.requests[-1].parameters["trim_reference"].bool_param


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "audio is missing"),
        ({"audio": "?"}, "not base64"),
        ({"audio": in_base64(recording(0.2))}, "expected 0.5 to 120"),
        ({"audio": in_base64(recording(121, 8_000, kind="FLAC"))}, "longer than 120 s"),
        ({"audio": in_base64(recording()), "input": "Hello."}, "input: unknown field"),
    ],
)
def test_what_cannot_be_converted_is_a_400(served: StubbedService, body: dict[str, str], message: str) -> None:
    answer = served.post(body, PATH)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_what_somebody_speaks_is_sent_to_the_model_as_it_comes(served: StubbedService) -> None:
    samples = np.arange(16_000, dtype="<i2")
    with served.connect(PATH + "/stream") as socket:
        send(socket, "session.config", voice="zoe", input_sample_rate=24_000)
        for piece in np.array_split(samples, 5):
            socket.send(piece.tobytes())
        send(socket, "input.done")
        start, *audio, done = receive(socket, "audio.done")
        assert (start["format"], start["sample_rate"]) == ("pcm", SAMPLE_RATE)
        assert sum(map(len, audio)) == done["total_bytes"] > 0 and not done["error"]
        socket.send(b"odd")
        send(socket, "session.config", voice=3)
        send(socket, "session.config", input_sample_rate=10**30)
        send(socket, "session.config", ref_audio="a" * 2_500_000)
        for message in (
            "a frame of 3 bytes: expected whole 16-bit samples",
            "voice: Input should be a valid string",
            "input_sample_rate is not a number of Hz from 8000 to 48000",
            "ref_audio has ",
        ):
            assert receive(socket, "error")[-1]["error"]["message"].startswith(message)
        socket.send(samples.tobytes())
        assert ask(socket, "input.cancel", "audio.cancelled")["utterance_index"] in (1, 2)
        send(socket, "session.close")
    sequence = [each for each in served.stub.requests if each.parameters["sequence_id"].int64_param]
    sent = [part[0] for each in sequence if (part := arrays_of(each).get("source_wav")) is not None]
    np.testing.assert_array_equal(np.concatenate(sent)[:16_000], samples / np.float32(32768))
    assert texts_of(sequence[0])["speaker"] == "zoe"


def test_the_audio_of_sessions_shares_a_budget_which_is_given_back(served: StubbedService) -> None:
    """About 4 MB in this service; samples take twice the bytes of their frames."""
    frame, taken = bytes(500_000), []
    with served.connect(PATH + "/stream") as socket:
        for _ in range(2):
            send(socket, "session.config", input_sample_rate=48_000)
            for _ in range(8):
                socket.send(frame)
            error = receive(socket, "error")[-1]["error"]
            assert error["code"] == "unavailable" and "too much is kept" in error["message"]
            taken.append(ask(socket, "input.cancel", "audio.cancelled")["utterance_index"])
    assert len(taken) == 2
