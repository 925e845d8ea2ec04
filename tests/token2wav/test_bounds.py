"""What a request to a token2wav model may hold: nobody's prompt or utterance holds up all others."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.constants import MAX_PROMPT_TOKENS, MAX_STREAM_TOKENS, MEL_BINS, SPEAKER_DIM, TOKEN_MEL_RATIO
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.serving.requests import MAX_AUDIO_LEFT, Token2WavRequest, read_request
from cosyvoice_triton.token2wav.serving.service import Token2WavService
from cosyvoice_triton.voice.prompt import Prompt

from tests.support.fake_engine import FakeEngine
from tests.support.streams import ids, prompt


def read(tokens: int = 10, prompt: int = 10, **more: np.ndarray) -> Token2WavRequest:
    tensors = {
        "target_speech_tokens": np.zeros((1, tokens), np.int32),
        "prompt_speech_tokens": np.zeros((1, prompt), np.int32),
        "prompt_speech_feat": np.zeros((1, prompt * TOKEN_MEL_RATIO, MEL_BINS), np.float16),
        "prompt_spk_embedding": np.zeros((1, SPEAKER_DIM), np.float16),
    }
    return read_request(tensors | more, 0, correlation_id=1, start=True, end=False, request_id="")


def test_a_prompt_is_at_most_as_long_as_the_longest_recording() -> None:
    voice = read(prompt=MAX_PROMPT_TOKENS).prompt
    assert voice is not None and len(voice.tokens) == MAX_PROMPT_TOKENS
    with pytest.raises(ValueError, match=r"753 prompt_speech_tokens .* at most 752 .*, 30 s: send a shorter recording"):
        read(prompt=MAX_PROMPT_TOKENS + 1)
    with pytest.raises(ValueError, match="40000 prompt_speech_tokens"):
        read(prompt=40_000)


def test_an_utterance_is_at_most_as_long_as_the_longest_stream() -> None:
    assert len(read(tokens=MAX_STREAM_TOKENS).tokens) == MAX_STREAM_TOKENS
    with pytest.raises(ValueError, match="3001 tokens; at most 3000 are rendered, 120 s of speech: send a longer text"):
        read(tokens=MAX_STREAM_TOKENS + 1)


@pytest.mark.parametrize("seconds", [np.inf, -np.inf, np.nan, -0.5, MAX_AUDIO_LEFT + 1, 3e38])
def test_audio_left_that_no_listener_can_have_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"audio_left \S+ is not in 0..3600, the seconds of audio"):
        read(audio_left=np.array([[seconds]], np.float32))


@pytest.mark.parametrize("seconds", [0.0, 0.25, MAX_AUDIO_LEFT])
def test_audio_left_of_a_listener_is_read(seconds: float) -> None:
    assert read(audio_left=np.array([[seconds]], np.float32)).audio_left == seconds


def test_a_whole_utterance_ends_between_two_steps_once_its_client_has_gone() -> None:
    """And the next request is served."""
    engine, begun, gone = FakeEngine(), threading.Event(), threading.Event()
    steps = 0

    def whole(prompt: Prompt, tokens: np.ndarray, speed: float, before_step: Callable[[], object]) -> np.ndarray:
        nonlocal steps
        for _ in range(tokens[0]):
            before_step()
            steps += 1
            begun.set()
            time.sleep(0.01)
        return np.ones(3, np.float32)

    engine.whole = whole  # type: ignore[method-assign]
    service = Token2WavService(engine, idle_seconds=60)  # type: ignore[arg-type]
    try:
        replies = [Future[Any](), Future[Any]()]
        voice = read().prompt
        for reply, count in zip(replies, (10**6, 2), strict=True):
            request = Token2WavRequest(f"utterance {count}", True, True, np.array([count]), voice)
            service.submit(request, reply.set_result, gone.is_set if count > 2 else lambda: False)
        assert begun.wait(10)
        gone.set()
        assert isinstance(replies[0].result(10), asyncio.CancelledError)
        assert replies[1].result(10).tolist() == [1, 1, 1] and steps < 10**4
    finally:
        service.close()


def test_the_solve_of_a_whole_utterance_asks_before_each_step(dit: Token2Wav) -> None:
    asked = 0

    def before_step() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        dit.whole(prompt(7), ids(7, 21), 1.0, before_step)
    assert asked == 3 and np.isfinite(dit.whole(prompt(7), ids(7, 21))).all()
