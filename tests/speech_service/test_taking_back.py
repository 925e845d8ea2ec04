"""Text that is taken back, which words were spoken, and how answers ended."""

import dataclasses

import httpx2 as httpx
import numpy as np
import pytest
from cosyvoice_triton.client.answer import AudioPart
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.audio.spoken import spoken_words, text_of
from cosyvoice_triton.speech_service.audio.timestamps import Timestamps
from cosyvoice_triton.speech_service.bodies import SpeechRequest
from cosyvoice_triton.speech_service.errors import ApiError
from cosyvoice_triton.speech_service.outcomes import MOST, Outcomes
from cosyvoice_triton.speech_service.routes.realtime_response import Response
from cosyvoice_triton.speech_service.security.guard import API_KEY

from tests.support.speech_fixtures import StubbedService, ask, receive, send, until
from tests.support.triton_stub import texts_of
from tests.support.waiting import Clock

TEXT = "One two three four. Five six seven eight."


def answer(*segments: str, seconds: float) -> SpeechAnswer:
    """Of these complete segments of two seconds each, and so many seconds in all."""
    made = SpeechAnswer((Utterance("."),), 1, timestamps=Timestamps("word"), samples=round(seconds * SAMPLE_RATE))
    sound = np.sin(np.arange(2 * SAMPLE_RATE) / 10).astype(np.float32)
    assert made.timestamps is not None
    for text in segments:
        made.timestamps.add(AudioPart(sound, segments=((text, sound.size),)))
    return made


def test_words_are_those_whose_time_has_come_also_of_a_segment_that_is_not_complete() -> None:
    whole = answer("One two three four. ", "Five six seven eight.", seconds=4.0)
    assert text_of(spoken_words(TEXT, whole)) == TEXT
    assert text_of(spoken_words(TEXT, whole, 2.0)) == "One two three four."
    assert text_of(spoken_words(TEXT, whole, 0.0)) == ""
    assert [word["word"] for word in spoken_words(TEXT, whole, 3.1)][:5] == ["One", "two", "three", "four.", "Five"]
    half = answer("One two three four. ", seconds=2.6)
    assert text_of(spoken_words(TEXT, half)).startswith("One two three four. Five")
    assert "eight" not in text_of(spoken_words(TEXT, half, 60.0))
    assert (
        not spoken_words(TEXT, answer(seconds=0.0))
        and text_of(spoken_words("你好世界", answer(seconds=9))) == "你好世界"
    )


def test_text_that_waits_is_replaced_and_the_sentence_that_is_spoken_goes_on(served: StubbedService) -> None:
    def replaced(text: str, **more: float) -> str:
        answer = ask(socket, "input.replace", "input.replaced", text=text, **more)
        assert not more or answer["words"] == []
        return str(answer["dropped"])

    with served.connect() as socket:
        ask(socket, "input.text", "audio.start", text="endless talk. Not this one. Nor this. And th")
        assert replaced("But this.", played_ms=0) == "Not this one. Nor this. And th"
        send(socket, "input.done")
        send(socket, "input.text", text="Another utterance. And")
        assert replaced("Or that. And that?") == "But this."
        assert replaced("") == "Or that. And that?"
        ask(socket, "input.cancel", "audio.cancelled")
        send(socket, "input.text", text="Not th")
        assert replaced("Quick one. And") == "Not th"
        send(socket, "input.text", text=" two.")
        send(socket, "input.done")
        said = receive(socket, "session.done")
        texts = [each["sentence_text"] for each in said if isinstance(each, dict) and "sentence_text" in each]
        assert texts == ["Quick one.", "And two."]
        assert not any(each["type"] == "audio.timestamps" for each in said if isinstance(each, dict))


def test_a_truncated_response_has_the_words_that_were_heard_and_its_outcome_is_known(served: StubbedService) -> None:
    with served.connect("/v1/realtime") as socket:
        send(socket, "response.create", response={"instructions": "quick words of one response"})
        done = receive(socket, "response.done")[-1]["response"]
        item = done["output"][0]["id"]
        send(socket, "conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=0)
        assert receive(socket, "conversation.item.truncated")[-1]["words"] == []
        send(socket, "conversation.item.retrieve", item_id=item)
        assert receive(socket, "conversation.item.retrieved")[-1]["item"]["content"][0]["transcript"] == ""
        ask(socket, "response.create", "response.output_audio.delta", response={"instructions": "endless talk"})
        cancelled = ask(socket, "response.cancel", "response.done")["response"]
        assert cancelled["status_details"]["words"][0]["word"] == "endless"
    for name, status in ((done["id"], "completed"), (cancelled["id"], "gone")):
        assert httpx.get(f"{served.url}/v1/audio/speech/{name}").json()["status"] == status


def test_the_rest_of_a_response_is_replaced_or_dropped_where_a_segment_ends(served: StubbedService) -> None:
    """The stub says that each of its chunks is a segment of the whole text: the first one has all of its words."""
    with served.connect("/v1/realtime") as socket:
        send(socket, "response.replace", text="Too early.")
        assert receive(socket, "error")[-1]["error"]["code"] == "response_replace_not_active"
        ask(socket, "response.create", "response.output_audio.delta", response={"instructions": "endless talk"})
        for wrong in ({"text": 1}, {"text": "a" * 4090}, {"text": "a", "audio_end_ms": "1"}):
            assert ask(socket, "response.replace", "error", **wrong)["error"]["param"] in ("text", "audio_end_ms")
        told = ask(socket, "response.replace", "response.replaced", text="endless again")
        assert [word["word"] for word in told["words"][:2]] == ["endless", "talk"] and told["dropped"] == ""
        send(socket, "response.replace", text="Never this.", audio_end_ms=0)
        send(socket, "response.replace", text="quick one", audio_end_ms=0)
        first, second = (receive(socket, "response.replaced")[-1] for _ in range(2))
        assert (first["dropped"], second["words"], second["dropped"]) == ("Never this.", [], "")
        done = receive(socket, "response.done")[-1]["response"]
        assert [texts_of(each)["target_text"] for each in list(served.stub.requests)[-3:]] == [
            "endless talk",
            "endless again",
            "quick one",
        ]
        text = done["output"][0]["content"][0]["transcript"]
        assert text == "endless talk endless again quick one" and done["status"] == "completed"
        assert done["usage"]["input_tokens"] == len(text) - 2
        ask(socket, "response.create", "response.output_audio.delta", response={"instructions": "endless talk"})
        assert ask(socket, "response.replace", "response.done", text="")["response"]["status"] == "completed"


def test_what_no_complete_segment_has_is_dropped() -> None:
    """Also where a number is spoken as more words than it is written."""

    def replaced(text: str, *segments: str) -> tuple[str, str]:
        made = Response(SpeechRequest(input=text), {}, answer=answer(*segments, seconds=9.0))
        assert made.answer is not None
        made.replace(made.answer, "Or this.", (), None)
        assert made.answer.instead is not None and made.waiting == "Or this."
        made.answer.instead()
        assert made.replaced is not None and made.waiting is None
        return made.replaced["dropped"], made.wanted.input

    assert replaced(TEXT, "One two three four. ") == ("Five six seven eight.", "One two three four. Or this.")
    assert replaced(TEXT, TEXT) == ("", f"{TEXT} Or this.")
    assert replaced(TEXT) == (TEXT, "Or this.")
    assert replaced("It is 1,250 km. It is far, it is.", "It is one thousand two hundred fifty kilometers. ")[0] == (
        "It is far, it is."
    )
    assert replaced("你好世界。再见。", "你好世界。") == ("再见。", "你好世界。Or this.")


def test_how_an_answer_ended_is_told_by_its_request_id(served: StubbedService) -> None:
    def ended(answer: httpx.Response) -> dict:
        return httpx.get(f"{served.url}/v1/audio/speech/{answer.headers['x-request-id']}").json()

    body = {"response_format": "pcm"}
    whole = ended(httpx.post(f"{served.url}/v1/audio/speech", json={"input": "quick one.", **body}))
    assert whole["status"] == "completed" and whole["usage"]["seconds"] > 0 and whole["warnings"] == []
    failed = ended(httpx.post(f"{served.url}/v1/audio/speech", json={"input": "refuse it.", **body}))
    assert failed["status"] == "failed" and "is refused" in failed["error"]["message"]
    with httpx.stream("POST", f"{served.url}/v1/audio/speech", json={"input": "endless talk.", **body}) as left:
        parts = left.iter_bytes()
        next(parts)
        assert ended(left)["status"] == "in_progress"
    until(lambda: ended(left)["status"] == "gone", 10)
    unknown = httpx.get(f"{served.url}/v1/audio/speech/nothing")
    assert unknown.status_code == 404 and "no answer 'nothing' in the last 10 minutes" in unknown.text


def test_outcomes_are_forgotten_after_ten_minutes_are_bounded_and_are_of_one_key() -> None:
    clock, made = Clock(), dataclasses.replace(answer(seconds=1.0), key="anna")
    outcomes = Outcomes(clock)
    token = API_KEY.set("anna")
    try:
        outcomes.begin("a", made)
        assert outcomes.of("a")["status"] == "in_progress"
        outcomes.end("a", made, "aborted", ApiError(502, "broke"))
        assert (outcomes.of("a")["status"], outcomes.of("a")["error"]["message"]) == ("aborted", "broke")
        API_KEY.set("bob")
        with pytest.raises(ApiError):
            outcomes.of("a")
        API_KEY.set("anna")
        clock.now += 601
        with pytest.raises(ApiError):
            outcomes.of("a")
        for number in range(MOST + 1):
            outcomes.end(str(number), made, "completed")
        with pytest.raises(ApiError):
            outcomes.of("0")
        assert outcomes.of("1")["id"] == "1"
    finally:
        API_KEY.reset(token)
