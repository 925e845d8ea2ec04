"""Voice conversion in the orchestrator: the windows of a source, and the pipeline that speaks its tokens."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, TOKEN_RATE
from cosyvoice_triton.orchestrator.conversion import LIVE, LIVE_STEP, WINDOW_TOKENS, Source
from cosyvoice_triton.orchestrator.request import RequestRules
from cosyvoice_triton.voice.prompt import Recording

from tests.support.fakes import FakeLM, FakePromptEncoder, fake_prompt
from tests.support.pipeline import Pipeline

SIZE = PROMPT_SAMPLE_RATE // TOKEN_RATE  # samples of a token


def speech(tokens: int) -> np.ndarray:
    """Samples of which each token's first one has its number, in thousandths."""
    wav = np.zeros(tokens * SIZE, np.float32)
    wav[::SIZE] = np.arange(tokens) / 1000
    return wav


class Tokenizer:
    """Reads the numbers of `speech`; those near an end that is not the speech's own are wrong."""

    def __init__(self, tokens: int, unsure: int = 0) -> None:
        self.windows: list[tuple[int, int]] = []  # first token, number of tokens
        self.tokens, self.unsure = tokens, unsure

    async def __call__(self, recording: Recording) -> np.ndarray:
        assert recording.rate == PROMPT_SAMPLE_RATE and len(recording.wav) <= WINDOW_TOKENS * SIZE
        numbers = np.round(recording.wav[::SIZE] * 1000).astype(np.int64)
        self.windows.append((int(numbers[0]), len(numbers)))
        if self.unsure and numbers[-1] < self.tokens - 1:
            numbers[-self.unsure :] = 9999
        return numbers


async def converted(source: Source, tokenizer: Tokenizer) -> list[int]:
    return [token async for chunk in source.tokens(tokenizer) for token in chunk.tokens]


async def pieces(wav: np.ndarray, size: int) -> AsyncGenerator[np.ndarray, None]:
    for begin in range(0, len(wav), size):
        yield wav[begin : begin + size]


@pytest.mark.parametrize("tokens", [13, 749, WINDOW_TOKENS])
def test_a_recording_that_the_tokenizer_reads_at_once_is_encoded_as_a_whole(tokens: int) -> None:
    """As by upstream's `inference_vc`."""
    tokenizer = Tokenizer(tokens)
    assert asyncio.run(converted(Source.of(speech(tokens), PROMPT_SAMPLE_RATE), tokenizer)) == list(range(tokens))
    assert tokenizer.windows == [(0, tokens)]


@pytest.mark.parametrize("tokens", [WINDOW_TOKENS + 1, 1500, 3000])
def test_a_longer_one_is_encoded_in_windows_that_overlap(tokens: int) -> None:
    tokenizer = Tokenizer(tokens, unsure=40)
    assert asyncio.run(converted(Source.of(speech(tokens), PROMPT_SAMPLE_RATE), tokenizer)) == list(range(tokens))
    assert len(tokenizer.windows) == -(-tokens // 700)


@pytest.mark.parametrize("size", [160, 4_000, 40_000])
async def test_what_somebody_speaks_is_encoded_as_it_comes(size: int) -> None:
    tokens, most = 400, LIVE_STEP + LIVE.ahead + -(-size // SIZE)
    tokenizer = Tokenizer(tokens, unsure=LIVE.ahead)
    source = Source(pieces(speech(tokens), size), PROMPT_SAMPLE_RATE, live=True)
    found, first = list[int](), 0
    async for chunk in source.tokens(tokenizer):
        found += chunk.tokens
        first = first or sum(window[1] for window in tokenizer.windows)
    assert first <= most  # tokens that were known by then
    assert (found) == list(range(tokens))
    assert max(length for _, length in tokenizer.windows) <= LIVE.context + most


def test_what_cannot_be_converted_is_named() -> None:
    def ask(**inputs: Any) -> Any:
        return RequestRules().request(**{"target_text": "", "source_wav": speech(50), "speaker": "anna", **inputs})

    request = ask(source_sample_rate=24_000, parameters={"speed": "1.5", "played": False})
    assert (request.voice, request.speed, request.played, request.source.rate) == ("anna", 1.5, False, 24_000)
    for inputs, message in (
        ({"source_wav": speech(10)}, "source_wav of 6400 samples lasts 0.4 s at 16000 Hz: expected 0.5 to 120.0 s"),
        ({"source_wav": 0 * speech(50)}, "source_wav is silent"),
        ({"source_wav": speech(50) * np.nan}, "source_wav is nan at sample 0"),
        ({"source_sample_rate": 44_101}, "source_sample_rate 44101 is not a multiple of 25"),
        ({"target_text": "Hello."}, "target_text 'Hello.' with a source_wav, whose own words are spoken"),
        ({"instruct_text": "Softly."}, "instruct_text 'Softly.' with a source_wav"),
        ({"parameters": {"speed": 9}}, "speed 9"),
    ):
        with pytest.raises(ValueError, match=message):
            ask(**inputs)
    for seconds, message in ((0.2, "source_wav lasts 0.2 s: expected 0.5 s or more"), (121, "longer than 120 s")):
        wav = np.zeros(round(seconds * PROMPT_SAMPLE_RATE), np.float32)
        source = Source(pieces(wav, 8_000), PROMPT_SAMPLE_RATE, live=True)
        with pytest.raises(ValueError, match=message):
            asyncio.run(converted(source, Tokenizer(0)))


class SourceEncoder(FakePromptEncoder):
    async def tokens(self, recording: Recording) -> np.ndarray:
        return await Tokenizer(0)(recording)


@pytest.mark.parametrize("live", [False, True])
def test_the_source_s_tokens_are_spoken_in_the_voice_and_no_llm_is_asked(live: bool) -> None:
    pipeline = Pipeline(FakeLM([1]), SourceEncoder(), long_silence=range(100), silent_tokens=range(100))
    pipeline.voices["anna"] = fake_prompt(7, "Her words.")
    wav = speech(90)

    def request() -> Any:
        made = RequestRules().request("", source_wav=wav, speaker="anna", pieces=pieces(wav, 4_000) if live else None)
        return dataclasses.replace(made, timeline=True)

    chunks = pipeline.run(pipeline.synthesize(request()))
    np.testing.assert_array_equal(np.concatenate(chunks), 70_000 + np.arange(90))
    assert [hop.length for hop in pipeline.hops] == ([15] * 6 if live else [15, 30, 45])
    (whole,) = pipeline.run(pipeline.offline(request()))
    np.testing.assert_array_equal(whole, np.concatenate(chunks))
    assert not pipeline.llm.prompts
