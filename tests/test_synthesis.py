import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from common.chunking import Chunk, HopRules
from common.constants import FLOW_CHUNK_TOKENS
from common.errors import UnavailableError
from common.llm.base import LLMPrompt
from common.prompt import Prompt, Recording
from common.request import SpeechRequest
from common.synthesis import Synthesizer
from tests.fakes import (
    PROMPT_TOKENS,
    FakeLM,
    FakePromptEncoder,
    FakeTexts,
    FakeVocoder,
    Step,
    fake_prompt,
    speech_request,
)


class Pipeline:
    """A synthesizer over fakes, and a check that it left nothing behind."""

    def __init__(
        self,
        llm: FakeLM,
        encoder: FakePromptEncoder | None = None,
        vocoder: FakeVocoder | None = None,
        rules: HopRules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.clock = clock
        self.llm = llm
        self.encoder = encoder or FakePromptEncoder()
        self.vocoder = vocoder or FakeVocoder()
        self.voices: dict[str, Recording | Prompt] = {}
        self.texts = FakeTexts()
        self.rules = rules or HopRules()

    @property
    def synthesizer(self) -> Synthesizer:
        ports = (self.texts, self.voices.__getitem__, self.encoder, self.llm, self.vocoder)
        return Synthesizer(*ports, self.rules, self.clock)

    async def speak(self, request: SpeechRequest | None = None) -> list[np.ndarray]:
        async with aclosing(self.synthesizer.stream(request or speech_request())) as waveforms:
            return [waveform async for waveform in waveforms]

    def run(self, scenario: Coroutine[None, None, list[np.ndarray]] | None = None) -> list[np.ndarray]:
        async def main() -> list[np.ndarray]:
            try:
                return await (scenario or self.speak())
            finally:
                self.assert_nothing_left()

        return asyncio.run(main())

    def assert_nothing_left(self) -> None:
        assert len(asyncio.all_tasks()) == 1
        assert self.llm.open == self.llm.unclosed == 0
        assert self.vocoder.live == 0
        assert sorted(self.encoder.begun) == sorted(self.encoder.ended)

    @property
    def chunks(self) -> list[Chunk]:
        return self.vocoder.streams[0].chunks


async def turns(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds; for a bounded time, so that a test cannot hang."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0)


def one_by_one(total: int) -> list[Step]:
    return [[token] for token in range(total)]


@pytest.mark.parametrize("strategy", ["exponential", "equal", "time_based"])
@pytest.mark.parametrize("total", [1, 2, 17, 18, 100, 333])
def test_every_token_is_spoken_once_and_in_order(strategy: str, total: int) -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(total)), rules=HopRules(strategy=strategy))
    audio = pipeline.run()
    np.testing.assert_array_equal(np.concatenate(audio), np.arange(total))
    assert [chunk.final for chunk in pipeline.chunks] == [False] * (len(audio) - 1) + [True]


def test_exponential_chunks_hold_exactly_their_tokens() -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(220)))
    assert [len(waveform) for waveform in pipeline.run()] == [15, 30, 60, 100, 15]


def test_equal_chunks_hold_exactly_their_tokens() -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(50)), rules=HopRules(strategy="equal"))
    assert [len(waveform) for waveform in pipeline.run()] == [15, 15, 15, 5]


def test_time_based_chunks_use_the_backlog_that_grew_while_a_chunk_was_rendered() -> None:
    times = iter(range(1000))  # every look at the clock takes a second: rendering is slower than playing
    llm = FakeLM(list(range(18)), list(range(18, 95)))
    pipeline = Pipeline(llm, rules=HopRules(strategy="time_based"), clock=lambda: next(times))
    assert [len(waveform) for waveform in pipeline.run()] == [15, 75, 5]


def test_chunks_of_the_unet_flow_end_on_its_boundaries_behind_the_prompt() -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(120)), rules=HopRules(boundary=FLOW_CHUNK_TOKENS))
    pipeline.run()
    assert [PROMPT_TOKENS + chunk.end for chunk in pipeline.chunks] == [50, 75, 125, PROMPT_TOKENS + 120]


def test_the_three_parts_of_the_prompt_are_made_at_the_same_time() -> None:
    gate = asyncio.Event()
    pipeline = Pipeline(FakeLM([1]), FakePromptEncoder(gates=dict.fromkeys(("tokens", "mel", "embedding"), gate)))

    async def scenario() -> list[np.ndarray]:
        speaking = asyncio.create_task(pipeline.speak())
        await turns(lambda: len(pipeline.encoder.begun) == 3)
        assert pipeline.encoder.ended == []
        gate.set()
        return await speaking

    assert len(pipeline.run(scenario())) == 1


def test_the_llm_starts_before_the_x_vector_is_known() -> None:
    gate = asyncio.Event()
    pipeline = Pipeline(FakeLM([1]), FakePromptEncoder(gates={"embedding": gate}))

    async def scenario() -> list[np.ndarray]:
        speaking = asyncio.create_task(pipeline.speak())
        await turns(lambda: len(pipeline.llm.prompts) == 1)
        assert pipeline.vocoder.streams == []
        gate.set()
        return await speaking

    assert len(pipeline.run(scenario())) == 1


def test_the_vocoder_starts_before_the_first_token() -> None:
    first_token = asyncio.Event()
    pipeline = Pipeline(FakeLM(first_token, *one_by_one(20)))

    async def scenario() -> list[np.ndarray]:
        speaking = asyncio.create_task(pipeline.speak())
        await turns(lambda: pipeline.vocoder.live == 1)
        assert pipeline.chunks == []
        first_token.set()
        return await speaking

    assert len(pipeline.run(scenario())) == 2


def test_chunks_are_rendered_while_the_llm_still_speaks() -> None:
    rest = asyncio.Event()
    pipeline = Pipeline(FakeLM(*one_by_one(18), rest, [18, 19]))

    async def scenario() -> list[np.ndarray]:
        async with aclosing(pipeline.synthesizer.stream(speech_request())) as waveforms:
            first = await anext(waveforms)
            rest.set()
            return [first, *[waveform async for waveform in waveforms]]

    assert [len(waveform) for waveform in pipeline.run(scenario())] == [15, 5]


def test_the_llm_continues_the_reference_and_samples_as_asked() -> None:
    pipeline = Pipeline(FakeLM([1]))
    request = speech_request(voice=7, text="hello", reference_text="what it says")
    pipeline.run(pipeline.speak(request))
    assert pipeline.llm.prompts == [LLMPrompt("hello", "what it says", [7] * PROMPT_TOKENS)]
    assert pipeline.llm.samplings == [request.sampling]
    assert len(pipeline.vocoder.streams[0].prompt.tokens) == PROMPT_TOKENS


def test_without_a_transcript_the_llm_knows_the_text_alone_and_the_flow_keeps_the_voice() -> None:
    pipeline = Pipeline(FakeLM([1]))
    pipeline.run(pipeline.speak(speech_request(voice=7, reference_text="")))
    assert pipeline.llm.prompts == [LLMPrompt("hello")]
    assert set(pipeline.vocoder.streams[0].prompt.tokens) == {7}


def test_without_a_transcript_the_llm_waits_for_no_prompt_model() -> None:
    gate = asyncio.Event()
    pipeline = Pipeline(FakeLM([1]), FakePromptEncoder(gates=dict.fromkeys(("tokens", "mel", "embedding"), gate)))

    async def scenario() -> list[np.ndarray]:
        speaking = asyncio.create_task(pipeline.speak(speech_request(reference_text="")))
        await turns(lambda: len(pipeline.llm.prompts) == 1)
        gate.set()
        return await speaking

    assert len(pipeline.run(scenario())) == 1


def test_an_instruction_takes_the_place_of_the_recording_in_the_llm_and_the_flow_keeps_the_voice() -> None:
    pipeline = Pipeline(FakeLM([1]))
    pipeline.run(pipeline.speak(dataclasses.replace(speech_request(voice=7), instruct_text="sadly")))
    assert pipeline.llm.prompts == [LLMPrompt("hello", "sadly<|endofprompt|>")]
    assert set(pipeline.vocoder.streams[0].prompt.tokens) == {7}


@pytest.mark.parametrize("registered", [fake_prompt(7, "its text"), Recording(speech_request(7).voice.wav, "its text")])
def test_a_registered_voice_speaks_as_the_recording_it_was_made_of(registered: Prompt | Recording) -> None:
    pipeline = Pipeline(FakeLM([1]))
    pipeline.voices["anna"] = registered
    request = dataclasses.replace(speech_request(), voice="anna")
    pipeline.run(pipeline.speak(request))
    pipeline.run(pipeline.speak(dataclasses.replace(request, cross_lingual=True)))
    pipeline.run(pipeline.speak(dataclasses.replace(request, instruct_text="sadly")))
    assert pipeline.llm.prompts == [
        LLMPrompt("hello", "its text", [7] * PROMPT_TOKENS),
        LLMPrompt("hello"),
        LLMPrompt("hello", "sadly<|endofprompt|>"),
    ]
    assert {int(stream.prompt.tokens[0]) for stream in pipeline.vocoder.streams} == {7}
    assert bool(pipeline.encoder.begun) == isinstance(registered, Recording)


def test_texts_are_spelled_out_as_the_request_asks_the_transcript_too() -> None:
    class Shouting(FakeTexts):
        def segments(self, text: str, in_words: bool) -> Iterator[str]:
            yield text.upper() if in_words else text

        def transcript(self, text: str, in_words: bool) -> str:
            return text.upper() if in_words else text

    pipeline = Pipeline(FakeLM([1]))
    pipeline.texts = Shouting()
    for in_words in (True, False):
        pipeline.run(pipeline.speak(dataclasses.replace(speech_request(), in_words=in_words)))
    texts = [(prompt.target_text, prompt.prompt_text) for prompt in pipeline.llm.prompts]
    assert texts == [("HELLO", "REFERENCE"), ("hello", "reference")]


def test_an_unknown_voice_ends_the_request_before_anything_is_asked() -> None:
    pipeline = Pipeline(FakeLM([1]))
    with pytest.raises(KeyError, match="anna"):
        pipeline.run(pipeline.speak(dataclasses.replace(speech_request(), voice="anna")))
    assert pipeline.llm.prompts == [] and pipeline.vocoder.streams == []


# --- several segments --------------------------------------------------------------------------------------------


class CountingLM(FakeLM):
    """Says the numbers that the text names, "100-130", and notes the segments begun. `events`: waited for midway."""

    def __init__(self, **events: asyncio.Event):
        super().__init__()
        self.events = events

    def script(self, prompt: LLMPrompt) -> Sequence[Step]:
        if prompt.target_text not in self.events:
            return [[token] for token in range(*map(int, prompt.target_text.split("-")))]
        return [[1], self.events[prompt.target_text], [2]]


@pytest.mark.parametrize("offline", [False, True])
def test_segments_are_spoken_in_order_in_one_voice_with_the_same_sampling(offline: bool) -> None:
    pipeline = Pipeline(CountingLM())
    request = speech_request(voice=3, text="0-40|100-101|200-260")

    async def scenario() -> list[np.ndarray]:
        return [await pipeline.synthesizer.offline(request)] if offline else await pipeline.speak(request)

    audio = np.concatenate(pipeline.run(scenario()))
    np.testing.assert_array_equal(audio, 30_000 + np.concatenate([np.arange(40), [100], np.arange(200, 260)]))
    voice = ("reference", [3] * PROMPT_TOKENS)
    assert pipeline.llm.prompts == [LLMPrompt(text, *voice) for text in ("0-40", "100-101", "200-260")]
    assert pipeline.llm.samplings == [request.sampling] * 3
    assert len(pipeline.encoder.begun) == 3  # the voice is encoded once


def test_a_recording_that_was_heard_is_not_encoded_again() -> None:
    pipeline = Pipeline(CountingLM())
    request = speech_request(voice=3, text="0-40")

    synthesizer = pipeline.synthesizer

    async def scenario() -> list[np.ndarray]:
        return [await synthesizer.offline(request) for _ in range(2)]

    first, second = pipeline.run(scenario())
    np.testing.assert_array_equal(first, second)
    assert len(pipeline.encoder.begun) == 3
    assert pipeline.llm.prompts[0] == pipeline.llm.prompts[1]


def test_the_llm_speaks_the_next_segment_while_one_is_rendered_and_no_further() -> None:
    gate = asyncio.Event()
    pipeline = Pipeline(CountingLM(), vocoder=FakeVocoder(gate=gate))

    async def scenario() -> list[np.ndarray]:
        speaking = asyncio.create_task(pipeline.speak(speech_request(text="0-20|20-40|40-60|60-80")))
        await turns(lambda: len(pipeline.llm.prompts) == 2 and pipeline.llm.unclosed == 0)
        await asyncio.sleep(0.1)  # time in which it could go on
        assert [prompt.target_text for prompt in pipeline.llm.prompts] == ["0-20", "20-40"]
        gate.set()
        return await speaking

    np.testing.assert_array_equal(np.concatenate(pipeline.run(scenario())), np.arange(80))


def test_the_first_segment_is_heard_before_the_text_is_cut_to_its_end() -> None:
    released = threading.Event()

    class Slow(FakeTexts):
        def segments(self, text: str, in_words: bool) -> Iterator[str]:
            yield "0-40"
            assert released.wait(10)
            yield "40-60"

    pipeline = Pipeline(CountingLM())
    pipeline.texts = Slow()

    async def scenario() -> list[np.ndarray]:
        async with aclosing(pipeline.synthesizer.stream(speech_request())) as waveforms:
            first = [await anext(waveforms), await anext(waveforms)]
            released.set()
            return first + [waveform async for waveform in waveforms]

    np.testing.assert_array_equal(np.concatenate(pipeline.run(scenario())), np.arange(60))


@pytest.mark.parametrize("failing", ["llm", "vocoder", "segments"])
def test_an_error_in_a_later_segment_ends_the_stream_with_that_error(failing: str) -> None:
    class FailingTexts(FakeTexts):
        def segments(self, text: str, in_words: bool) -> Iterator[str]:
            yield from ("0-20", "20-40")
            raise ValueError("segments")

    class Failing(CountingLM):
        def script(self, prompt: LLMPrompt) -> Sequence[Step]:
            return [[1], UnavailableError("llm")] if prompt.target_text == "40-60" else super().script(prompt)

    class FailingVocoder(FakeVocoder):
        def open(self, prompt: Prompt) -> Any:
            self.failures = {0: RuntimeError("vocoder")} if len(self.streams) == 2 else {}
            return super().open(prompt)

    pipeline = Pipeline(
        Failing() if failing == "llm" else CountingLM(),
        vocoder=FailingVocoder() if failing == "vocoder" else FakeVocoder(),
    )
    pipeline.texts = FailingTexts() if failing == "segments" else FakeTexts()
    with pytest.raises((ValueError, UnavailableError, RuntimeError), match=failing):
        pipeline.run(pipeline.speak(speech_request(text="0-20|20-40|40-60")))


@pytest.mark.parametrize("place", ["the segment being rendered", "the segment ahead"])
def test_cancelling_frees_every_segment(place: str) -> None:
    never = asyncio.Event()
    ahead = place == "the segment ahead"
    pipeline = Pipeline(
        CountingLM(slow=never) if ahead else CountingLM(), vocoder=FakeVocoder(gate=never if ahead else None)
    )

    async def scenario() -> list[np.ndarray]:
        if not ahead:  # the consumer holds a waveform of the second segment, the third one waits
            async with aclosing(pipeline.synthesizer.stream(speech_request(text="0-20|20-60|60-80|80-99"))) as audio:
                return [await anext(audio) for _ in range(3)]
        speaking = asyncio.create_task(pipeline.speak(speech_request(text="0-20|slow|60-80")))
        await turns(lambda: len(pipeline.llm.prompts) == 2 and pipeline.vocoder.live == 1)
        speaking.cancel()
        return await speaking

    if ahead:
        with pytest.raises(asyncio.CancelledError):
            pipeline.run(scenario())
    else:
        assert len(pipeline.run(scenario())) == 3
    assert [stream.aborts for stream in pipeline.vocoder.streams] == ([1] if ahead else [0, 1])


def test_offline_makes_one_waveform_in_one_call() -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(40)))

    async def scenario() -> list[np.ndarray]:
        return [await pipeline.synthesizer.offline(speech_request(voice=2))]

    np.testing.assert_array_equal(pipeline.run(scenario())[0], 20_000 + np.arange(40))
    assert pipeline.vocoder.offline_calls == [(list(range(40)), 1.0)]
    assert pipeline.vocoder.streams == []


def test_speed_is_for_whole_utterances() -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(40)))
    fast = dataclasses.replace(speech_request(), speed=1.5)

    async def scenario() -> list[np.ndarray]:
        return [await pipeline.synthesizer.offline(fast)]

    pipeline.run(scenario())
    assert pipeline.vocoder.offline_calls == [(list(range(40)), 1.5)]
    with pytest.raises(ValueError, match="speed 1.5 is for whole utterances"):
        pipeline.run(pipeline.speak(fast))


@pytest.mark.parametrize("said_before", [0, 5, 18, 60])
def test_an_error_of_the_llm_ends_the_stream_with_that_error(said_before: int) -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(said_before), UnavailableError("the LLM is down")))
    with pytest.raises(UnavailableError, match="the LLM is down"):
        pipeline.run()


def test_an_error_of_the_llm_surfaces_while_a_chunk_is_being_rendered() -> None:
    pipeline = Pipeline(
        FakeLM(*one_by_one(18), UnavailableError("the LLM is down")), vocoder=FakeVocoder(gate=asyncio.Event())
    )
    with pytest.raises(UnavailableError, match="the LLM is down"):
        pipeline.run()
    assert pipeline.vocoder.streams[0].aborts == 1


@pytest.mark.parametrize("name", ["tokens", "mel", "embedding"])
def test_an_error_of_the_prompt_models_ends_the_stream_with_that_error(name: str) -> None:
    pipeline = Pipeline(FakeLM(asyncio.Event()), FakePromptEncoder(failures={name: ValueError(f"no {name}")}))
    with pytest.raises(ValueError, match=f"no {name}"):
        pipeline.run()
    assert pipeline.vocoder.streams == []


@pytest.mark.parametrize("failing", ["start", 0, 1])
def test_an_error_of_the_vocoder_closes_the_llm_and_frees_the_stream_once(failing: str | int) -> None:
    vocoder = FakeVocoder(failures={failing: RuntimeError("out of memory")})
    pipeline = Pipeline(FakeLM(*one_by_one(60), asyncio.Event()), vocoder=vocoder)
    with pytest.raises(RuntimeError, match="out of memory"):
        pipeline.run()
    assert vocoder.streams[0].aborts == 1


@pytest.mark.parametrize("offline", [False, True])
def test_an_llm_that_says_nothing_is_an_error_naming_the_text(offline: bool) -> None:
    pipeline = Pipeline(FakeLM())

    async def scenario() -> list[np.ndarray]:
        if offline:
            return [await pipeline.synthesizer.offline(speech_request(text="quiet"))]
        return await pipeline.speak(speech_request(text="quiet"))

    with pytest.raises(UnavailableError, match="no speech token for the text 'quiet'"):
        pipeline.run(scenario())


def test_truncation_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(20), finish_reason="length"))
    told: list[str] = []

    async def scenario() -> list[np.ndarray]:
        async with aclosing(pipeline.synthesizer.stream(speech_request(), told.append)) as waveforms:
            return [waveform async for waveform in waveforms]

    with caplog.at_level(logging.WARNING):
        assert sum(map(len, pipeline.run(scenario()))) == 20
    (warning,) = told
    assert warning.startswith("speech was cut short after 20 tokens") and warning.endswith("'hello'")
    assert warning in caplog.text


STAGES: dict[str, Callable[[Pipeline], bool]] = {
    "prompt": lambda pipeline: len(pipeline.encoder.begun) == 3,
    "first token": lambda pipeline: pipeline.vocoder.live == 1,
    "chunk": lambda pipeline: bool(pipeline.vocoder.streams) and bool(pipeline.chunks),
    "next tokens": lambda pipeline: bool(pipeline.vocoder.streams) and len(pipeline.chunks) == 1,
}


@pytest.mark.parametrize("stage", STAGES)
def test_cancelling_frees_everything_at_every_stage(stage: str) -> None:
    never = asyncio.Event()
    script: Sequence[Step] = [never] if stage == "first token" else [*one_by_one(18), never]
    pipeline = Pipeline(
        FakeLM(*script),
        FakePromptEncoder(gates={"tokens": never} if stage == "prompt" else {}),
        FakeVocoder(gate=never if stage == "chunk" else None),
    )

    async def scenario() -> list[np.ndarray]:
        speaking = asyncio.create_task(pipeline.speak())
        await turns(lambda: STAGES[stage](pipeline))
        for _ in range(5):
            await asyncio.sleep(0)
        speaking.cancel()
        return await speaking

    with pytest.raises(asyncio.CancelledError):
        pipeline.run(scenario())
    assert [stream.aborts for stream in pipeline.vocoder.streams] == ([] if stage == "prompt" else [1])


def test_closing_the_generator_after_the_first_waveform_frees_everything() -> None:
    pipeline = Pipeline(FakeLM(*one_by_one(18), asyncio.Event()))

    async def scenario() -> list[np.ndarray]:
        async with aclosing(pipeline.synthesizer.stream(speech_request())) as waveforms:
            return [await anext(waveforms)]

    assert len(pipeline.run(scenario())) == 1
    assert pipeline.vocoder.streams[0].aborts == 1


class EchoLM(FakeLM):
    """Says numbers that start at the text's own, so that a mixed-up stream is heard."""

    def script(self, prompt: LLMPrompt) -> Sequence[Step]:
        start = int(prompt.target_text)
        return [[token] for token in range(start, start + 100 + start // 100)]


def test_eight_concurrent_streams_do_not_mix() -> None:
    pipeline = Pipeline(EchoLM())

    async def scenario() -> list[np.ndarray]:
        requests = [speech_request(voice=voice, text=str(100 * voice)) for voice in range(8)]
        return [np.concatenate(audio) for audio in await asyncio.gather(*map(pipeline.speak, requests))]

    for voice, audio in enumerate(pipeline.run(scenario())):
        np.testing.assert_array_equal(audio, 10_000 * voice + np.arange(100 * voice, 101 * voice + 100))
