"""Several voices in one text, over every route, with a stub Triton."""

import base64
from collections.abc import Iterator

import httpx2 as httpx
import numpy as np
import pytest
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.text.markup import MAX_VOICE_PARTS, VoicePart, by_voice
from cosyvoice_triton.voice.files import save_voice
from cosyvoice_triton.voice.prompt import Recording

from tests.support.speech_fixtures import SPEECH, TEXT, StubbedService, counted, say, send, service_with_stub, until
from tests.support.triton_stub import TritonStub, texts_of

VOICES = {"anna": "Words of Anna.", "bert": "Words of Bert."}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubbedService]:
    folder = tmp_path_factory.mktemp("voices")
    noise = np.random.default_rng(0).uniform(-0.1, 0.1, PROMPT_SAMPLE_RATE).astype(np.float32)
    for name, text in VOICES.items():
        save_voice(folder / f"{name}.safetensors", Recording(noise, text))
    with service_with_stub(folder, max_streams=1, voice_aliases=("nova=bert",)) as service:
        yield service


def spoken(stub: TritonStub, since: int) -> list[tuple[str, str]]:
    """The texts of the requests since then, each with the transcript or name of its voice."""
    texts = [texts_of(request) for request in list(stub.requests)[since:]]
    return [(each.get("reference_text") or each.get("speaker", ""), each["target_text"].strip()) for each in texts]


A, B = VOICES.values()
DIALOGUE = "One. [voice:bert] Two. [voice: anna ]Three. [voice:nova] [pause 1s] Four."
SPOKEN = [(A, "One."), (B, "Two."), (A, "Three."), (B, "[pause 1s] Four.")]
SSML = '<speak>One.<p>Two <voice name="bert">&lt;3 <sub alias="x">y</sub><break/></voice> Three.</p></speak>'
SPOKEN_SSML = [
    (A, "<speak>One.\nTwo </speak>"),
    (B, '<speak>&lt;3 <sub alias="x">y</sub><break/></speak>'),
    (A, "<speak> Three.\n</speak>"),
]


@pytest.mark.parametrize(("text", "expected"), [(DIALOGUE, SPOKEN), (SSML, SPOKEN_SSML)], ids=["marks", "ssml"])
def test_the_parts_of_a_text_are_spoken_one_after_another_in_their_voices(served, text, expected) -> None:
    since = len(served.stub.requests)
    body = {**TEXT, "input": text, "voice": "anna", "seed": 7, "stream_format": "json", "subtitles": "srt"}
    answer = served.post({**body, "timestamps": "segment"}).json()
    assert spoken(served.stub, since) == expected
    assert {request.parameters["seed"].int64_param for request in list(served.stub.requests)[since:]} == {7}
    chunks = served.stub.chunks * len(expected)
    assert len(base64.b64decode(answer["audio_data"])) == 2 * served.stub.samples * chunks
    assert [each["start"] for each in answer["segments"]] == pytest.approx([0.2 * number for number in range(chunks)])
    assert answer["usage"]["input_tokens"] == len(text) and answer["usage"]["output_tokens"] == 5 * chunks
    assert answer["subtitles"].count("-->") >= chunks


def test_max_tokens_limits_the_whole_text(served: StubbedService) -> None:
    since = len(served.stub.requests)
    tokens = 5 * served.stub.chunks  # of each part
    body = {**TEXT, "input": DIALOGUE, "voice": "anna", "stream_format": "json", "max_tokens": 2 * tokens}
    answer = served.post(body).json()
    asked = [request.parameters["max_tokens"].int64_param for request in list(served.stub.requests)[since:]]
    assert asked == [2 * tokens, tokens] and answer["usage"]["output_tokens"] == 2 * tokens
    assert answer["warnings"] == [f"max_tokens {2 * tokens} was reached before 'Three. '"]


def test_a_document_with_a_namespace_and_many_breaks_does_not_grow_over_the_limit_of_the_models() -> None:
    words = "Some more words. <break time='200ms'/>" * 90
    document = f"<speak xmlns='http://www.w3.org/2001/10/synthesis'>{words}<voice name='bert'>Bye.</voice></speak>"
    first, second = by_voice(document)
    assert len(first.text) + len(second.text) <= len(document)
    assert first.text.count('<break time="200ms"/>') == 90


def test_a_part_with_a_pause_shorter_than_a_frame_does_not_count() -> None:
    """The model would answer without audio."""
    assert by_voice("[voice:anna][pause 5ms][voice:bert] Hi.") == [VoicePart("bert", " Hi.")]
    pauses = "[pause 5ms]" * 3
    assert by_voice(f"[voice:anna]{pauses}[voice:bert] Hi.")[0] == VoicePart("anna", pauses)


def test_a_segment_has_a_length_up_to_the_next_mark(served: StubbedService) -> None:
    text = "One. [segment 2.5s][voice:bert] Two. [segment 800ms] 3. [segment] Four. [segment 2s] Five. [voice:anna]6"
    parts = [("", None), ("bert", 2.5), ("bert", 0.8), ("bert", None), ("bert", 2.0), ("anna", None)]
    assert [(part.voice, part.seconds) for part in by_voice(text)] == parts
    since = len(served.stub.requests)
    assert served.post({**TEXT, "input": "One. [segment 2.5s] Two."}).status_code == 200
    asked = list(served.stub.requests)[since:]
    assert ["duration" in request.parameters for request in asked] == [False, True]
    assert asked[1].parameters["duration"].string_param == "2.5"
    for other in ({"speed": 1.2}, {"duration": 2.5}):
        error = served.post({**TEXT, **other, "input": "[segment 2.5s] Two."}).json()["error"]
        assert error["param"] == next(iter(other))


def test_the_default_voice_is_asked_for_only_if_a_later_part_needs_it(served, monkeypatch) -> None:
    since = len(served.stub.requests)
    text = "<speak><voice name='bert'>One.</voice> Two.</speak>"
    assert len(served.post({**TEXT, "input": text}).content) == 2 * 2 * served.stub.chunks * served.stub.samples
    assert served.post({**TEXT, "input": "One. [voice:bert] Two."}).status_code == 200
    asked, *rest = spoken(served.stub, since)
    assert asked == ("", "[pause 20ms]")
    assert rest == [(B, "<speak>One.</speak>"), ("", "<speak> Two.</speak>"), ("", "One."), (B, "Two.")]
    monkeypatch.setattr(served.stub, "error", "invalid request: no voice: nor a default one")
    refused = served.post({**TEXT, "input": text})  # before any audio
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
    words = "part 2 of input, '<speak> Two.</speak>', has no voice: no voice: nor a default one"
    assert refused.json()["error"]["message"] == words


def test_a_recording_in_the_request_is_the_voice_of_the_parts_without_a_name(served: StubbedService) -> None:
    since = len(served.stub.requests)
    wav = httpx.post(served.url + SPEECH, json={**TEXT, "response_format": "wav"}).content
    ref = {"ref_audio": base64.b64encode(wav).decode(), "ref_text": "Mine."}
    assert served.post({**TEXT, **ref, "input": "One. [voice:bert] Two."}).status_code == 200
    assert spoken(served.stub, since + 1) == [("Mine.", "One."), (B, "Two.")]


@pytest.mark.parametrize(
    ("text", "voice", "words"),
    [
        ("One. [voice:nobody] Two.", "anna", "unknown speaker 'nobody'"),
        ("[voice:anna(0)+bert] One.", "anna", "the weight '0' of 'anna' is not a number above 0"),
        (
            "[voice:anna+nobody] One.",
            "anna",
            "unknown speaker 'nobody' in 'anna+nobody', whose voices must be registered",
        ),
        ("[voice:bert] One. <speak>", "anna", "the tag <speak>"),
        ("<speak><voice name='bert'>One.</voice> Two.</speak>", "nobody", "unknown speaker 'nobody'"),
        ("One. [voice:] Two.", "anna", "without a name"),
        ("<speak><voice>One.</voice></speak>", "anna", "<voice> has no name"),
        ("<speak><sub alias='x'><voice name='bert'>y</voice></sub></speak>", "anna", "the tag <voice>"),
        ("[segment 2] One.", "anna", "a segment of '2'"),
        ("[voice:bert] [pause 9s] a" * 7, "anna", "longer than 60 s"),
        ("[voice:bert] a" * (MAX_VOICE_PARTS + 1), "anna", f"{MAX_VOICE_PARTS + 1} parts, more than {MAX_VOICE_PARTS}"),
    ],
)
def test_what_cannot_be_spoken_is_a_400_before_any_audio(served, text, voice, words) -> None:
    before = served.stub.served
    answer = served.post({**TEXT, "input": text, "voice": voice})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert served.stub.served == before


def test_the_longest_dialogue_is_spoken_in_one_of_the_streams(served: StubbedService) -> None:
    before = served.stub.served
    assert served.post({**TEXT, "input": "[voice:bert] a" * MAX_VOICE_PARTS}).status_code == 200
    assert served.stub.served == before + MAX_VOICE_PARTS


def test_a_client_that_disconnects_ends_the_part_and_those_after_it(served: StubbedService) -> None:
    before = served.stub.served
    body = {**TEXT, "input": "One. [voice:bert]endless words [voice:anna] Three."}
    with httpx.stream("POST", served.url + SPEECH, json=body) as answer:
        parts = answer.iter_raw()
        until(lambda: bool(next(parts)) and served.stub.served == before + 2)
    until(lambda: not counted(served.url, "speech_live_streams") and not served.stub.live)
    assert served.stub.served == before + 2


def test_over_the_websocket_a_voice_lasts_until_the_end_of_the_utterance(served: StubbedService) -> None:
    since = len(served.stub.requests)
    with served.connect() as socket:
        send(socket, "session.config", voice="anna")
        received = say(socket, "One. [voice:bert] Two. Three, [voice:anna] four. [voice:bert]") + say(socket, "Five.")
    assert "error" not in [message["type"] for message in received if isinstance(message, dict)]
    assert spoken(served.stub, since) == [(A, "One."), (B, "Two."), (B, "Three,"), (A, "four."), (A, "Five.")]


def test_a_mix_is_requested_by_its_name_with_aliases_resolved_over_every_route(served: StubbedService) -> None:
    since, mix = len(served.stub.requests), "anna(2)+bert"
    assert served.post({**TEXT, "voice": mix}).status_code == 200
    assert served.post({**TEXT, "voice": "anna(2)+nova(0.5)", "language": "zh"}).status_code == 200
    assert served.post({**TEXT, "input": f"[voice:{mix}] Hello."}).status_code == 200
    batch = served.post({"items": [TEXT], "voice": mix}, f"{SPEECH}/batch").json()
    assert [result["status"] for result in batch["results"]] == ["success"]
    form = {"tts_text": TEXT["input"], "spk_id": mix}
    assert httpx.post(f"{served.url}/inference_sft", data=form).status_code == 200
    with served.connect() as socket:
        send(socket, "session.config", voice=mix)
        say(socket, TEXT["input"])
    resolved = [(mix, "Hello."), ("anna(2.0)+bert(0.5)", "Hello."), *[(mix, "Hello.")] * 4]
    assert spoken(served.stub, since) == resolved


def test_a_mix_with_a_recording_is_a_400(served: StubbedService) -> None:
    before, wav = served.stub.served, base64.b64encode(b"not looked at").decode()
    for name, words in {"anna+bert": "voice 'anna+bert' with a ref_audio", "a(-1)+b": "weight '-1' of 'a'"}.items():
        answer = served.post({**TEXT, "voice": name, "ref_audio": wav})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "voice"
    assert served.stub.served == before


def test_a_text_without_voices_stays_as_it_is() -> None:
    for text in ("a [pause] b", "<speak>a<break/></speak>", "<speak>", "", "<speak>a voice</speak>"):
        assert by_voice(text) == [VoicePart("", text)]
