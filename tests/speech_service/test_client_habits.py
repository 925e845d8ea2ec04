"""What the SDKs, browsers, proxies and phones of callers send."""

import base64
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx2 as httpx
import numpy as np
import openai
import pytest
import soundfile as sf
from cosyvoice_triton.speech_service.audio.encoding import AudioEncoder
from cosyvoice_triton.speech_service.audio.recordings import decode, decode_base64
from cosyvoice_triton.speech_service.errors import ApiError
from cosyvoice_triton.speech_service.security.guard import key_name
from cosyvoice_triton.speech_service.voices import NewVoice, VoiceFolder
from cosyvoice_triton.voice.prompt import Recording
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.speech_service.test_connections import KEY, answers
from tests.speech_service.test_encoding import decoded
from tests.support.raw_connections import opened, request
from tests.support.sounds import in_base64, sine, sound_file
from tests.support.speech_fixtures import SPEECH, TEXT, client_that_leaves, counted, events_of, say, stubbed, until

BEARER = {"authorization": "Bearer key"}
MIB = 1 << 20


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stubbed(api_keys=("key",)) as served:
        yield served


def usage_of(url: str, key: str) -> list[float]:
    """The metrics of a key: input tokens, output tokens, seconds."""
    names = ("input_tokens", "output_tokens", "audio_seconds")
    return [counted(url, f'speech_{name}_total{{key="{key_name(key)}"}} ') for name in names]


def test_usage_is_in_the_headers_of_a_whole_answer_and_in_the_metrics_of_its_key(url: str) -> None:
    before = usage_of(url, "key")
    for how in ({"stream": False}, {"stream_format": "json"}, {}):
        answer = httpx.post(url + SPEECH, json={**TEXT, **how}, headers=BEARER)
        headers = [answer.headers.get(f"x-{name}") for name in ("input-tokens", "output-tokens", "audio-seconds")]
        assert headers == (["6", "15", "0.6"] if how else [None] * 3), how
    with client_that_leaves(url, {**TEXT, "input": "endless"}, key="key") as client:
        assert client.recv(1)  # with the first audio
    until(lambda: usage_of(url, "key")[0] == before[0] + 3 * 6 + len("endless"))
    assert usage_of(url, "key")[1] > before[1] + 3 * 15 and usage_of(url, "key")[2] > before[2] + 3 * 0.6
    assert "key=" not in httpx.get(f"{url}/metrics").text.replace(f'key="{key_name("key")}"', "")


@pytest.mark.parametrize("name", [None, "opus", "wav"])
def test_openais_sdk_streams_a_file(url: str, tmp_path: Path, name: str | None) -> None:
    """Its default is an mp3; test_encoding.py has all formats."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key") as client:
        create, wanted = client.audio.speech.with_streaming_response.create, name or openai.NOT_GIVEN
        with create(model="tts-1", voice="zoe", input="Hello.", response_format=wanted) as answer:
            assert answer.headers["transfer-encoding"] == "chunked"
            answer.stream_to_file(tmp_path / "speech")
    wav, rate = decoded(name or "mp3", (tmp_path / "speech").read_bytes(), AudioEncoder(name or "mp3").rate)
    assert wav.size / rate == pytest.approx(0.6, abs=0.15)


def test_a_page_gives_its_websocket_the_key_as_a_subprotocol(url: str) -> None:
    address = url.replace("http", "ws") + f"{SPEECH}/stream"
    for protocols in (["realtime", "openai-insecure-api-key.key"], ["openai-insecure-api-key.key"]):
        with connect(address, subprotocols=protocols) as client:  # type: ignore[arg-type]
            assert client.subprotocol == protocols[0]
    with pytest.raises(InvalidStatus) as refused:
        connect(address, subprotocols=["openai-insecure-api-key.other"])  # type: ignore[list-item]
    assert refused.value.response.status_code == 401


@pytest.mark.parametrize("model", ["gpt-4o-mini-tts-2025-12-15", "tts-1-1106", "tts-1-hd-2030-01-01", "TTS-1"])
def test_a_dated_model_of_openai_is_the_default_one(url: str, model: str) -> None:
    assert httpx.post(url + SPEECH, json={**TEXT, "model": model}, headers=BEARER).status_code == 200
    assert httpx.get(f"{url}/v1/models/{model}", headers=BEARER).json()["id"] == model


def test_a_client_that_waits_before_it_sends_a_body_in_chunks_is_told_to_go_on(url: str) -> None:
    """So do the clients of Java, Go and .NET with `Expect: 100-continue` and a body of unknown length."""
    head = request(headers=KEY + b"Expect: 100-continue\r\n")
    with opened(url, head.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")) as client:
        assert client.recv(1 << 10).startswith(b"HTTP/1.1 100")
        body = json.dumps({**TEXT, "stream": False}).encode()
        client.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert answers(client) == [b"HTTP/1.1 200 OK"]


def test_an_upload_needs_no_disk(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    file = sound_file(sine(440, seconds=29, rate=48_000), 48_000, subtype="FLOAT")
    upload = {"ref_audio": ("a.wav", file)}
    assert len(file) > 2 * MIB
    assert httpx.post(url + SPEECH, data={"input": "Hi."}, files=upload, headers=BEARER).status_code == 200


def test_kokoros_clients_get_voices_as_names(url: str) -> None:
    old, new = (httpx.get(f"{url}/v1/audio/voices{query}", headers=BEARER).json() for query in ("?legacy=true", ""))
    assert old["voices"] == [each["id"] for each in new["voices"]] and old["data"] == new["data"]


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/v1/audio/voices", "/static/app.js"])
def test_head_is_get_without_the_body(url: str, path: str) -> None:
    head, get = httpx.head(url + path, headers=BEARER), httpx.get(url + path, headers=BEARER)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize("hosts", [b"", b"Host: localhost\r\nHost: localhost\r\n", b"Host: a\r\nhost: b\r\n"])
def test_a_request_has_one_host(url: str, hosts: bytes) -> None:
    with opened(url, b"GET /v1/models HTTP/1.1\r\n" + hosts + KEY + b"\r\n") as client:
        assert [line[:12] for line in answers(client)] == [b"HTTP/1.1 400"]


def test_health_shows_addresses_only_to_callers_with_a_key(url: str) -> None:
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{url}/health", headers=BEARER).json()["tritons"]


FIELD = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s'


@pytest.mark.parametrize("end", [b"", FIELD % (b"seed", b"1"), b"--b"])
def test_a_form_that_is_cut_off_is_an_error(url: str, end: bytes) -> None:
    headers = {**BEARER, "content-type": "multipart/form-data; boundary=b"}
    answer = httpx.post(url + SPEECH, content=FIELD % (b"input", b"Hello.\r\n") + end, headers=headers)
    assert answer.status_code == 400 and "cut off" in answer.json()["error"]["message"]


def test_form_fields_in_which_nothing_was_written_are_absent(url: str) -> None:
    blank = {"seed": "", "speed": "", "voice": "", "response_format": "", "sampling": "", "pronunciation": ""}
    for how in ({"data": {**TEXT, **blank}}, {"data": {**TEXT, **blank}, "files": {"other": ("", b"")}}):
        answer = httpx.post(url + SPEECH, headers=BEARER, **how)
        assert answer.status_code == 200, answer.text


def test_names_of_formats_may_have_capitals_and_a_voice_may_be_called_a_speaker(url: str) -> None:
    answer = httpx.post(url + SPEECH, json={"input": "Hi.", "response_format": "MP3", "speaker": "zoe"}, headers=BEARER)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/mpeg")
    unknown = httpx.post(url + SPEECH, json={"input": "Hi.", "speaker": "nobody"}, headers=BEARER)
    assert unknown.status_code == 400 and "nobody" in unknown.text


@pytest.mark.parametrize("text", ["nothing \U0001f600", "[voice:zoe] ."])
def test_a_text_without_words_is_a_short_silence_with_a_warning_or_an_error(url: str, text: str) -> None:
    """Of the stub, which finds none in this one; a voice agent's turn goes on."""
    answer = httpx.post(url + SPEECH, json={**TEXT, "input": text, "stream_format": "json"}, headers=BEARER).json()
    assert answer["warnings"] == ["input has nothing to speak: '\u2192'"] and answer["usage"]["seconds"] == 0.1
    assert not any(base64.b64decode(answer["audio_data"]))
    refused = httpx.post(url + SPEECH, json={**TEXT, "input": text, "no_words": "error"}, headers=BEARER)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "nothing_to_speak"


def test_an_answer_leads_to_no_other_host(url: str) -> None:
    for path in ("/v1/audio/voices/", "/static", "/docs/"):
        answer = httpx.get(url + path, headers={**BEARER, "host": "evil.example"})
        assert answer.status_code in (403, 404) and "location" not in answer.headers


def test_json_without_its_header_is_told_so(url: str) -> None:
    headers = {**BEARER, "content-type": "application/x-www-form-urlencoded"}  # curl -d
    answer = httpx.post(url + SPEECH, content=json.dumps(TEXT), headers=headers)
    assert answer.status_code == 415 and "send application/json" in answer.json()["error"]["message"]


TONE_HZ = 10_000.0  # CosyVoice3's mel has bands up to 12 kHz


def encoded(container: str, codec: str, rate: int = 48_000, seconds: float = 1.0, layout: str = "mono") -> bytes:
    sink = io.BytesIO()
    with av.open(sink, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=rate, layout=layout)
        wave = np.tile(sine(TONE_HZ, 0.3, seconds, rate), (len(av.AudioLayout(layout).channels), 1))
        kind = stream.codec_context.format.name
        frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout=layout)
        frame.sample_rate = rate
        for part in av.AudioResampler(format=kind, layout=layout, rate=rate, frame_size=1024).resample(frame):
            file.mux(stream.encode(part))
        file.mux(stream.encode(None))
    return sink.getvalue()


KINDS = {
    "m4a": ("ipod", "aac"),
    "mp4": ("mp4", "aac"),
    "3gp": ("3gp", "aac"),
    "webm": ("webm", "libopus"),
    "mkv": ("matroska", "libopus"),
    "aac": ("adts", "aac"),
    "aiff": ("aiff", "pcm_s16be"),
    "caf": ("caf", "pcm_s16le"),
    "caf, alac": ("caf", "alac"),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_recordings_of_phones_and_browsers_are_read(kind: tuple[str, str]) -> None:
    recording = decode(encoded(*kind), MIB)
    assert abs(recording.seconds - 1) < 0.1
    middle = recording.wav[6_000:18_000]
    spectrum = np.abs(np.fft.rfft(middle))
    assert abs(int(spectrum.argmax()) * recording.rate / len(middle) - TONE_HZ) < 4
    assert 0.2 < np.abs(middle).max() < 0.45


def test_a_recording_in_a_container_has_the_same_limits() -> None:
    with pytest.raises(ValueError, match="longer than 30 s"):
        decode(encoded("webm", "libopus", seconds=31), MIB)
    with pytest.raises(ValueError, match="damaged file"):
        decode(encoded("mp4", "aac")[:200], MIB)
    with pytest.raises(ValueError, match="codec is"):
        decode(encoded("matroska", "ac3"), MIB)
    with pytest.raises(ValueError, match="codec is unknown"):
        decode(encoded("matroska", "ac3").replace(b"A_AC3", b"A_ZZZ"), MIB)
    with pytest.raises(ValueError, match="ref_audio is not base64"):
        decode_base64("é", MIB)


@pytest.mark.parametrize("text", [b"ffconcat version 1.0\nfile /etc/passwd", b"#EXTM3U\n/etc/passwd", b"<MPD></MPD>"])
def test_a_playlist_is_no_recording(text: bytes) -> None:
    with pytest.raises(ValueError, match="not a readable audio file"):
        decode(text, MIB)


@pytest.mark.parametrize("subtype", ["GSM610", "IMA_ADPCM", "MS_ADPCM", "ULAW", "G721_32", "PCM_24", "FLOAT"])
def test_a_wav_file_of_any_subtype_has_its_length(subtype: str) -> None:
    file = sound_file(sine(440, seconds=4, rate=8_000), 8_000, subtype=subtype)
    assert abs(decode(file, MIB).seconds - 4) < 0.125


def test_base64_in_all_its_variants_is_read() -> None:
    file = sound_file(np.random.default_rng(0).uniform(-0.5, 0.5, 16_001).astype(np.float32), 16_000)
    plain = in_base64(file)
    expected = decode_base64(plain, MIB).digest
    variants = {
        "lines": base64.encodebytes(file).decode(),
        "lines of Windows": plain[:76] + "\r\n" + plain[76:] + "\r\n",
        "no padding": plain.rstrip("="),
        "for URLs": base64.urlsafe_b64encode(file).decode(),
        "a data URL": f"data:audio/wav;base64,{plain}",
        "a data URL in capitals": f"DATA:audio/wav;BASE64,{plain}",
    }
    for name, text in variants.items():
        assert decode_base64(text, MIB).digest == expected, name
    for text in ("a", "a b", "ä", "a=b="):
        with pytest.raises(ValueError):
            decode_base64(text, MIB)


def test_a_warning_of_the_model_reaches_every_kind_of_caller(url: str) -> None:
    """Of the stub, whose answers have one if the text asks for it."""
    words = ["speech was cut short"]
    body = {**TEXT, "input": "warn me"}
    assert httpx.post(url + SPEECH, json=body, headers=BEARER).headers["x-speech-warning"] == words[0]
    assert "x-speech-warning" not in httpx.post(url + SPEECH, json=TEXT, headers=BEARER).headers
    whole = httpx.post(url + SPEECH, json={**body, "stream_format": "json"}, headers=BEARER)
    assert whole.json()["warnings"] == words
    events = events_of(httpx.post(url + SPEECH, json={**body, "stream_format": "sse"}, headers=BEARER))
    assert events[-1]["warnings"] == words
    batch = httpx.post(f"{url}{SPEECH}/batch", json={"items": [body]}, headers=BEARER).json()
    assert batch["results"][0]["warnings"] == words
    with connect(url.replace("http", "ws") + f"{SPEECH}/stream", additional_headers=BEARER) as client:
        received = [each for each in say(client, "warn me") if isinstance(each, dict)]
    assert [each["message"] for each in received if each["type"] == "warning"] == words


@pytest.mark.parametrize("name", ["anna.WAV", "anna.flac", "anna.mp3", "anna.ogg", "anna.FLAC", "anna.m4a", "anna.CAF"])
def test_recordings_of_other_formats_in_the_voices_folder_are_voices(name: str, tmp_path: Path) -> None:
    kind = name.partition(".")[2].lower()
    if kind in ("m4a", "caf"):
        (tmp_path / name).write_bytes(encoded(*KINDS[kind]))
    else:
        sf.write(tmp_path / name, sine(440, rate=16_000), 16_000, format=kind.upper())
    folder = VoiceFolder(tmp_path, MIB)
    voice = folder.get("anna")
    assert folder.names() == ["anna"] and isinstance(voice, Recording) and abs(voice.seconds - 1) < 0.125
    folder.remove("anna")
    assert folder.names() == [] and not list(tmp_path.iterdir())


def test_voice_names_that_look_alike_are_one(tmp_path: Path) -> None:
    sf.write(tmp_path / "caf\u00e9.wav", sine(440, rate=16_000), 16_000)
    folder = VoiceFolder(tmp_path, MIB)
    assert folder.resolve("cafe\u0301") == "caf\u00e9"  # an accent of its own
    with pytest.raises(ApiError, match="not a valid name"):
        folder.add(NewVoice(name="\uff0e\uff0e\uff0fx"), b"")
