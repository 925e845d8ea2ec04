"""Texts in pieces in the orchestrator: the sequence's bounds and errors, and the pipeline that speaks it."""

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.orchestrator.request import SynthesisRequest
from cosyvoice_triton.orchestrator.text_stream import Limit, PieceStream, PieceStreams

from tests.support.fakes import FakeLM, speech_request
from tests.support.pipeline import Pipeline, run_until

LIMIT = Limit("target_text", 10, "characters")


def text(idle_seconds: float = 60, pieces: str = "", end: bool = False) -> PieceStream:
    """A text of up to 100 characters, of which these have come."""
    stream = PieceStream(Limit("target_text", 100, "characters"), idle_seconds)
    if pieces:
        stream.add(pieces, end=end)
    return stream


def request_of(pieces: PieceStream, **fields: Any) -> SynthesisRequest:
    return dataclasses.replace(speech_request(reference_text="ten, chars"), pieces=pieces, **fields)


async def read(stream: PieceStream) -> list[Any]:
    return [piece async for piece in stream]


async def test_pieces_arrive_in_their_order_up_to_the_end() -> None:
    streams = PieceStreams(idle_seconds=60)
    with streams.open(7, LIMIT) as stream, streams.open("other", LIMIT) as other:
        reader = asyncio.create_task(read(stream))
        for piece, end in (("a", False), ("", False), ("bc", True)):
            streams.add(7, piece, end)
        other.add("x", end=True)
        assert await read(other) == ["x"]
        assert await reader == ["a", "bc"]


async def test_misuse_is_an_error_with_its_value_and_ends_with_the_request() -> None:
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


async def test_the_first_audio_comes_before_the_text_has_ended() -> None:
    """The fake's voice has 30 tokens, which are two blocks with the transcript's first ten letters."""
    llm = FakeLM(list(range(15)))
    pipeline = Pipeline(llm)
    async with pipeline:
        speech = text()
        listener = asyncio.create_task(pipeline.synthesize(request_of(speech, target_text="")))
        speech.add("abcd ", end=False)  # after the voice, the first block needs no text
        await run_until(lambda: len(llm.prompts) == 1)
        speech.add("efgh ", end=False)
        await run_until(lambda: len(pipeline.token2wav.streams) == 1 and len(pipeline.hops) == 1)
        assert len(llm.prompts) == 2 and not listener.done()
        speech.add("i", end=True)
        audio = np.concatenate(await listener)
    assert [sampling.max_tokens for sampling in llm.samplings] == [15, 15, 15, 750]
    assert [sampling.min_tokens for sampling in llm.samplings] == [15, 15, 15, 0]  # a block has no end
    assert [sampling.seed for sampling in llm.samplings] == [1, 16, 31, 46]
    assert audio.tolist() == list(range(15)) * 4


@pytest.mark.parametrize("limit", [7, 20, 50])
def test_max_tokens_limits_the_speech_of_a_text_in_pieces(limit: int) -> None:
    llm = FakeLM(finish_reason="length")
    llm.script = lambda prompt: [list(range(llm.samplings[-1].max_tokens))]  # type: ignore[method-assign]
    pipeline, warnings = Pipeline(llm), list[str]()
    request = request_of(text(pieces="abcd efgh i", end=True), max_tokens=limit)
    assert np.concatenate(pipeline.run(pipeline.synthesize(request, warnings.append))).size == limit
    assert [f"after {limit} tokens" in warning for warning in warnings] == [True]


def test_a_text_that_stops_ends_everything_with_an_error() -> None:
    pipeline = Pipeline(FakeLM(list(range(15))))
    request = request_of(text(idle_seconds=0.05, pieces="A beginning, then nothing."))
    with pytest.raises(ValueError, match="has not ended"):
        pipeline.run(pipeline.synthesize(request))
