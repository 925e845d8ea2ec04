"""The stack cosyvoice3 in the real tritonserver, over small random weights in the official layout.

tests/token2wav/test_cosyvoice3.py compares its chunks with whole utterances.
"""

import asyncio
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton import stacks
from cosyvoice_triton.client import grpc_client
from cosyvoice_triton.client.answer import SpeechResult
from cosyvoice_triton.client.utterance import Utterance

from tests.support.server_requests import TEXT, VOICE_TEXT, Serve, assert_speech, stream

pytestmark = pytest.mark.server

STACK = stacks.COSYVOICE3
MODEL = STACK.orchestrator
STREAMS = 2


@pytest.fixture(scope="module")
def server(serve: Serve) -> Any:
    """The engine cuda reads the LLM's directory as it is, also on the CPU. There are fewer slots than streams."""
    settings = {"max_streams": str(STREAMS), "n_timesteps": "4"}
    return serve(stack=STACK.name, llm_engine="cuda", settings=settings)


def test_two_streams_at_once_equal_the_same_streams_alone(server: Any, voice: np.ndarray) -> None:
    utterances = [
        Utterance("You are a helpful assistant.<|endofprompt|>" + TEXT, voice, VOICE_TEXT, {"seed": 1}),
        Utterance("报道[j][ǐ]予好评。[breath]", voice[8_000:], parameters={"seed": 2}, instruct_text="Speak sadly."),
    ]
    alone = [stream(server.grpc_url, MODEL, utterance) for utterance in utterances]

    async def at_once() -> list[SpeechResult]:
        return await asyncio.gather(
            *(grpc_client.synthesize(server.grpc_url, MODEL, utterance, timeout=120.0) for utterance in utterances)
        )

    for one, other in zip(alone, asyncio.run(at_once()), strict=True):
        assert_speech(one)
        assert len(one.arrivals) > 1 and one.first_chunk < one.total
        np.testing.assert_allclose(one.waveform, other.waveform, atol=1e-3)
