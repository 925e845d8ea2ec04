"""The stack cosyvoice3 in the real tritonserver, over small random weights in the official layout."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from cosyvoice_triton import stacks
from cosyvoice_triton.cli import client_grpc
from cosyvoice_triton.client import grpc_client
from cosyvoice_triton.client.requests import SpeechResult, Utterance, read_reference
from cosyvoice_triton.constants import (
    HOP_SAMPLES,
    LOOKAHEAD_TOKENS,
    SAMPLE_RATE,
    STREAM_CACHE_FRAMES,
    TOKEN_MEL_RATIO,
)
from cosyvoice_triton.llm.speech_tokens import read_first_speech_id
from cosyvoice_triton.voice.encoders import ReferenceEncoder
from cosyvoice_triton.voice.prompt import Prompt

from tests.support.server_requests import (
    TEXT,
    VOICE,
    VOICE_TEXT,
    Serve,
    assert_speech,
    cancelled_requests,
    inputs_of,
    stream,
)
from tests.support.speech_fixtures import until

pytestmark = pytest.mark.server

STACK = stacks.COSYVOICE3
MODEL = STACK.orchestrator
STREAMS = 2


@pytest.fixture(scope="module")
def server(serve: Serve) -> Any:
    """The engine cuda reads the LLM's directory as it is, also on the CPU. Idle streams keep their slots."""
    settings = {"max_streams": str(STREAMS), "idle_seconds": "600", "n_timesteps": "4"}
    return serve(stack=STACK.name, llm_engine="cuda", settings=settings)


@pytest.fixture(scope="module")
def voice() -> np.ndarray:
    return read_reference(VOICE)


def test_upstreams_client_command_writes_the_speech(server: Any, tmp_path: Path) -> None:
    host, port = server.grpc_url.split(":")
    output = tmp_path / "speech.wav"
    arguments = ["--server-addr", host, "--server-port", port, "--model-name", MODEL, "--target-text", TEXT]
    arguments += ["--reference-audio", str(VOICE), "--reference-text", VOICE_TEXT, "--output-audio", str(output)]
    assert client_grpc.main(arguments) == 0
    assert output.stat().st_size > SAMPLE_RATE


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


def test_cancelled_streams_free_their_slots(server: Any, voice: np.ndarray) -> None:
    """There are two, so a stream that kept its slot would have the next ones refused."""
    long = Utterance("word " * 100, voice, VOICE_TEXT)

    async def cancel() -> None:
        async with grpc_client.triton.InferenceServerClient(server.grpc_url) as connection:
            async with aclosing(grpc_client.chunks(connection, MODEL, long, 60.0)) as waveforms:
                assert (await anext(waveforms)).waveform.size

    async def cancel_all_at_once() -> None:
        await asyncio.gather(*(cancel() for _ in range(STREAMS)))

    for _ in range(2):
        cancelled = cancelled_requests(server)
        asyncio.run(cancel_all_at_once())
        until(lambda: cancelled_requests(server) == cancelled + STREAMS, 60)  # noqa: B023 awaited in the loop
    assert_speech(stream(server.grpc_url, MODEL, Utterance(TEXT, voice, VOICE_TEXT)))


# --- token2wav_cosyvoice3 alone ------------------------------------------------------------------------------------


class Token2Wav:
    """Sequences of the model token2wav_cosyvoice3 in one voice."""

    def __init__(self, address: str, first_speech_id: int, prompt: Prompt):
        self._client = triton.InferenceServerClient(address)
        self._first_speech_id = first_speech_id
        self._voice = {
            "prompt_speech_tokens": self._ids(prompt.tokens),
            "prompt_speech_feat": prompt.mel.astype(np.float16)[None],
            "prompt_spk_embedding": prompt.embedding.astype(np.float16)[None],
        }
        self.prompt_tokens = len(prompt.tokens)

    def _ids(self, tokens: np.ndarray) -> np.ndarray:
        return tokens.astype(np.int32)[None] + np.int32(self._first_speech_id)

    def spoken(self, tokens: np.ndarray, ends: list[int]) -> np.ndarray:
        """The audio (N,) of chunks that end at these tokens, the last one at all of them."""
        parts, begin = [], 0
        for end in [*ends, len(tokens)]:
            final = end == len(tokens)
            arrays = {
                "target_speech_tokens": self._ids(tokens[: end + (0 if final else LOOKAHEAD_TOKENS)]),
                "token_offset": np.array([[begin]], np.int32),
                "finalize": np.array([[final]]),
                **(self._voice if begin == 0 else {}),
            }
            result = self._client.infer(
                STACK.token2wav,
                inputs_of(arrays),
                sequence_id=1 + len(ends),
                sequence_start=begin == 0,
                sequence_end=final,
                client_timeout=120,
            )
            parts.append(result.as_numpy("waveform").reshape(-1))
            begin = end
        return np.concatenate(parts)

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="module")
def token2wav(server: Any, voice: np.ndarray, demo_models: Path) -> Iterator[Token2Wav]:
    prompt = ReferenceEncoder(STACK, demo_models / STACK.checkpoint)(voice)
    first_speech_id = read_first_speech_id(str(demo_models / STACK.llm.directory))
    token2wav = Token2Wav(server.grpc_url, first_speech_id, prompt)
    yield token2wav
    token2wav.close()


def test_streamed_audio_equals_the_whole(token2wav: Token2Wav) -> None:
    """Of chunks that end on boundaries, under the same mask: one final chunk, and three, of which the last one attends
    to all before it."""
    first = -token2wav.prompt_tokens % STACK.chunk_boundary
    assert first <= STACK.chunk_boundary - LOOKAHEAD_TOKENS  # so all but a chunk of the mask is in the prompt's cache
    assert TOKEN_MEL_RATIO * 2 * STACK.chunk_boundary <= STREAM_CACHE_FRAMES
    tokens = np.random.default_rng(0).integers(0, 6561, first + 65)
    whole = token2wav.spoken(tokens, [])
    streamed = token2wav.spoken(tokens, [first, first + 25])
    assert len(whole) == len(tokens) * TOKEN_MEL_RATIO * HOP_SAMPLES
    np.testing.assert_allclose(streamed, whole, atol=1e-4)


def test_a_long_stream_is_rendered_with_the_past_that_is_kept(token2wav: Token2Wav) -> None:
    """20 s, of which the flow attends to the last 2 s and the prompt in each chunk."""
    tokens = np.random.default_rng(1).integers(0, 6561, 500)
    first = -token2wav.prompt_tokens % STACK.chunk_boundary
    audio = token2wav.spoken(tokens, list(range(first + 100, len(tokens), 100)))
    assert len(audio) == len(tokens) * TOKEN_MEL_RATIO * HOP_SAMPLES
    assert np.isfinite(audio).all() and np.abs(audio[-SAMPLE_RATE:]).max() > 0.01
