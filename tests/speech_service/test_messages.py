"""Each field of each message of the WebSockets with values that no client would send: the session goes on."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.speech_fixtures import SPEECH, StubbedService, receive, send

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
