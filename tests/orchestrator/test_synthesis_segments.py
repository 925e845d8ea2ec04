"""Texts of several segments: rendered in order, in one voice, with the LLM at most one segment ahead."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.constants import SAMPLE_RATE
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import URGENT_TOKENS, LLMPrompt
from cosyvoice_triton.text.markup import Pause

from tests.support.fakes import (
    PROMPT_TOKENS,
    FakeLM,
    FakeTextPreparer,
    FakeToken2Wav,
    Step,
    fake_prompt,
    speech_request,
)
from tests.support.pipeline import Pipeline, Speak, run_until, settle


class CountingLM(FakeLM):
    """Generates the range that the text names, such as "100-130". `events`: text -> event to wait for midway."""

    def __init__(self, **events: asyncio.Event):
        super().__init__()
        self.events = events

    def script(self, prompt: LLMPrompt) -> Sequence[Step]:
        if prompt.target_text not in self.events:
            return [[token] for token in range(*map(int, prompt.target_text.split("-")))]
        return [[1], self.events[prompt.target_text], [2]]


@pytest.mark.parametrize(
    ("speak", "played"), [(Pipeline.synthesize, True), (Pipeline.synthesize, False), (Pipeline.offline, True)]
)
def test_segments_are_rendered_in_order_in_one_voice_with_the_same_sampling(speak: Speak, played: bool) -> None:
    pipeline = Pipeline(CountingLM())
    request = replace(speech_request(voice=3, text="0-40|100-101|200-260"), played=played)
    audio = np.concatenate(pipeline.run(speak(pipeline, request)))
    np.testing.assert_array_equal(audio, 30_000 + np.concatenate([np.arange(40), [100], np.arange(200, 260)]))
    voice = ("reference", [3] * PROMPT_TOKENS)
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
    voice = fake_prompt(7, "its text")
    pipeline.voices["anna"] = replace(voice, tokens=voice.tokens[:0], mel=voice.mel[:0])
    (audio,) = pipeline.run(pipeline.synthesize(replace(speech_request(text="0-10"), voice="anna")))
    assert len(audio) == 10 and pipeline.llm.prompts == [LLMPrompt("0-10", "its text", [])]


def test_a_later_segment_starts_with_the_audio_that_its_listener_has_left_and_with_a_longer_hop() -> None:
    """The fake makes one sample per token, and its clock stands still: nothing has been played."""
    pipeline = Pipeline(CountingLM(), clock=lambda: 7.0)
    pipeline.run(pipeline.synthesize(speech_request(text="0-70|100-180|200-300")))
    first, second, third = pipeline.token2wav.streams
    assert first.audio_left is None
    assert second.audio_left == pytest.approx(70 / SAMPLE_RATE)
    assert third.audio_left == pytest.approx(150 / SAMPLE_RATE)
    assert [[hop.length for hop in stream.hops][0] for stream in (first, second, third)] == [15, 60, 100]


def test_the_llm_is_one_segment_ahead_of_token2wav_and_no_further() -> None:
    gate = asyncio.Event()
    pipeline = Pipeline(CountingLM(), token2wav=FakeToken2Wav(gate=gate))

    async def scenario() -> list[np.ndarray]:
        synthesis = asyncio.create_task(pipeline.synthesize(speech_request(text="0-20|20-40|40-60|60-80")))
        await run_until(lambda: len(pipeline.llm.prompts) == 2 and pipeline.llm.open == 0)
        await settle()
        assert [prompt.target_text for prompt in pipeline.llm.prompts] == ["0-20", "20-40"]
        gate.set()
        return await synthesis

    np.testing.assert_array_equal(np.concatenate(pipeline.run(scenario())), np.arange(80))


def test_the_first_segment_is_rendered_before_the_whole_text_is_segmented() -> None:
    released = threading.Event()

    def parts() -> Iterator[str]:
        yield "0-40"
        assert released.wait(10)
        yield "40-60"

    pipeline = Pipeline(CountingLM())
    pipeline.texts = FakeTextPreparer(parts())

    async def scenario() -> list[np.ndarray]:
        async with aclosing(pipeline.synthesizer.stream(speech_request())) as waveforms:
            first = [await anext(waveforms), await anext(waveforms)]
            released.set()
            return first + [waveform async for waveform in waveforms]

    np.testing.assert_array_equal(np.concatenate(pipeline.run(scenario())), np.arange(60))


PAUSES = (Pause(0.1), "0-20", Pause(0.5), Pause(0.5), "20-40", Pause(0.02))


@pytest.mark.parametrize("offline", [False, True])
def test_segments_and_pauses_are_reported_with_their_samples_before_their_last_waveform(offline: bool) -> None:
    """Pauses are silence between segments and hold up no work."""
    pipeline = Pipeline(CountingLM())
    pipeline.texts = FakeTextPreparer(PAUSES)
    reported: list[tuple[str, int]] = []
    received = 0

    def ended(text: str, samples: int, tokens: Sequence[int]) -> None:
        reported.append((text, samples))
        assert received < sum(size for _, size in reported)

    async def scenario() -> list[np.ndarray]:
        nonlocal received
        if offline:
            return [await pipeline.synthesizer.offline(speech_request(), on_segment=ended)]
        waveforms = []
        async for waveform in pipeline.synthesizer.stream(speech_request(), on_segment=ended):
            received += waveform.size
            waveforms.append(waveform)
        return waveforms

    audio = np.concatenate(pipeline.run(scenario()))
    parts = [np.zeros(2400), np.arange(20), np.zeros(24_000), np.arange(20, 40), np.zeros(480)]
    np.testing.assert_array_equal(audio, np.concatenate(parts))
    assert reported == [("", 2400), ("0-20", 20), ("", 24_000), ("20-40", 20), ("", 480)]
    assert audio.size == sum(samples for _, samples in reported)
    if not offline:  # the listener still has the silence when the second segment starts
        assert pipeline.token2wav.streams[1].audio_left > 1.0


def test_a_text_of_pauses_alone_is_silence_and_frees_its_place() -> None:
    pipeline = Pipeline(CountingLM())
    pipeline.texts = FakeTextPreparer([Pause(1.0)])
    np.testing.assert_array_equal(np.concatenate(pipeline.run()), np.zeros(SAMPLE_RATE))
    assert pipeline.llm.prompts == []


@pytest.mark.parametrize("failing", ["llm", "token2wav", "segments"])
def test_an_error_in_a_later_segment_ends_the_stream_with_that_error(failing: str) -> None:
    def failing_parts() -> Iterator[str]:
        yield from ("0-20", "20-40")
        raise ValueError("segments")

    class Failing(CountingLM):
        def script(self, prompt: LLMPrompt) -> Sequence[Step]:
            return [[1], UnavailableError("llm")] if prompt.target_text == "40-60" else super().script(prompt)

    class FailingToken2Wav(FakeToken2Wav):
        def open(self, speed: float = 1.0) -> Any:
            self.failures = {0: RuntimeError("token2wav")} if len(self.streams) == 2 else {}
            return super().open()

    pipeline = Pipeline(
        Failing() if failing == "llm" else CountingLM(),
        token2wav=FailingToken2Wav() if failing == "token2wav" else FakeToken2Wav(),
    )
    pipeline.texts = FakeTextPreparer(failing_parts() if failing == "segments" else None)
    with pytest.raises((ValueError, UnavailableError, RuntimeError), match=failing):
        pipeline.run(pipeline.synthesize(speech_request(text="0-20|20-40|40-60")))


@pytest.mark.parametrize("stage", ["the segment being rendered", "the segment ahead"])
def test_cancelling_frees_every_segment(stage: str) -> None:
    never = asyncio.Event()
    ahead = stage == "the segment ahead"
    pipeline = Pipeline(
        CountingLM(slow=never) if ahead else CountingLM(), token2wav=FakeToken2Wav(gate=never if ahead else None)
    )

    async def scenario() -> list[np.ndarray]:
        if not ahead:  # the consumer holds a waveform of the second segment, the third one waits
            async with aclosing(pipeline.synthesizer.stream(speech_request(text="0-20|20-60|60-80|80-99"))) as audio:
                return [await anext(audio) for _ in range(3)]
        synthesis = asyncio.create_task(pipeline.synthesize(speech_request(text="0-20|slow|60-80")))
        await run_until(lambda: len(pipeline.llm.prompts) == 2 and pipeline.token2wav.live == 1)
        synthesis.cancel()
        return await synthesis

    if ahead:
        with pytest.raises(asyncio.CancelledError):
            pipeline.run(scenario())
    else:
        assert len(pipeline.run(scenario())) == 3
    assert [stream.aborts for stream in pipeline.token2wav.streams] == ([1] if ahead else [0, 1])
