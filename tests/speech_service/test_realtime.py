"""OpenAI's realtime protocol with a stub Triton: text in, audio out."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.speech_service.routes.realtime import DELTA_BYTES, MAX_ITEMS
from websockets.sync.client import ClientConnection

from tests.support.speech_fixtures import StubbedService, ask, receive, refused, send, service_with_stub, until
from tests.support.triton_stub import WARNING, TritonStub, texts_of

MANY_ITEMS: dict[str, Any] = {"type": "response.create", "response": {"input": [{"content": []}] * (MAX_ITEMS + 1)}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubbedService]:
    with service_with_stub(tmp_path_factory.mktemp("voices"), TritonStub(samples=2 * SAMPLE_RATE)) as service:
        yield service


@pytest.fixture
def socket(served: StubbedService) -> Iterator[ClientConnection]:
    with served.connect("/v1/realtime?model=gpt-realtime") as opened:
        receive(opened, "session.created")
        yield opened


def item(text: str, role: str = "user", kind: str = "input_text", **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **fields}


def spoken(socket: ClientConnection, stub: TritonStub, response: dict[str, Any]) -> dict[str, str]:
    assert ask(socket, "response.create", "response.done", response=response)["response"]["status"] == "completed"
    return texts_of(stub.requests[-1])


def test_openais_client_lets_an_item_be_spoken(served: StubbedService) -> None:
    client, stub = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none"), served.stub
    with client.realtime.connect(model="gpt-realtime") as connection:
        connection.session.update(session={"type": "realtime", "audio": {"output": {"voice": "zoe", "speed": 1}}})
        connection.conversation.item.create(item=item("warn them."))  # type: ignore[arg-type]
        connection.response.create(response={"metadata": {"mine": "1"}})
        events = []
        for event in connection:
            events.append(event)
            if event.type == "response.done":
                break
    assert list(dict.fromkeys(event.type for event in events)) == [
        "session.created",
        "session.updated",
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_audio_transcript.delta",
        "response.output_audio.delta",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.done",
    ]
    parts = [base64.b64decode(event.delta) for event in events if event.type == "response.output_audio.delta"]
    assert sum(map(len, parts)) == 2 * stub.chunks * stub.samples and max(map(len, parts)) == DELTA_BYTES
    response = events[-1].response
    assert response.status == "completed" and response.metadata == {"mine": "1"}
    assert response.output[0].content[0].transcript == "warn them."
    assert response.warnings == [WARNING.decode()]
    assert (response.usage.input_token_details.text_tokens, response.usage.total_tokens) == (10, 160)
    assert response.usage.output_token_details.audio_tokens == response.usage.output_tokens == 150
    assert texts_of(stub.requests[-1])["speaker"] == "zoe"


def test_a_response_speaks_its_input_else_its_instructions_else_the_last_item(socket, served) -> None:
    stub = served.stub
    send(socket, "session.update", session={"instructions": "Speak slowly.", "voice": "zoe"})
    send(socket, "conversation.item.create", item=item("First."))
    send(socket, "conversation.item.create", item=item("Last.", "assistant", "output_text", id="last"))
    said = [
        spoken(socket, stub, {"input": [item("Not this."), item("This.")], "instructions": "Speak fast."}),
        spoken(socket, stub, {"input": [{"type": "item_reference", "id": "last"}]}),
        spoken(socket, stub, {"instructions": "Speak slowly.\nBegin."}),  # as LiveKit sends them
        spoken(socket, stub, {"instructions": "Begin."}),
    ]
    assert [(each["target_text"], each["instruct_text"]) for each in said] == [
        ("This.", "Speak fast."),
        ("Last.", "Speak slowly."),
        ("Begin.", "Speak slowly."),
        ("Begin.", "Speak slowly."),
    ]
    assert refused(socket, "response.create")["code"] == "nothing_to_speak"  # the last item is now what was spoken
    send(socket, "conversation.item.create", item=item("Next."))
    assert spoken(socket, stub, {})["target_text"] == "Next."


def test_a_telephone_gets_its_audio(socket: ClientConnection) -> None:
    telephone = {"audio": {"output": {"format": {"type": "audio/pcmu"}}}}
    updated = ask(socket, "session.update", "session.updated", session=telephone)["session"]
    assert updated["audio"]["output"]["format"] == {"type": "audio/pcmu"}
    send(socket, "response.create", response={"instructions": "Hello."})
    events = receive(socket, "response.done")
    size = sum(len(base64.b64decode(each["delta"])) for each in events if each["type"].endswith("audio.delta"))
    assert abs(size - 8000 * 6) < 100  # a byte for each of 8,000 samples a second


def test_a_cancel_ends_the_response_and_the_next_one_is_spoken(
    socket: ClientConnection, served: StubbedService
) -> None:
    stub, cancelled = served.stub, served.stub.cancelled
    ask(socket, "response.create", "response.output_audio.delta", response={"instructions": "endless talk"})
    second = refused(socket, "response.create", response={"instructions": "Two at once."})
    assert second["code"] == "conversation_already_has_active_response"
    ended = ask(socket, "response.cancel", "response.done")["response"]
    assert ended["status"] == "cancelled" and ended["status_details"]["reason"] == "client_cancelled"
    assert ended["usage"]["output_tokens"] > 0 and ended["output"][0]["status"] == "incomplete"
    until(lambda: stub.cancelled > cancelled)
    assert spoken(socket, stub, {"instructions": "Go on."})["target_text"] == "Go on."
    error = refused(socket, "response.cancel")
    assert error["code"] == "response_cancel_not_active" and error["message"].startswith("Cancellation failed")


def test_a_response_that_fails_says_why(socket: ClientConnection) -> None:
    ended = ask(socket, "response.create", "response.done", response={"instructions": "break it"})["response"]
    assert ended["status"] == "failed" and "token2wav broke" in ended["status_details"]["error"]["message"]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "does not listen"),
        ({"type": "sing"}, "'sing' is unknown"),
        ({"type": "conversation.item.sing"}, "'conversation.item.sing' is unknown"),
        ({"type": "session.update", "session": {"type": "transcription"}}, "this service speaks"),
        ({"type": "session.update", "session": {"speed": 9}}, "speed 9"),
        ({"type": "session.update", "session": {"voice": "nobody"}}, "unknown speaker 'nobody'"),
        ({"type": "session.update", "session": {"audio": []}}, "audio is a list"),
        ({"type": "session.update", "session": {"instructions": "a" * 5000}}, "up to 4096 characters"),
        ({"type": "session.update", "session": {"audio": {"output": {"format": "mp3"}}}}, "the format 'mp3'"),
        ({"type": "session.update", "session": {"output_modalities": ["text"]}}, "answers with audio"),
        ({"type": "conversation.item.create", "item": item("a" * 5000)}, "up to 4096 characters"),
        ({"type": "conversation.item.create", "item": item("a", id="b" * 65)}, "at most 64 characters"),
        ({"type": "conversation.item.create", "item": {"type": "function_call"}}, "no message"),
        ({"type": "conversation.item.create", "item": {"content": [{"type": "input_audio"}]}}, "does not listen"),
        ({"type": "conversation.item.create", "item": item("a"), "previous_item_id": "x"}, "no item 'x'"),
        ({"type": "conversation.item.delete", "item_id": ["x"]}, "no item"),
        ({"type": "response.create", "response": {"metadata": {"a": "b" * 513}}, "metadata": {}}, "nothing to speak"),
        ({"type": "response.create", "response": {"instructions": "a", "metadata": {"a": "b" * 513}}}, "metadata"),
        ({"type": "response.create", "response": {"instructions": "\ud800"}}, "instructions is not a text"),
        (MANY_ITEMS, "1 to 128 items"),
    ],
)
def test_an_invalid_message_is_an_error_with_its_id_and_the_session_continues(socket, message, error) -> None:
    socket.send(json.dumps({**message, "event_id": "mine"}))
    (told,) = receive(socket, "error")
    assert error in told["error"]["message"] and told["error"]["event_id"] == "mine"
    ask(socket, "input_audio_buffer.clear", "input_audio_buffer.cleared")


def test_the_conversation_keeps_its_order_and_its_last_items(socket: ClientConnection) -> None:
    for number in range(MAX_ITEMS + 1):
        ask(socket, "conversation.item.create", "conversation.item.done", item=item("Hi.", id=f"item{number}"))
    forgotten = refused(socket, "conversation.item.retrieve", item_id="item0")
    assert forgotten["code"] == "item_retrieve_invalid_item_id"
    twice = refused(socket, "conversation.item.create", item=item("Hi.", id="item5"))
    assert twice["code"] == "item_create_duplicate_item_id"
    send(socket, "conversation.item.create", item=item("Middle.", id="middle"), previous_item_id="item7")
    assert receive(socket, "conversation.item.added")[-1]["previous_item_id"] == "item7"
    send(socket, "conversation.item.truncate", item_id="middle", content_index=0, audio_end_ms=20)
    assert receive(socket, "conversation.item.truncated")[-1]["audio_end_ms"] == 20
    assert ask(socket, "conversation.item.delete", "conversation.item.deleted", item_id="middle")["item_id"] == "middle"
    ask(socket, "conversation.item.retrieve", "error", item_id="middle")
