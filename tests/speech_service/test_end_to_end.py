"""The speech service with the real tritonserver, over HTTP and the WebSocket. The weights are random, so only lengths
are compared, not words."""

import contextlib
from collections.abc import Iterator

import httpx2 as httpx
import numpy as np
import pytest
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.voice.audio import load_audio
from websockets.sync.client import ClientConnection, connect

from tests.support.speech_fixtures import RECORDING, ask, receive, refused, say, send

pytestmark = pytest.mark.server

TEXT = "Hello there. This is said by a machine."


@contextlib.contextmanager
def token_session(url: str) -> Iterator[ClientConnection]:
    """A WebSocket in the mode tokens."""
    with connect(url.replace("http", "ws") + "/v1/audio/speech/stream") as socket:
        send(socket, "session.config", voice="anna", mode="tokens")
        yield socket


def test_the_socket_speaks_tokens_before_the_text_has_ended(speech_url: str) -> None:
    with token_session(speech_url) as socket:
        for utterance, text in enumerate((TEXT, "Hi")):
            for char in text:
                send(socket, "input.text", text=char)
            (started,) = receive(socket, "audio.start")
            assert started["utterance_index"] == utterance and started["sentence_text"] == ""
            *parts, done, end = say(socket, " The rest.")
            audio = [part for part in parts if isinstance(part, bytes)]
            assert all(part["type"] == "warning" for part in parts if part not in audio)  # random weights never end
            assert sum(map(len, audio)) == done["total_bytes"] > SAMPLE_RATE and not done["error"]
            assert end == {"type": "session.done", "utterance_index": utterance, "total_sentences": 1}


def test_the_socket_survives_tokens_that_stop_fail_or_are_cancelled(speech_url: str) -> None:
    with token_session(speech_url) as socket:
        send(socket, "input.text", text=" ?! ")
        assert "nothing to speak" in ask(socket, "input.done", "warning")["message"]
        assert receive(socket, "session.done")[-1]["utterance_index"] == 0
        assert "input has not ended" in refused(socket, "input.text", text="Then nothing")["message"]
        assert receive(socket, "audio.done")[-1]["error"]
        assert "the utterance failed" in refused(socket, "input.text", text=" more")["message"]
        assert ask(socket, "input.done", "session.done")["utterance_index"] == 1
        ask(socket, "input.text", "audio.start", text=TEXT)
        assert "during an utterance" in refused(socket, "session.config", mode="sentences")["message"]
        assert ask(socket, "input.cancel", "audio.cancelled")["utterance_index"] == 2
        done = ask(socket, "input.done", "session.done")
        assert (done["utterance_index"], done["total_sentences"]) == (3, 0)


def test_speech_is_converted_whole_and_while_it_is_spoken(speech_url: str) -> None:
    """Through every model: the source's own tokens, of which there are 25 a second."""
    path, fields = "/v1/audio/voice-conversion", {"voice": "anna", "response_format": "pcm"}
    file = {"audio": (RECORDING.name, RECORDING.read_bytes())}
    whole = httpx.post(speech_url + path, data=fields, files=file, timeout=60)
    wav = load_audio(RECORDING, PROMPT_SAMPLE_RATE)
    expected = -(-len(wav) // 640) * SAMPLE_RATE // 25
    assert whole.status_code == 200, whole.text
    assert len(whole.content) / 2 == pytest.approx(expected, abs=SAMPLE_RATE // 25)
    quiet = np.concatenate([np.zeros(PROMPT_SAMPLE_RATE, np.float32), wav])  # a second of which nothing is heard
    with connect(speech_url.replace("http", "ws") + path + "/stream") as socket:
        send(socket, "session.config", voice="anna")
        for piece in np.array_split((quiet * 32767).astype("<i2"), 60):
            socket.send(piece.tobytes())
        send(socket, "input.done")
        start, *audio, done = receive(socket, "audio.done")
    assert not done["error"] and sum(map(len, audio)) == len(whole.content) + 2 * SAMPLE_RATE
    refused = httpx.post(speech_url + path, data={**fields, "voice": "nobody"}, files=file, timeout=60)
    assert refused.status_code == 400 and "'nobody'" in refused.json()["error"]["message"]
