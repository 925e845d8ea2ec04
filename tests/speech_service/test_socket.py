"""The WebSockets with a stub Triton: text in pieces, audio by sentence, barge-in, and hostile messages."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.speech_service.routes.socket import MAX_WAITING_UTTERANCES
from cosyvoice_triton.text.segments import SentenceSplitter
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.support.speech_fixtures import SPEECH, StubbedService, ask, receive, refused, say, send, until
from tests.support.triton_stub import texts_of


def sentences(received: list[Any]) -> list[str]:
    return [each["sentence_text"] for each in received if isinstance(each, dict) and "sentence_text" in each]


def test_a_sentence_with_nothing_to_speak_is_a_warning_and_the_next_one_is_spoken(served: StubbedService) -> None:
    with served.connect() as socket:
        received = [each for each in say(socket, "nothing here. Words follow.") if isinstance(each, dict)]
    assert [each["message"] for each in received if each["type"] == "warning"] == ["input has nothing to speak: '→'"]
    ends = [(each["total_bytes"] > 0, each["error"]) for each in received if each["type"] == "audio.done"]
    assert ends == [(True, False), (True, False)]  # a short silence


def test_sentences_are_spoken_once_they_are_complete(served: StubbedService) -> None:
    with served.connect() as socket:
        send(socket, "session.config", voice="zoe", sample_rate=SAMPLE_RATE)
        for piece in ("Dr. Sm", "ith is in. He", " is wait"):
            send(socket, "input.text", text=piece)
        first = receive(socket, "audio.done")
        assert sentences(first) == ["Dr. Smith is in."]
        rest = say(socket, "ing for you. 你好。再见")
    assert sentences(rest) == ["He is waiting for you.", "你好。", "再见"]
    assert rest[-1] == {"type": "session.done", "utterance_index": 0, "total_sentences": 4}
    start, *audio, done = first
    assert start["format"] == "pcm" and start["sample_rate"] == SAMPLE_RATE
    assert sum(map(len, audio)) == done["total_bytes"] == 2 * served.stub.chunks * served.stub.samples
    assert (done["usage"]["input_tokens"], done["usage"]["seconds"]) == (len("Dr. Smith is in."), 0.6)
    assert texts_of(served.stub.requests[-1])["speaker"] == "zoe"


def test_the_configuration_is_kept_and_can_be_changed_between_utterances(served: StubbedService) -> None:
    with served.connect() as socket:
        send(socket, "session.config", voice="zoe")
        for utterance, voice in enumerate(("zoe", "zoe", "max")):
            if voice == "max":
                send(socket, "session.config", voice="max", response_format="wav")
            received = say(socket, "Hello")
            assert received[-1]["utterance_index"] == utterance
            assert texts_of(served.stub.requests[-1])["speaker"] == voice
        assert received[1].startswith(b"RIFF")


def test_a_cancel_stops_the_current_sentence_and_discards_the_waiting_ones(served: StubbedService) -> None:
    with served.connect() as socket:
        cancelled = served.stub.cancelled
        ask(socket, "input.text", "audio.start", text="endless talk. And another. And")
        assert isinstance(socket.recv(10), bytes)
        ended = ask(socket, "input.cancel", "audio.cancelled")
        first = ended["words"][0]
        assert (ended["utterance_index"], first["word"]) == (0, "endless") and first["end"] > first["start"] >= 0
        until(lambda: served.stub.cancelled > cancelled, 10)
        after = say(socket, "Yes?")  # nothing of the old utterance follows the answer
        assert sentences(after) == ["Yes?"] and after[-1]["utterance_index"] == 1


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("{", "not JSON"),
        ('{"type": "session.config", "a": ' + "[" * 5_000 + "]" * 5_000 + "}", "too many levels"),
        ("null", "is null, not a JSON object"),
        (json.dumps({"type": "input.text", "text": "a\ud83db"}), "surrogate"),
        (b"\x00", "binary"),
        ('{"type": "input.sing"}', "input.sing"),
        ('{"type": "input.text"}', "no text"),
        *((f'{{"type": "input.cancel", "played_ms": {wrong}}}', "played_ms") for wrong in ("-1", '"1"', "true")),
        ('{"type": "session.config", "speed": 9}', "speed"),
        ('{"type": "session.config", "language": "tlh"}', "language 'tlh' is not one of auto, zh, en, ja, ko, de"),
        ('{"type": "session.config", "pronunciation": {"a": 3}}', "pronunciation of 'a' must be text, not 3"),
        ('{"type": "session.config", "mode": "words"}', "mode must be sentences or tokens, not 'words'"),
        ('{"type": "session.config", "input": "Hi."}', "input 'Hi.' of a WebSocket: send input.text"),
        ('{"type": "session.config", "stream_format": "sse"}', "stream_format 'sse' of a WebSocket"),
        ('{"type": "session.config", "duration": 2.5}', "duration 2.5 of a WebSocket"),
        ('{"type": "session.config", "voise": "x"}', "voise"),
        (json.dumps({"type": "input.text", "text": "a" * 70_000}), "waiting to be spoken"),
        (json.dumps({"type": "input.text", "text": "a" * 5000}), "more than 4096 characters"),
    ],
)
def test_an_invalid_message_is_an_error_event_and_the_session_continues(served, message, error) -> None:
    with served.connect() as socket:
        socket.send(message)
        assert error in receive(socket, "error")[-1]["error"]["message"]
        assert say(socket, "Hello")[-1]["total_sentences"] == 1


def test_halves_of_a_character_are_joined_and_one_that_stays_alone_is_an_error(served: StubbedService) -> None:
    with served.connect() as socket:
        received = say(socket, "Good \ud83d", "\ude00 day. Bye", " \ud83d")
        assert sentences(received) == ["Good \U0001f600 day.", "Bye"]
        assert [message["error"]["param"] for message in received if "param" in str(message)] == ["text"]
        send(socket, "input.text", text="a\ud83d")
        assert refused(socket, "input.text", text="b")["param"] == "text"  # not its other half
        assert sentences(say(socket, "Hello"))[-1].endswith("Hello")


def test_an_ssml_document_is_one_sentence_however_it_arrives(served: StubbedService) -> None:
    document = "<?xml version='1.0'?> <speak>One. <break time='1s'/> Two. Three.</speak>"
    with served.connect() as socket:
        said = say(socket, "Hi. <?xm", document[4:60], document[60:], " Bye. <speak>Left")
        assert sentences(said) == ["Hi.", document, "Bye.", "<speak>Left"]
        error = refused(socket, "input.text", text="<speak></speak>" * 1500 + "<speak>" + "a" * 5000)
        assert "more than 4096 characters" in error["message"]


@pytest.mark.parametrize("pieces", [["<speaker> Yes. No"], ["<speak", "er> Yes. No"]])
def test_a_word_that_begins_like_a_document_is_spoken_by_sentences(served: StubbedService, pieces: list[str]) -> None:
    with served.connect() as socket:
        for piece in pieces:
            send(socket, "input.text", text=piece)
        assert sentences(receive(socket, "audio.done")) == ["<speaker> Yes."]


def test_the_next_utterance_may_be_sent_before_the_end_of_the_one_before(served: StubbedService) -> None:
    with served.connect() as socket:
        for text in ("One. Two", "Three. \U0001f600", ""):
            send(socket, "input.text", text=text)
            send(socket, "input.done")
        ends = [receive(socket, "session.done") for _ in range(3)]
    assert [sentences(each) for each in ends] == [["One.", "Two"], ["Three."], []]
    assert [(end["utterance_index"], end["total_sentences"]) for *_, end in ends] == [(0, 2), (1, 1), (2, 0)]


def test_utterances_that_wait_are_limited(served: StubbedService) -> None:
    with served.connect() as socket:
        send(socket, "input.text", text="endless talk")
        for _ in range(MAX_WAITING_UTTERANCES + 2):
            send(socket, "input.done")
        assert receive(socket, "error")[-1]["error"]["code"] == "too_much_text"
        ask(socket, "input.cancel", "audio.cancelled")
        assert ask(socket, "input.done", "session.done")["utterance_index"] == 1


def test_a_hostile_text_is_split_outside_of_the_event_loop(served, monkeypatch) -> None:
    """Quotation marks that are never closed: 60,000 in one message held the event loop for half a minute."""
    threads, push = list[str](), SentenceSplitter.push

    def watched(splitter: SentenceSplitter, text: str) -> list[str]:
        threads.append(threading.current_thread().name)
        return push(splitter, text)

    monkeypatch.setattr(SentenceSplitter, "push", watched)
    with served.connect() as socket:
        error = refused(socket, "input.text", text="\u201a\u300c" * 15_000)
        assert "more than 4096 characters" in error["message"]
    assert [name.partition("_")[0] for name in threads] in (["asyncio"], ["uvloop"])  # of those for blocking work


def test_a_sentence_that_fails_is_an_error_and_the_next_one_is_sentences(served: StubbedService) -> None:
    with served.connect() as socket:
        received = [message for message in say(socket, "break it. Go on.") if isinstance(message, dict)]
    kinds = [message["type"] for message in received]
    assert kinds == ["audio.start", "error", "audio.done", "audio.start", "audio.done", "session.done"]
    assert [message["error"] for message in received if message["type"] == "audio.done"] == [True, False]


def test_the_voice_cannot_change_during_an_utterance(served: StubbedService) -> None:
    with served.connect() as socket:
        send(socket, "input.text", text="Hello")
        assert "during an utterance" in refused(socket, "session.config", voice="max")["message"]


def test_one_session_too_many_is_closed_and_a_foreign_origin_is_rejected(served: StubbedService) -> None:
    with served.connect(), served.connect(), served.connect() as third:
        with pytest.raises(ConnectionClosed) as closed:
            third.recv(10)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1013
    with pytest.raises(InvalidStatus) as rejected:
        served.connect(origin="https://evil.example")  # type: ignore[arg-type]
    assert rejected.value.response.status_code == 403


NASTY = [None, True, -1, 10**4000, 1e400, float("nan"), "", "\ud800", "\0", "a" * 5000, [], [[{}]], {}, {"a": []}]
ITEM = {"id": "a", "role": "user", "content": [{"type": "input_text", "text": "quick"}], "type": "message"}
OUTPUT = {"voice": "zoe", "speed": 1, "format": {"type": "audio/pcm", "rate": 24_000}}
TRUNCATE = {"item_id": "a", "content_index": 0, "audio_end_ms": 0}
SAY: dict[str, Any] = {"input": [ITEM], "instructions": "quick", "metadata": {"a": "b"}, "output_modalities": ["audio"]}
MESSAGES: dict[str, dict[str, dict[str, Any]]] = {  # valid ones
    f"{SPEECH}/stream": {
        "input.text": {"text": "quick."},
        "input.replace": {"text": "quick.", "played_ms": 1},
        "input.cancel": {"played_ms": 1},
        "session.config": {"mode": "tokens", "voice": {"id": "zoe"}, "timestamps": "word", "seed": 1, "speed": 1.5},
    },
    "/v1/realtime": {
        "session.update": {"session": {"type": "realtime", "instructions": "a", "audio": {"output": OUTPUT}}},
        "conversation.item.create": {"item": ITEM, "previous_item_id": "root"},
        "conversation.item.truncate": TRUNCATE,
        "conversation.item.retrieve": {"item_id": "a"},
        "response.create": {"response": SAY, "event_id": "a"},
        "response.replace": {"text": "quick", "audio_end_ms": 1, "response_id": "a"},
        "response.cancel": {"response_id": "a"},
        "conversation.item.delete": {"item_id": "a"},
    },
    "/v1/audio/voice-conversion/stream": {"session.config": {"input_sample_rate": 16_000, "voice": "zoe", "speed": 1}},
}


def spoiled(value: Any) -> Iterator[Any]:
    """A message, also with each of its values replaced by each of the nasty ones."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(inner):
        for other in (*NASTY, *spoiled(each)):
            yield {**value, key: other} if isinstance(value, dict) else [other]


@pytest.mark.parametrize("path", MESSAGES)
def test_whatever_a_message_has_the_session_goes_on(served: StubbedService, path: str) -> None:
    with served.connect(path) as socket:
        for kind, fields in MESSAGES[path].items():
            for number, message in enumerate([fields, *spoiled(fields)]):
                send(socket, kind, **message)
                send(socket, f"unknown {number}")
                while f"unknown {number}'" not in receive(socket, "error")[-1]["error"]["message"]:
                    pass
