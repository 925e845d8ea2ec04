"""The WebSocket: text in piece by piece, sentences out one by one, barge-in; before a stub of Triton."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from common.constants import SAMPLE_RATE
from common.speech_service.settings import Settings
from tests.support.speech_fixtures import serving, stub_triton, until
from tools.bench.triton_stub import TritonStub, texts_of

PATH = "/v1/audio/speech/stream"
SECONDS = 10.0


@pytest.fixture(scope="module")
def stub() -> TritonStub:
    return TritonStub()


@pytest.fixture(scope="module")
def url(stub: TritonStub) -> Iterator[str]:
    with stub_triton(stub) as address, serving(Settings(urls=(address,), max_sessions=2)) as served:
        yield served.replace("http", "ws") + PATH


def say(socket: ClientConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def hear(socket: ClientConnection, last: str) -> list[Any]:
    """Everything up to a message of that type: dicts, and bytes for audio."""
    heard: list[Any] = []
    while not heard or not isinstance(heard[-1], dict) or heard[-1]["type"] != last:
        message = socket.recv(SECONDS)
        heard.append(message if isinstance(message, bytes) else json.loads(message))
    return heard


def spoken(heard: list[Any]) -> list[str]:
    return [message["sentence_text"] for message in heard if isinstance(message, dict) and "sentence_text" in message]


def test_sentences_are_spoken_as_they_become_complete(url: str, stub: TritonStub) -> None:
    with connect(url) as socket:
        say(socket, "session.config", voice="zoe", sample_rate=SAMPLE_RATE)
        for piece in ("Dr. Sm", "ith is in. He", " is wait"):
            say(socket, "input.text", text=piece)
        first = hear(socket, "audio.done")
        assert spoken(first) == ["Dr. Smith is in."]
        say(socket, "input.text", text="ing for you. 你好。再见")
        say(socket, "input.done")
        rest = hear(socket, "session.done")
    assert spoken(rest) == ["He is waiting for you.", "你好。", "再见"]
    assert rest[-1] == {"type": "session.done", "utterance_index": 0, "total_sentences": 4}
    start, *audio, done = first
    assert start["format"] == "pcm" and start["sample_rate"] == SAMPLE_RATE
    assert sum(map(len, audio)) == done["total_bytes"] == 2 * stub.chunks * stub.samples
    assert texts_of(stub.requests[-1])["speaker"] == "zoe"


def test_the_settings_stay_for_the_next_utterance_and_can_be_changed_between(url: str, stub: TritonStub) -> None:
    with connect(url) as socket:
        say(socket, "session.config", voice="zoe")
        for utterance, voice in enumerate(("zoe", "zoe", "max")):
            if voice == "max":
                say(socket, "session.config", voice="max", response_format="wav")
            say(socket, "input.text", text="Hello")
            say(socket, "input.done")
            heard = hear(socket, "session.done")
            assert heard[-1]["utterance_index"] == utterance
            assert texts_of(stub.requests[-1])["speaker"] == voice
        assert heard[1].startswith(b"RIFF")


def test_a_cancel_silences_what_is_spoken_and_forgets_what_was_to_be(url: str, stub: TritonStub) -> None:
    with connect(url) as socket:
        cancelled = stub.cancelled
        say(socket, "input.text", text="endless talk. And another. And")
        hear(socket, "audio.start")
        assert isinstance(socket.recv(SECONDS), bytes)
        say(socket, "input.cancel")
        assert hear(socket, "audio.cancelled")[-1]["utterance_index"] == 0
        assert until(lambda: stub.cancelled > cancelled) < 1.0
        say(socket, "input.text", text="Yes?")
        say(socket, "input.done")
        after = hear(socket, "session.done")  # nothing of the old utterance comes behind the answer
        assert spoken(after) == ["Yes?"] and after[-1]["utterance_index"] == 1


def test_a_client_that_leaves_ends_the_work(url: str, stub: TritonStub) -> None:
    cancelled = stub.cancelled
    socket = connect(url)
    say(socket, "input.text", text="endless talk. And")
    until(lambda: stub.live == 1)
    socket.close()
    assert until(lambda: stub.cancelled > cancelled and stub.live == 0) < 1.0


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("{", "not JSON"),
        ("[]", "no JSON object"),
        (b"\x00", "binary"),
        ('{"type": "input.sing"}', "input.sing"),
        ('{"type": "input.text"}', "no text"),
        ('{"type": "session.config", "speed": 9}', "speed"),
        ('{"type": "session.config", "voise": "x"}', "voise"),
        (json.dumps({"type": "input.text", "text": "a" * 70_000}), "waiting to be spoken"),
        (json.dumps({"type": "input.text", "text": "a" * 5000}), "more than 4096 characters"),
    ],
)
def test_a_mistake_is_an_error_event_and_the_session_goes_on(url: str, message: str | bytes, words: str) -> None:
    with connect(url) as socket:
        socket.send(message)
        assert words in hear(socket, "error")[-1]["error"]["message"]
        say(socket, "input.text", text="Hello")
        say(socket, "input.done")
        assert hear(socket, "session.done")[-1]["total_sentences"] == 1


def test_a_sentence_that_fails_is_an_error_and_the_next_one_is_spoken(url: str) -> None:
    with connect(url) as socket:
        say(socket, "input.text", text="break it. Go on.")
        say(socket, "input.done")
        heard = [message for message in hear(socket, "session.done") if isinstance(message, dict)]
    kinds = [message["type"] for message in heard]
    assert kinds == ["audio.start", "error", "audio.done", "audio.start", "audio.done", "session.done"]
    assert [message["error"] for message in heard if message["type"] == "audio.done"] == [True, False]


def test_the_voice_cannot_change_amid_an_utterance(url: str) -> None:
    with connect(url) as socket:
        say(socket, "input.text", text="Hello")
        say(socket, "session.config", voice="max")
        assert "amid an utterance" in hear(socket, "error")[-1]["error"]["message"]


def test_one_session_too_many_is_closed_and_a_foreign_page_is_refused(url: str) -> None:
    with connect(url), connect(url), connect(url) as third:
        with pytest.raises(ConnectionClosed) as closed:
            third.recv(SECONDS)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1013
    with pytest.raises(InvalidStatus) as refused:
        connect(url, origin="https://evil.example")  # type: ignore[arg-type]
    assert refused.value.response.status_code == 403
