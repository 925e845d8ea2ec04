"""Texts in pieces in the orchestrator: the sequence's bounds and errors, and the pipeline that speaks it."""

import asyncio
import dataclasses
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.orchestrator.text_stream import Limit, PieceStream, PieceStreams

from tests.support.fakes import FakeLM, speech_request
from tests.support.pipeline import Pipeline, run_until

LIMIT = Limit("target_text", 10, "characters")


async def read(stream: PieceStream) -> list[Any]:
    return [piece async for piece in stream]


def test_pieces_arrive_in_their_order_up_to_the_end() -> None:
    async def run() -> list[str]:
        streams = PieceStreams(idle_seconds=60)
        with streams.open(7, LIMIT) as stream, streams.open("other", LIMIT) as other:
            reader = asyncio.create_task(read(stream))
            for piece, end in (("a", False), ("", False), ("bc", True)):
                streams.add(7, piece, end)
            other.add("x", end=True)
            assert await read(other) == ["x"]
            return await reader

    assert asyncio.run(run()) == ["a", "bc"]


def test_misuse_is_an_error_with_its_value_and_ends_with_the_request() -> None:
    async def run() -> None:
        streams = PieceStreams(idle_seconds=0.05)
        with pytest.raises(ValueError, match="no request in pieces has the sequence id 7"):
            streams.add(7, "a", False)
        with streams.open(7, LIMIT) as stream:
            with pytest.raises(ValueError, match="sequence id 7 is in use"), streams.open(7, LIMIT):
                pass
            streams.add(7, "a" * 9, False)
            with pytest.raises(ValueError, match="11 characters in its pieces so far, more than the limit of 10"):
                streams.add(7, "bc", False)
            with pytest.raises(ValueError, match="began with target_text, and this piece of it has another input"):
                streams.add(7, np.zeros(5, np.float32), False)
            with pytest.raises(ValueError, match=r"no further piece of it for 0\.05 s"):
                await read(stream)
            streams.add(7, "", True)
            with pytest.raises(ValueError, match="has ended already"):
                streams.add(7, "b", False)
        with pytest.raises(ValueError, match="no request in pieces"):
            streams.add(7, "a", False)

    asyncio.run(run())


def test_the_first_audio_comes_before_the_text_has_ended() -> None:
    """The fake's voice has 30 tokens, which are two blocks with the transcript's first ten letters."""
    llm = FakeLM(list(range(15)))
    pipeline = Pipeline(llm)

    async def run() -> list[np.ndarray]:
        text = PieceStream(Limit("target_text", 100, "characters"), idle_seconds=60)
        request = dataclasses.replace(speech_request(reference_text="ten, chars"), target_text="", pieces=text)
        audio: list[np.ndarray] = []

        async def listen() -> None:
            audio.extend(await pipeline.synthesize(request))

        listener = asyncio.create_task(listen())
        text.add("abcd ", end=False)  # after the voice, the first block needs no text
        await run_until(lambda: len(llm.prompts) == 1)
        text.add("efgh ", end=False)
        await run_until(lambda: len(pipeline.token2wav.streams) == 1 and len(pipeline.hops) == 1)
        assert len(llm.prompts) == 2 and not listener.done()
        text.add("i", end=True)
        await listener
        return audio

    audio = np.concatenate(pipeline.run(run()))
    assert [sampling.max_tokens for sampling in llm.samplings] == [15, 15, 15, 750]
    assert [sampling.min_tokens for sampling in llm.samplings] == [15, 15, 15, 0]  # a block has no end
    assert [sampling.seed for sampling in llm.samplings] == [1, 16, 31, 46]
    assert audio.tolist() == list(range(15)) * 4


@pytest.mark.parametrize("limit", [7, 20, 50])
def test_max_tokens_limits_the_speech_of_a_text_in_pieces(limit: int) -> None:
    llm = FakeLM(finish_reason="length")
    llm.script = lambda prompt: [list(range(llm.samplings[-1].max_tokens))]  # type: ignore[method-assign]
    pipeline, warnings = Pipeline(llm), list[str]()

    async def run() -> list[np.ndarray]:
        text = PieceStream(Limit("target_text", 100, "characters"), idle_seconds=60)
        text.add("abcd efgh i", end=True)
        request = dataclasses.replace(speech_request(reference_text="ten, chars"), pieces=text, max_tokens=limit)
        async with aclosing(pipeline.synthesizer.stream(request, warnings.append)) as waveforms:
            return [waveform async for waveform in waveforms]

    assert np.concatenate(pipeline.run(run())).size == limit
    assert [f"after {limit} tokens" in warning for warning in warnings] == [True]


def test_a_text_that_stops_ends_everything_with_an_error() -> None:
    pipeline = Pipeline(FakeLM(list(range(15))))
    text = PieceStream(Limit("target_text", 100, "characters"), idle_seconds=0.05)
    text.add("A beginning, then nothing.", end=False)
    request = dataclasses.replace(speech_request(reference_text="ten, chars"), pieces=text)
    with pytest.raises(ValueError, match="has not ended"):
        pipeline.run(pipeline.synthesize(request))
