"""Text that is taken back, which words were spoken, and how answers ended. When words are spoken, in JSON, events, the
WebSocket and subtitles."""

import asyncio
import base64
import dataclasses
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from cosyvoice_triton.client.answer import AudioPart
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.speech_service.answer import SpeechAnswer
from cosyvoice_triton.speech_service.audio.spoken import spoken_words, text_of
from cosyvoice_triton.speech_service.audio.timestamps import Timestamps, subtitles
from cosyvoice_triton.speech_service.audio.word_times import word_times
from cosyvoice_triton.speech_service.bodies import SpeechRequest
from cosyvoice_triton.speech_service.errors import ApiError
from cosyvoice_triton.speech_service.outcomes import MOST, Outcomes
from cosyvoice_triton.speech_service.routes.realtime_response import Response
from cosyvoice_triton.speech_service.routes.responses import AudioResponse
from cosyvoice_triton.speech_service.security.guard import API_KEY, REQUEST_ID

from tests.support.speech_fixtures import SPEECH, TEXT, StubbedService, ask, events_of, receive, refused, say, send
from tests.support.triton_stub import texts_of
from tests.support.waiting import Clock, until

SAID = "One two three four. Five six seven eight."


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
    assert text_of(spoken_words(SAID, whole)) == SAID
    assert text_of(spoken_words(SAID, whole, 2.0)) == "One two three four."
    assert text_of(spoken_words(SAID, whole, 0.0)) == ""
    assert [word["word"] for word in spoken_words(SAID, whole, 3.1)][:5] == ["One", "two", "three", "four.", "Five"]
    half = answer("One two three four. ", seconds=2.6)
    assert text_of(spoken_words(SAID, half)).startswith("One two three four. Five")
    assert "eight" not in text_of(spoken_words(SAID, half, 60.0))
    assert (
        not spoken_words(SAID, answer(seconds=0.0))
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
        said = say(socket, " two.")
        texts = [each["sentence_text"] for each in said if isinstance(each, dict) and "sentence_text" in each]
        assert texts == ["Quick one.", "And two."]
        assert not any(each["type"] == "audio.timestamps" for each in said if isinstance(each, dict))


def test_a_truncated_response_has_the_words_that_were_heard_and_its_outcome_is_known(served: StubbedService) -> None:
    with served.connect("/v1/realtime") as socket:
        words = {"instructions": "quick words of one response"}
        done = ask(socket, "response.create", "response.done", response=words)["response"]
        heard = {"item_id": done["output"][0]["id"], "content_index": 0, "audio_end_ms": 0}
        assert ask(socket, "conversation.item.truncate", "conversation.item.truncated", **heard)["words"] == []
        kept = ask(socket, "conversation.item.retrieve", "conversation.item.retrieved", item_id=heard["item_id"])
        assert kept["item"]["content"][0]["transcript"] == ""
        ask(socket, "response.create", "response.output_audio.delta", response={"instructions": "endless talk"})
        cancelled = ask(socket, "response.cancel", "response.done")["response"]
        assert cancelled["status_details"]["words"][0]["word"] == "endless"
    for name, status in ((done["id"], "completed"), (cancelled["id"], "gone")):
        assert httpx.get(f"{served.url}/v1/audio/speech/{name}").json()["status"] == status


def test_the_rest_of_a_response_is_replaced_or_dropped_where_a_segment_ends(served: StubbedService) -> None:
    """The stub says that each of its chunks is a segment of the whole text: the first one has all of its words."""
    with served.connect("/v1/realtime") as socket:
        assert refused(socket, "response.replace", text="Too early.")["code"] == "response_replace_not_active"
        ask(socket, "response.create", "response.output_audio.delta", response={"instructions": "endless talk"})
        for wrong in ({"text": 1}, {"text": "a" * 4090}, {"text": "a", "audio_end_ms": "1"}):
            assert refused(socket, "response.replace", **wrong)["param"] in ("text", "audio_end_ms")
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

    assert replaced(SAID, "One two three four. ") == ("Five six seven eight.", "One two three four. Or this.")
    assert replaced(SAID, SAID) == ("", f"{SAID} Or this.")
    assert replaced(SAID) == (SAID, "Or this.")
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


@pytest.mark.parametrize(
    ("whole", "fails", "told"), [(False, False, "completed"), (True, False, "completed"), (False, True, "failed")]
)
def test_who_has_the_last_bytes_of_an_answer_is_told_how_it_ended(whole: bool, fails: bool, told: str) -> None:
    async def parts(made: SpeechAnswer) -> AsyncIterator[bytes]:
        if fails:
            raise ApiError(503, "is refused")
        yield b"one"
        yield b"two"

    async def receive() -> dict[str, Any]:
        return await asyncio.Event().wait() or {}

    async def send(message: dict[str, Any]) -> None:
        statuses.append(outcomes.of(REQUEST_ID.get())["status"])

    outcomes, statuses, settings = Outcomes(), list[str](), SimpleNamespace(mark="off", stall=60.0)
    service: Any = SimpleNamespace(outcomes=outcomes, settings=settings, dispatcher=SimpleNamespace(encoded=parts))
    response = AudioResponse(service, answer(seconds=1.0), whole=bytes if whole else None)
    asyncio.run(response({"type": "http", "method": "POST", "headers": []}, receive, send))
    assert statuses[-1] == told and ("in_progress" in statuses) == (not whole and not fails)


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


def sound(seconds: float) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, round(seconds * SAMPLE_RATE)).astype(np.float32)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * SAMPLE_RATE), np.float32)


SPOKEN = np.concatenate([silence(0.2), sound(0.8), silence(0.3), sound(0.5), silence(0.1)])


@pytest.mark.parametrize("text", ["Hello there, you.", "Hello there, new world.", "你好，世界。"])
def test_words_share_the_sound_and_a_pause_is_at_the_comma(text: str) -> None:
    words = word_times(text, SPOKEN)
    assert "".join(text[word.begin : word.end] for word in words) == text.replace(" ", "")
    comma = next(index for index, word in enumerate(words) if text[word.begin : word.end].endswith((",", "，")))
    assert words[0].start == pytest.approx(0.2) and words[-1].stop == pytest.approx(1.8)
    assert words[comma].stop == pytest.approx(1.0) and words[comma + 1].start == pytest.approx(1.3)
    times = [at for word in words for at in (word.start, word.stop)]
    assert times == sorted(times)


def test_longer_words_take_longer_and_a_pause_before_a_plosive_stays_inside_its_word() -> None:
    short, long = word_times("a development", np.concatenate([sound(0.6), silence(0.12), sound(0.4)]))
    assert short.stop < 0.3 and long.start == short.stop and long.stop == pytest.approx(1.12)


@pytest.mark.parametrize("text", ["?!", "one", "USB 3", "word " * 300, "…", "こんにちは world"])
@pytest.mark.parametrize(
    "audio",
    [silence(0), silence(0.5), sound(0.005), SPOKEN, np.tile(np.concatenate([sound(0.2), silence(0.2)]), 12)],
    ids=["none", "mute", "short", "spoken", "halting"],
)
def test_any_text_and_audio_give_times_in_order_inside_the_audio(text: str, audio: np.ndarray) -> None:
    times = [at for word in word_times(text, audio) for at in (word.start, word.stop)]
    assert times == sorted(times) and all(-1e-9 <= at <= audio.size / SAMPLE_RATE + 1e-9 for at in times)
    assert bool(times) == bool(audio.size)


def test_more_words_than_can_have_been_spoken_take_bounded_time() -> None:
    """A text in pieces that was cut short: its pauses took more than a minute to assign."""
    words = word_times("字" * 4096, np.tile(np.concatenate([sound(0.28), silence(0.12)]), 250))
    assert [words[0].start, words[-1].stop] == pytest.approx([0.0, 99.88])


def test_marks_of_webvtt_are_no_markup() -> None:
    times = Timestamps("word")
    times.add(AudioPart(SPOKEN, [("a<b & c --> d.", SPOKEN.size)]))
    assert "a&lt;b &amp; c --&gt; d." in subtitles(times.segments, "vtt").splitlines()
    assert "a<b & c --> d." in subtitles(times.segments, "srt").splitlines()


@pytest.mark.parametrize("cut", [1000, 24_000, 10**6])
def test_segments_are_exact_however_the_audio_arrives(cut: int) -> None:
    """A pause of 0.5 s between two segments; at double speed."""
    audio = np.concatenate([SPOKEN, silence(0.5), SPOKEN[::-1]])
    lengths = [("One, two.", SPOKEN.size), ("", SAMPLE_RATE // 2), ("Three, four.", SPOKEN.size)]
    times, sent = Timestamps("word", speed=2.0), 0
    taken: list[dict[str, Any]] = []
    for begin in range(0, audio.size, cut):
        part = audio[begin : begin + cut]
        sent += part.size
        done = sum(size for _, size in lengths)
        ready = []
        while lengths and sent >= audio.size - done + lengths[0][1]:
            done -= lengths[0][1]
            ready.append(lengths.pop(0))
        times.add(AudioPart(part, ready))
        taken += times.take()
    assert [(each["text"], each["start"], each["end"]) for each in taken] == [
        ("One, two.", 0.0, 0.95),
        ("Three, four.", 1.2, 2.15),
    ]
    assert times.segments == taken
    starts = [word["start"] for segment in taken for word in segment["words"]]
    assert starts == pytest.approx([0.1, 0.65, 1.2 + 0.05, 1.2 + 0.45], abs=0.001)


def test_subtitles_are_cues_of_words() -> None:
    words = [{"word": f"word{n},", "start": float(n), "end": n + 0.75} for n in range(10)]
    words += [{"word": "End.", "start": 10.0, "end": 11.0}, {"word": "New.", "start": 3600.0, "end": 3600.5}]
    segment = {"text": " ".join(word["word"] for word in words), "words": words}
    srt, vtt = subtitles([segment], "srt"), subtitles([segment], "vtt")
    assert srt.startswith("1\n00:00:00,000 --> 00:00:06,750\nword0, word1, word2, word3, word4, word5, word6,\n\n2\n")
    assert srt.endswith("3\n01:00:00,000 --> 01:00:00,500\nNew.\n\n")
    assert vtt.startswith("WEBVTT\n\n1\n00:00:00.000 --> 00:00:06.750\nword0,")


WORDS = {**TEXT, "input": "Hello, world.", "timestamps": "word"}


def check(segments: list[dict[str, Any]], stub_chunks: int, words: bool = True) -> None:
    """The stub makes each of its chunks of 0.2 s a segment of the whole text."""
    assert [(each["text"], each["start"], each["end"]) for each in segments] == [
        ("Hello, world.", round(0.2 * number, 3), round(0.2 * number + 0.2, 3)) for number in range(stub_chunks)
    ]
    for segment in segments:
        assert ("words" in segment) == words
        if words:
            assert [word["word"] for word in segment["words"]] == ["Hello,", "world."]
            assert segment["start"] <= segment["words"][0]["start"] < segment["words"][1]["end"] <= segment["end"]


def test_json_has_audio_timestamps_and_subtitles_in_one_object_also_in_a_batch(served: StubbedService) -> None:
    answer = served.post({**WORDS, "stream_format": "json", "subtitles": "vtt"})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    found = answer.json()
    assert len(base64.b64decode(found["audio_data"])) == 2 * served.stub.chunks * served.stub.samples
    assert (found["media_type"], found["sample_rate"]) == ("audio/pcm", SAMPLE_RATE) and found["usage"]
    check(found["segments"], served.stub.chunks)
    assert found["subtitles"].startswith("WEBVTT\n") and found["subtitles"].count("Hello, world.") == 3
    batch = served.post({"items": [WORDS, TEXT]}, f"{SPEECH}/batch").json()["results"]
    check(batch[0]["segments"], served.stub.chunks)
    assert "segments" not in batch[1] and "subtitles" not in batch[1]
    failed = served.post({**WORDS, "input": "break", "stream_format": "json"})
    assert failed.status_code == 502 and failed.json()["error"]["message"]


def test_events_send_the_times_of_a_segment_after_its_audio(served: StubbedService) -> None:
    body = {**WORDS, "timestamps": "segment", "stream_format": "sse", "speed": 1.0}
    answer = served.post(body)
    events = events_of(answer)
    assert answer.headers["content-type"].startswith("text/event-stream")
    kinds = ["speech.audio.delta", "speech.audio.timestamps"] * 3
    assert [event["type"] for event in events] == [*kinds, "speech.audio.done"]
    audio = b"".join(base64.b64decode(event["audio"]) for event in events if "audio" in event)
    assert len(audio) == 2 * served.stub.chunks * served.stub.samples
    assert events[-1]["usage"] == {"input_tokens": 13, "output_tokens": 15, "total_tokens": 28, "seconds": 0.6}
    found = [each for event in events for each in event.get("segments", ())]
    check(found, served.stub.chunks, words=False)


def test_the_socket_sends_the_times_of_each_sentence(served: StubbedService) -> None:
    with served.connect() as socket:
        assert refused(socket, "session.config", subtitles="srt")["param"] == "subtitles"
        send(socket, "session.config", timestamps="word")
        received = say(socket, "Hello, world.")
    found = [each for each in received if isinstance(each, dict) and each["type"] == "audio.timestamps"]
    assert all((each["utterance_index"], each["sentence_index"]) == (0, 0) for each in found)
    check([segment for each in found for segment in each["segments"]], served.stub.chunks)
