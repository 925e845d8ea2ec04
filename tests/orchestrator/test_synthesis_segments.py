"""Texts of several segments: rendered in order, in one voice, with the LLM at most one segment ahead; answers of the
LLM that end by their length: continued, or cut short with a warning."""

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import MAX_SEED, URGENT_TOKENS, LLMPrompt, Sampling
from cosyvoice_triton.orchestrator.report import Events
from cosyvoice_triton.orchestrator.request import SynthesisRequest
from cosyvoice_triton.orchestrator.synthesis import last_sentence
from cosyvoice_triton.text.markup import Pause

from tests.support import fakes
from tests.support.pipeline import Pipeline, Speak, one_by_one, run_until, settle


def test_the_tone_of_a_segment_is_carried_to_the_next_if_the_request_asks_for_it() -> None:
    pipeline = Pipeline(CountingLM())
    request = replace(fakes.speech_request(voice=3, text="0-40|100-101|200-260"), carry_tone=True)
    pipeline.run(pipeline.synthesize(request))
    before = [(prompt.prompt_text, prompt.prompt_tokens) for prompt in pipeline.llm.prompts]
    assert before == [("reference", [3] * fakes.PROMPT_TOKENS), ("0-40 ", list(range(40))), ("100-101 ", [100])]
    pipeline.run(pipeline.synthesize(replace(request, voice=replace(request.voice, text=""))))
    assert not any(prompt.prompt_tokens for prompt in pipeline.llm.prompts[3:]), "no voice is continued"


def test_the_last_sentence_begins_at_the_pause_that_is_nearest_to_where_it_is_expected() -> None:
    text, silent = "One two three four. Five six.", {0}
    tokens = [0, 0, 0, *[7] * 20, 0, 0, 0, *[8] * 20, 0, 0, 0, 0, *[9] * 20, 0, 0, 0]
    assert last_sentence(text, tokens, silent) == ("Five six.", [0, 0, 0, *[9] * 20, 0, 0, 0])
    for words, ids in (("One two.", tokens), (text, [7] * 20)):
        assert last_sentence(words, ids, silent) == (words, ids)


class CountingLM(fakes.FakeLM):
    """Generates the range that the text names, such as "100-130". `events`: text -> event to wait for midway."""

    def __init__(self, **events: asyncio.Event):
        super().__init__()
        self.events = events

    def script(self, prompt: LLMPrompt) -> Sequence[fakes.Step]:
        if prompt.target_text not in self.events:
            return [[token] for token in range(*map(int, prompt.target_text.split("-")))]
        return [[1], self.events[prompt.target_text], [2]]


@pytest.mark.parametrize(
    ("speak", "played"), [(Pipeline.synthesize, True), (Pipeline.synthesize, False), (Pipeline.offline, True)]
)
def test_segments_are_rendered_in_order_in_one_voice_with_the_same_sampling(speak: Speak, played: bool) -> None:
    pipeline = Pipeline(CountingLM())
    request = replace(fakes.speech_request(voice=3, text="0-40|100-101|200-260"), played=played)
    audio = np.concatenate(pipeline.run(speak(pipeline, request)))
    np.testing.assert_array_equal(audio, 30_000 + np.concatenate([np.arange(40), [100], np.arange(200, 260)]))
    voice = ("reference", [3] * fakes.PROMPT_TOKENS)
    assert pipeline.llm.prompts == [LLMPrompt(text, *voice) for text in ("0-40", "100-101", "200-260")]
    hints = [(prompt.urgent_tokens, prompt.played) for prompt in pipeline.llm.prompts]
    heard = played and speak is Pipeline.synthesize
    assert hints == ([(URGENT_TOKENS, True), (0, True), (0, True)] if heard else [(0, False)] * 3)
    assert pipeline.llm.samplings == [request.sampling] * 3
    pipeline.run(speak(pipeline, request))
    assert len(pipeline.encoder.started) == 3  # the voice is encoded once


def test_a_voice_with_a_transcript_and_no_speech_tokens_speaks() -> None:
    """The tokens that the first chunk needs are counted from its prompt's, of which there are none."""
    pipeline = Pipeline(CountingLM())
    voice = fakes.fake_prompt(7, "its text")
    pipeline.voices["anna"] = replace(voice, tokens=voice.tokens[:0], mel=voice.mel[:0])
    (audio,) = pipeline.run(pipeline.synthesize(replace(fakes.speech_request(text="0-10"), voice="anna")))
    assert len(audio) == 10 and pipeline.llm.prompts == [LLMPrompt("0-10", "its text", [])]


def test_a_later_segment_starts_with_the_audio_that_its_listener_has_left_and_with_a_longer_hop() -> None:
    """The fake makes one sample per token, and its clock stands still: nothing has been played."""
    pipeline = Pipeline(CountingLM(), clock=lambda: 7.0)
    pipeline.run(pipeline.synthesize(fakes.speech_request(text="0-70|100-180|200-300")))
    first, second, third = pipeline.token2wav.streams
    assert first.audio_left is None
    assert second.audio_left == pytest.approx(70 / SAMPLE_RATE)
    assert third.audio_left == pytest.approx(150 / SAMPLE_RATE)
    assert [[hop.length for hop in stream.hops][0] for stream in (first, second, third)] == [15, 60, 100]


async def test_the_llm_is_one_segment_ahead_of_token2wav_and_no_further() -> None:
    gate = asyncio.Event()
    pipeline = Pipeline(CountingLM(), token2wav=fakes.FakeToken2Wav(gate=gate))
    async with pipeline:
        synthesis = asyncio.create_task(pipeline.synthesize(fakes.speech_request(text="0-20|20-40|40-60|60-80")))
        await run_until(lambda: len(pipeline.llm.prompts) == 2 and pipeline.llm.open == 0)
        await settle()
        assert [prompt.target_text for prompt in pipeline.llm.prompts] == ["0-20", "20-40"]
        gate.set()
        np.testing.assert_array_equal(np.concatenate(await synthesis), np.arange(80))


async def test_the_first_segment_is_rendered_before_the_whole_text_is_segmented() -> None:
    released = threading.Event()

    def parts() -> Iterator[str]:
        yield "0-40"
        assert released.wait(10)
        yield "40-60"

    pipeline = Pipeline(CountingLM())
    pipeline.texts = fakes.FakeTextPreparer(parts())
    async with pipeline:
        async with aclosing(pipeline.synthesizer.stream(fakes.speech_request())) as waveforms:
            first = [await anext(waveforms), await anext(waveforms)]
            released.set()
            rest = [waveform async for waveform in waveforms]
            np.testing.assert_array_equal(np.concatenate(first + rest), np.arange(60))


PAUSES = (Pause(0.1), "0-20", Pause(0.5), Pause(0.5), "20-40", Pause(0.02))


@pytest.mark.parametrize("offline", [False, True])
async def test_segments_and_pauses_are_reported_with_their_samples_before_their_last_waveform(offline: bool) -> None:
    """Pauses are silence between segments and hold up no work."""
    pipeline = Pipeline(CountingLM())
    pipeline.texts = fakes.FakeTextPreparer(PAUSES)
    reported: list[tuple[str, int]] = []
    waveforms, received = list[np.ndarray](), 0

    def ended(text: str, samples: int, tokens: Sequence[int]) -> None:
        reported.append((text, samples))
        assert received < sum(size for _, size in reported)

    async with pipeline:
        if offline:
            waveforms.append(await pipeline.synthesizer.offline(fakes.speech_request(), Events(segment=ended)))
        else:
            async for waveform in pipeline.synthesizer.stream(fakes.speech_request(), Events(segment=ended)):
                received += waveform.size
                waveforms.append(waveform)
    audio = np.concatenate(waveforms)
    parts = [np.zeros(2400), np.arange(20), np.zeros(24_000), np.arange(20, 40), np.zeros(480)]
    np.testing.assert_array_equal(audio, np.concatenate(parts))
    assert reported == [("", 2400), ("0-20", 20), ("", 24_000), ("20-40", 20), ("", 480)]
    assert audio.size == sum(samples for _, samples in reported)
    if not offline:  # the listener still has the silence when the second segment starts
        assert pipeline.token2wav.streams[1].audio_left > 1.0


def test_a_text_of_pauses_alone_is_silence_and_frees_its_place() -> None:
    pipeline = Pipeline(CountingLM())
    pipeline.texts = fakes.FakeTextPreparer([Pause(1.0)])
    np.testing.assert_array_equal(np.concatenate(pipeline.run()), np.zeros(SAMPLE_RATE))
    assert pipeline.llm.prompts == []


@pytest.mark.parametrize("failing", ["llm", "token2wav", "segments"])
def test_an_error_in_a_later_segment_ends_the_stream_with_that_error(failing: str) -> None:
    def failing_parts() -> Iterator[str]:
        yield from ("0-20", "20-40")
        raise ValueError("segments")

    class Failing(CountingLM):
        def script(self, prompt: LLMPrompt) -> Sequence[fakes.Step]:
            return [[1], UnavailableError("llm")] if prompt.target_text == "40-60" else super().script(prompt)

    class FailingToken2Wav(fakes.FakeToken2Wav):
        def open(self, speed: float = 1.0) -> Any:
            self.failures = {0: RuntimeError("token2wav")} if len(self.streams) == 2 else {}
            return super().open()

    pipeline = Pipeline(
        Failing() if failing == "llm" else CountingLM(),
        token2wav=FailingToken2Wav() if failing == "token2wav" else fakes.FakeToken2Wav(),
    )
    pipeline.texts = fakes.FakeTextPreparer(failing_parts() if failing == "segments" else None)
    with pytest.raises((ValueError, UnavailableError, RuntimeError), match=failing):
        pipeline.run(pipeline.synthesize(fakes.speech_request(text="0-20|20-40|40-60")))


@pytest.mark.parametrize("stage", ["the segment being rendered", "the segment ahead"])
async def test_cancelling_frees_every_segment(stage: str) -> None:
    never = asyncio.Event()
    ahead = stage == "the segment ahead"
    pipeline = Pipeline(
        CountingLM(slow=never) if ahead else CountingLM(), token2wav=fakes.FakeToken2Wav(gate=never if ahead else None)
    )
    async with pipeline:
        if ahead:
            synthesis = asyncio.create_task(pipeline.synthesize(fakes.speech_request(text="0-20|slow|60-80")))
            await run_until(lambda: len(pipeline.llm.prompts) == 2 and pipeline.token2wav.live == 1)
            synthesis.cancel()
            with pytest.raises(asyncio.CancelledError):
                await synthesis
        else:  # the consumer holds a waveform of the second segment, the third one waits
            request = fakes.speech_request(text="0-20|20-60|60-80|80-99")
            async with aclosing(pipeline.synthesizer.stream(request)) as audio:
                for _ in range(3):
                    await anext(audio)
    assert [stream.aborts for stream in pipeline.token2wav.streams] == ([1] if ahead else [0, 1])


class ContinuedLM(fakes.FakeLM):
    """Continues 0, 1, 2, ... up to `total`. Requests that would need more than `context` tokens are rejected."""

    def __init__(self, total: int, context: int = 10_000):
        super().__init__()
        self.total = total
        self.context = context

    def script(self, prompt: LLMPrompt) -> Sequence[fakes.Step]:
        done, most = len(prompt.generated), self.samplings[-1].max_tokens
        assert list(prompt.generated) == list(range(done))
        if done + most > self.context:
            return [ValueError("the prompt is too long")]
        end = min(self.total, done + most)
        self.finish_reason = "stop" if end == self.total else "length"
        return [[token] for token in range(done, end)]


def speak(pipeline: Pipeline, request: SynthesisRequest) -> tuple[list[int], list[str]]:
    """The tokens that were spoken, and the warnings."""
    warnings: list[str] = []
    audio = pipeline.run(pipeline.synthesize(request, warnings.append))
    return np.concatenate(audio).astype(int).tolist(), warnings


def with_sampling(text: str = "hello", reference_text: str = "reference", **sampling: int) -> SynthesisRequest:
    return dataclasses.replace(fakes.speech_request(0, text, reference_text), sampling=Sampling(**sampling))


@pytest.mark.parametrize("reference_text", ["reference", ""])  # "": cross-lingual, the LLM gets no prompt tokens
@pytest.mark.parametrize("max_tokens", [7, 40, 80])
def test_an_answer_that_ends_by_its_length_is_continued_in_the_same_stream(max_tokens, reference_text) -> None:
    pipeline = Pipeline(ContinuedLM(80))
    request = with_sampling("hello, how are you today?", reference_text, max_tokens=max_tokens)
    assert speak(pipeline, request) == (list(range(80)), [])
    assert len(pipeline.token2wav.streams) == 1
    first, *later = pipeline.llm.prompts
    for index, prompt in enumerate(later, start=1):
        assert prompt == dataclasses.replace(first, generated=tuple(range(index * max_tokens)))


def test_a_loop_ends_at_twice_the_expected_duration_and_two_seconds(caplog: pytest.LogCaptureFixture) -> None:
    text = "字" * 90  # 18 s: longer segments do not occur
    with caplog.at_level(logging.WARNING):
        tokens, (warning,) = speak(Pipeline(ContinuedLM(5000)), with_sampling(text))
    assert len(tokens) == 25 * (2 * 18 + 2)
    assert warning == f"speech was cut short after 950 tokens, the most for a text of its length: {text[:80]!r}"
    assert warning in caplog.text


def test_an_answer_that_the_ratio_of_lengths_ends_is_not_continued() -> None:
    pipeline = Pipeline(fakes.FakeLM(*one_by_one(20), finish_reason="length"))  # fewer tokens than asked for
    tokens, (warning,) = speak(pipeline, fakes.speech_request())
    assert len(tokens) == 20 and len(pipeline.llm.prompts) == 1
    assert warning.startswith("speech was cut short after 20 tokens") and warning.endswith("'hello'")


def test_an_answer_that_the_llm_cannot_continue_is_spoken_with_a_warning() -> None:
    tokens, (warning,) = speak(Pipeline(ContinuedLM(80, context=50)), with_sampling(max_tokens=20))
    assert tokens == list(range(40))
    assert "cut short after 40 tokens, because the LLM cannot continue it (the prompt is too long)" in warning


def test_a_rejected_first_request_and_an_llm_that_fails_while_it_continues_are_errors() -> None:
    class Failing(ContinuedLM):
        def script(self, prompt: LLMPrompt) -> Sequence[fakes.Step]:
            return [UnavailableError("the LLM is down")] if prompt.generated else super().script(prompt)

    with pytest.raises(ValueError, match="too long"):
        speak(Pipeline(ContinuedLM(80, context=50)), with_sampling())
    with pytest.raises(UnavailableError, match="the LLM is down"):
        speak(Pipeline(Failing(80)), with_sampling(max_tokens=20))


def test_each_part_of_an_answer_has_its_own_seed_and_its_share_of_the_limits() -> None:
    pipeline = Pipeline(ContinuedLM(50))
    speak(pipeline, with_sampling(max_tokens=20, min_tokens=15, seed=MAX_SEED - 10))
    parts = [(part.seed, part.min_tokens, part.max_tokens) for part in pipeline.llm.samplings]
    assert parts == [(MAX_SEED - 10, 15, 20), (9, 0, 20), (29, 0, 20)]
    pipeline = Pipeline(ContinuedLM(50))
    speak(pipeline, with_sampling(max_tokens=20))
    assert [part.seed for part in pipeline.llm.samplings] == [None] * 3


@pytest.mark.parametrize(("max_tokens", "spoken"), [(1, [1]), (30, [20, 10]), (20, [20])])
def test_max_tokens_of_a_request_limits_the_whole_answer(max_tokens: int, spoken: list[int]) -> None:
    pipeline = Pipeline(ContinuedLM(20))
    request = with_sampling("one|two", max_tokens=max_tokens)
    tokens, warnings = speak(pipeline, dataclasses.replace(request, max_tokens=max_tokens))
    assert tokens == [token for count in spoken for token in range(count)]
    left_out = [f"max_tokens {max_tokens} was reached before 'two'"] if len(spoken) == 1 else []
    cut = [f"{spoken[-1]} tokens, what max_tokens of the request allows: "] if spoken[-1] < 20 else []
    assert len(warnings) == len(left_out + cut)
    assert all(words in warning for words, warning in zip(cut + left_out, warnings, strict=True))
