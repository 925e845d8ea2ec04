"""Valid and invalid requests to the speech service, with a stub Triton."""

import base64
import io
import json
from collections.abc import Iterator

import httpx2 as httpx
import numpy as np
import pytest
import soundfile as sf
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.errors import NO_SHARED_MEMORY
from cosyvoice_triton.speech_service.bodies import SpeechRequest
from cosyvoice_triton.speech_service.errors import from_triton
from cosyvoice_triton.voice.files import save_voice

from tests.support.fakes import fake_prompt
from tests.support.sounds import in_base64, recording
from tests.support.speech_fixtures import SPEECH, TEXT, StubbedService, counted
from tests.support.triton_stub import arrays_of, texts_of

BAD_BODIES = {
    "no input": ({"model": "tts-1", "voice": "x"}, "input"),
    "input is empty": ({"input": "  "}, "input"),
    "an unknown field": ({**TEXT, "voise": "anna"}, "voise"),
    "an unknown model": ({**TEXT, "model": "gpt-17"}, "model"),
    "an unknown format": ({**TEXT, "response_format": "ogg"}, "response_format"),
    "an unknown stream format": ({**TEXT, "stream_format": "chunks"}, "stream_format"),
    "a rate that the format lacks": ({**TEXT, "response_format": "opus", "sample_rate": 44_100}, "sample_rate"),
    "an unknown sampling": ({**TEXT, "sampling": "best"}, "sampling"),
    "a voice object without an id": ({**TEXT, "voice": {"name": "anna"}}, "voice"),
    "the URL of a recording": ({**TEXT, "ref_audio": "http://127.0.0.1:1/a.wav"}, "ref_audio"),
    "a recording that is not base64": ({**TEXT, "ref_audio": "????"}, "ref_audio"),
    "a recording that is not audio": ({**TEXT, "ref_audio": in_base64(b"RIFF" + bytes(900))}, "ref_audio"),
    "a recording too short": ({**TEXT, "ref_audio": in_base64(recording(0.3))}, "ref_audio"),
    "times of words with audio alone": ({**TEXT, "timestamps": "word"}, "timestamps"),
    "subtitles with audio alone": ({**TEXT, "subtitles": "srt"}, "subtitles"),
    "a transcript without a recording": ({**TEXT, "ref_text": "Hello."}, "ref_text"),
    "a list": ([TEXT], None),
    "a text": ("hello", None),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_an_invalid_request_is_answered_in_openais_format_and_calls_no_model(served: StubbedService, case: str) -> None:
    body, param = BAD_BODIES[case]
    before = served.stub.served
    answer = served.post(body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if case == "an unknown model" else 400), answer.text
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
    assert error["type"] == "invalid_request_error" and error["message"]
    assert served.stub.served == before


NASTY = [1 << 63, -(1 << 63) - 1, 1 << 70, "9" * 5000, float("inf"), float("nan"), "\ud800", "\0", "a" * 5000, {}, None]


def test_no_json_value_is_more_than_a_client_error_that_names_the_field(served: StubbedService) -> None:
    def failures() -> float:
        return counted(served.url, 'status="gone"') + counted(served.url, 'status="5')

    before = failures()
    with httpx.Client(base_url=served.url, timeout=20) as client:
        for field in SpeechRequest.model_fields:
            for value in NASTY:
                answer = client.post(SPEECH, content=json.dumps({**TEXT, field: value}))
                assert answer.status_code in (200, 400, 404), (field, value, answer.text)
                if answer.status_code != 200:
                    assert answer.json()["error"]["param"] == field, (field, value, answer.text)
        assert client.post(SPEECH, content=json.dumps({**TEXT, "\ud800": 1})).status_code == 400
        for bad, name in (({**TEXT, "seed": 1 << 63}, "seed"), ({"input": "\ud800"}, "input"), (5, None), (None, None)):
            answer = client.post(f"{SPEECH}/batch", content=json.dumps({"items": [bad, TEXT]})).json()
            assert [result["status"] for result in answer["results"]] == ["error", "success"]
            assert answer["results"][0]["error"]["param"] == name
    assert failures() == before


def test_inside_of_an_object_null_is_absent_and_an_unknown_field_is_named(served: StubbedService) -> None:
    assert served.post({**TEXT, "normalization_options": {"normalize": None, "x": None}}).status_code == 200
    for field, value in {"normalization_options": {"x": 1}, "voice": {"id": "anna", "x": 1}}.items():
        error = served.post({**TEXT, field: value}).json()["error"]
        assert (error["param"], error["message"]) == (field, f"{field}.x: unknown field, see docs/http.md")
    for half, where in ({"input": "a\ud800"}, "input"), ({"pronunciation": {"a\ud800": "b"}}, "pronunciation"):
        error = served.post(content=json.dumps({**TEXT, **half})).json()["error"]
        assert error["param"] == where and error["message"].endswith("character 2 is half of a surrogate pair")


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"input": "Hello.", "a": ' + b'{"a": ' * 600 + b"1" + b"}" * 601, "application/json", 400),
        (b"input=", "application/x-www-form-urlencoded", 400),
        (b"input=%ff", "application/x-www-form-urlencoded", 400),
        (b"a=b&" * 100, "application/x-www-form-urlencoded", 400),
        (b"input=" + b"%41" * 200_000, "application/x-www-form-urlencoded", 413),
        (b"--x--", "multipart/form-data; boundary=x; charset=punycode", 415),
        (b"nothing like it", "multipart/form-data; boundary=x", 400),
        (b"hello", "text/plain", 415),
        (bytes(4 << 20), "application/json", 413),
    ],
)
def test_a_body_that_cannot_be_read_is_rejected(served: StubbedService, content: bytes, kind: str, status: int) -> None:
    answer = httpx.post(served.url + SPEECH, content=content, headers={"content-type": kind}, timeout=20)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_name_of_a_field_is_quoted_in_part(served: StubbedService) -> None:
    answer = served.post({**TEXT, "a" * 900_000: 1})
    assert answer.status_code == 400 and len(answer.content) < 2000
    assert answer.json()["error"]["param"] == "a" * 100


def test_a_body_without_content_length_is_rejected_at_the_limit(served: StubbedService) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 16)

    answer = httpx.post(served.url + SPEECH, content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


@pytest.mark.parametrize(("method", "path", "status"), [("GET", SPEECH, 405), ("GET", "/v1/nothing", 404)])
def test_an_unknown_path_or_method_is_answered_in_the_same_format(served, method, path, status) -> None:
    answer = httpx.request(method, served.url + path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
    assert answer.headers.get("allow") == ("POST" if status == 405 else None)


def test_fields_are_sent_to_the_model_under_its_own_names(served: StubbedService) -> None:
    body = {**TEXT, "voice": {"id": "zoe"}, "instructions": "Slowly.", "seed": 3, "temperature": 0.5, "max_tokens": 9}
    body |= {"sampling": "cosyvoice2", "ras_window": 20, "ras_tau": 0.2}
    answer = served.post(body, "/audio/speech")
    assert answer.status_code == 200 and len(answer.content) == 2 * served.stub.chunks * served.stub.samples
    assert answer.headers["content-type"] == "audio/pcm" and answer.headers["x-sample-rate"] == str(SAMPLE_RATE)
    request = served.stub.requests[-1]
    assert texts_of(request) == {"target_text": "Hello.", "speaker": "zoe", "instruct_text": "Slowly."}
    assert request.parameters["seed"].int64_param == 3 and request.parameters["max_tokens"].int64_param == 9
    assert request.parameters["temperature"].string_param == "0.5"
    assert request.parameters["sampling"].string_param == "cosyvoice2"
    assert request.parameters["ras_window"].int64_param == 20 and request.parameters["ras_tau"].string_param == "0.2"


@pytest.mark.parametrize(("name", "rate"), [("wav", SAMPLE_RATE), ("mulaw_wav", 8000), ("alaw_wav", 8000)])
def test_a_wav_file_that_is_not_streamed_has_its_length(served: StubbedService, name: str, rate: int) -> None:
    body = {**TEXT, "response_format": name}
    items = [{"input": "Hello.", "response_format": name}]
    batch = served.post({"items": items, "response_format": "pcm"}, "/v1/audio/speech/batch").json()["results"][0]
    in_json = served.post({**body, "stream_format": "json"}).json()
    spoken = served.stub.chunks * served.stub.samples * rate // SAMPLE_RATE
    assert all("played" in request.parameters for request in list(served.stub.requests)[-2:])
    for audio in (served.post({**body, "stream": False}).content, *map(audio_data, (in_json, batch))):
        riff, samples = (int.from_bytes(audio[at : at + 4], "little") for at in (4, audio.index(b"data") + 4))
        assert riff == len(audio) - 8 and samples == len(audio) - audio.index(b"data") - 8
        assert sf.info(io.BytesIO(audio)).frames == pytest.approx(spoken, abs=16)


def audio_data(answer: dict[str, str]) -> bytes:
    return base64.b64decode(answer["audio_data"])


def test_a_duration_is_for_one_voice_and_sent_to_the_model(served: StubbedService) -> None:
    assert served.post({**TEXT, "duration": 2.5}).status_code == 200
    assert served.stub.requests[-1].parameters["duration"].string_param == "2.5"
    served.post(TEXT)
    assert "duration" not in served.stub.requests[-1].parameters
    for other in ({"speed": 1.2}, {"input": "Hello. [voice:anna] Hello."}):
        assert served.post({**TEXT, "duration": 2.5, **other}).json()["error"]["param"] in ("duration", "speed")


def test_fields_of_peers_have_their_meaning(served: StubbedService) -> None:
    options = {"normalize": True, "unit_normalization": False, "url_normalization": False, "phone_normalization": False}
    body = {**TEXT, "stream": False, "lang_code": "z", "volume_multiplier": 0.5, "normalization_options": options}
    plain, changed = served.post(TEXT), served.post({**body, "speed": None, "voice": None, "ref_audio": None})
    assert changed.status_code == 200, changed.text
    assert changed.headers["content-length"] == str(len(changed.content)) and "content-length" not in plain.headers
    loud, quiet = (np.frombuffer(answer.content, "<i2").astype(float) for answer in (plain, changed))
    np.testing.assert_allclose(quiet, loud / 2, atol=1)
    parameters = served.stub.requests[-1].parameters
    for name in ("url_normalization", "phone_normalization"):
        assert name in parameters and not parameters[name].bool_param
    assert parameters["language"].string_param == "zh"
    assert "email_normalization" not in parameters and "text_frontend" not in parameters
    assert "played" in parameters and not parameters["played"].bool_param  # the answer is sent when it is complete
    served.post({**TEXT, "normalization_options": {"normalize": False}})
    assert not served.stub.requests[-1].parameters["text_frontend"].bool_param
    for broken in (
        {"normalization_options": {"urls": False}},
        {"volume_multiplier": 0},
        {"loudness": 0},
        {"lang_code": "<"},
    ):
        error = served.post({**TEXT, **broken})
        assert error.status_code == 400 and error.json()["error"]["param"] == next(iter(broken))
    error = served.post({**TEXT, "stream": False, "stream_format": "sse"})
    assert error.status_code == 400 and error.json()["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("message", "words", "param"),
    [
        ("target_text has nothing to speak: '?!'", "input has nothing to speak: '?!'", "input"),
        ("temperature -1.5 is out of range: >= 0", "temperature -1.5 is out of range: >= 0", "temperature"),
        ("request parameter seed must be an integer, not 'x'", None, "seed"),
        ("unknown speaker 'zoe'; known speakers: anna", None, "voice"),
        (
            "no voice: the request has neither a reference_wav nor a speaker",
            "no voice: the request has neither a ref_audio nor a voice",
            "voice",
        ),
        ("language 'de' is not one of auto, zh, en, ja, ko", None, "language"),
        ("cross_lingual with the reference_text 'a'", "cross_lingual with the ref_text 'a'", None),
    ],
)
def test_errors_of_a_model_name_the_field_of_the_body(message: str, words: str | None, param: str | None) -> None:
    error = from_triton(None, f"invalid request: {message}")
    assert (error.status, error.message, error.param) == (400, words or message, param)


LOST = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:8001: no"


@pytest.mark.parametrize(
    ("status", "message", "words"),
    [
        (None, "Stream removed (recvmsg:Connection reset by peer (104))", "the connection to Triton was lost"),
        ("StatusCode.UNAVAILABLE", LOST, "the connection to Triton was lost"),
        (None, "Failed to increase the shared memory pool size for key 'tts_ab12_0' to 64 bytes", NO_SHARED_MEMORY),
    ],
)
def test_what_no_caller_can_mend_is_unavailable_without_addresses_and_names(status, message, words) -> None:
    error = from_triton(status, message)
    assert (error.status, error.retry_after, error.message) == (503, 1, words)


@pytest.mark.parametrize("form", [False, True], ids=["base64", "upload"])
@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_a_recording_in_any_format_is_sent_with_its_transcript(served: StubbedService, form: bool, kind: str) -> None:
    data = recording(2.0, 44_100, kind=kind)
    if form:
        fields = {"input": "Hello.", "response_format": "wav", "ref_text": "Hi.", "speed": "1.5"}
        answer = httpx.post(served.url + SPEECH, data=fields, files={"ref_audio": ("a", data)}, timeout=20)
    else:
        encoded = f"data:audio/x;base64,{in_base64(data)}"
        answer = served.post({"input": "Hello.", "ref_audio": encoded, "ref_text": "Hi.", "voice": "alloy"})
    assert answer.status_code == 200, answer.text
    request = served.stub.requests[-1]
    assert texts_of(request) == {"target_text": "Hello.", "reference_text": "Hi."}
    sent = arrays_of(request)
    assert sent["reference_sample_rate"] == 44_100 and sent["reference_wav"].size == pytest.approx(88_200, abs=5000)


def test_what_will_be_spoken_is_answered_without_a_model(served: StubbedService) -> None:
    before = served.stub.served
    body = {"input": "nginx costs $5. [pause 1s] 25 :)", "pronunciation": {"nginx": "engine x"}}
    answer = served.post(body, f"{SPEECH}/text").json()
    assert answer["segments"] == ["engine x costs five dollars.", "", "twenty five."] and answer["language"] == "en"
    assert answer["seconds"][1] == 1 and len(answer["seconds"]) == 3 and "warnings" not in answer
    assert answer["left_out"] == [{"text": ":)", "reason": "smiley"}]
    parts = {"input": "[pause 1s] One. [voice:anna] 2", "normalization_options": {"normalize": False}}
    assert served.add("anna", ref_text="你好。", pronunciation="2 = zwei").status_code == 201
    try:
        assert served.post(parts, f"{SPEECH}/text").json()["segments"] == ["", "One.", "zwei."]
        chinese = served.post({"input": "25", "voice": "anna"}, f"{SPEECH}/text").json()
        assert chinese["segments"] == ["二十五。"]
        # A voice of the folder that is requested by its name.
        (served.voices / "anna.safetensors").unlink()
        save_voice(served.voices / "anna.safetensors", fake_prompt(1, "你好。"))
        assert served.post({"input": "25 2", "voice": "anna"}, f"{SPEECH}/text").json()["segments"] == ["二十五zwei。"]
    finally:
        served.remove("anna")
    for broken, param in (
        ({"input": "?!"}, "input"),
        ({"input": "Hallo.", "language": "de"}, "language"),
        ({"input": "Hi.", "pronunciation": "nginx"}, "pronunciation"),
        ({"input": "Hi.", "model": "nobody"}, "model"),
    ):
        error = served.post(broken, f"{SPEECH}/text").json()["error"]
        assert error["param"] == param
        assert param != "language" or error["message"] == "language 'de' is not one of auto, zh, en, ja, ko"
    assert served.stub.served == before
