"""Errors that a client of the real tritonserver gets when the LLM or the process of a model fails."""

import asyncio
import os
import signal
import time
from typing import Any, get_args

import grpc
import numpy as np
import pytest
from cosyvoice_triton.client import grpc_client
from cosyvoice_triton.client.requests import ClientError, Utterance, read_reference
from cosyvoice_triton.server.tritonserver import ServerError
from tritonclient.utils import InferenceServerException

from tests.support import failing_llm
from tests.support.server_requests import MODELS, TEXT, VOICE, VOICE_TEXT, Serve, assert_speech, process_of, stream

pytestmark = [pytest.mark.server, pytest.mark.serial]

# An error comes after a timeout of 3 s, on a slow machine somewhat later; the client itself gives up after 60 s.
SOON_SECONDS = 30.0


@pytest.fixture(scope="module")
def voice() -> np.ndarray:
    return read_reference(VOICE)


@pytest.fixture(scope="module")
def llm_and_server(serve: Serve) -> Any:
    settings = {"model_timeout": "3"}
    with failing_llm.failing_llm() as llm:
        yield llm, serve(stack="dit", llm_transport="openai", llm_urls=(llm.url,), settings=settings)


@pytest.mark.parametrize("mode", [mode for mode in get_args(failing_llm.Mode) if mode != "good"])
def test_a_failing_llm_server_is_an_error_soon(mode: failing_llm.Mode, llm_and_server: Any, voice: np.ndarray) -> None:
    llm, server = llm_and_server
    utterance = Utterance(TEXT, voice, VOICE_TEXT)
    llm.mode = mode
    begun = time.monotonic()
    with pytest.raises(ClientError, match="LLM|speech token"):
        stream(server.grpc_url, MODELS["dit"], utterance)
    assert time.monotonic() - begun < SOON_SECONDS
    llm.mode = "good"
    assert_speech(stream(server.grpc_url, MODELS["dit"], utterance))


def test_an_llm_server_that_is_down_is_an_error_soon(llm_and_server: Any, voice: np.ndarray) -> None:
    llm, server = llm_and_server
    llm.stop()
    begun = time.monotonic()
    with pytest.raises(ClientError, match="cannot be reached"):
        stream(server.grpc_url, MODELS["dit"], Utterance(TEXT, voice, VOICE_TEXT))
    assert time.monotonic() - begun < SOON_SECONDS
    llm.start()
    assert_speech(stream(server.grpc_url, MODELS["dit"], Utterance(TEXT, voice, VOICE_TEXT)))


def test_the_death_of_a_models_process_ends_live_streams_and_is_reported(
    llm_and_server: Any, voice: np.ndarray
) -> None:
    """The last test of this server."""
    server = llm_and_server[1]
    begun = 0.0

    async def kill_after_the_first_chunk() -> None:
        nonlocal begun
        utterance = Utterance("word " * 400, voice, VOICE_TEXT)
        async with grpc_client.triton.InferenceServerClient(server.grpc_url) as connection:
            async for _ in grpc_client.chunks(connection, MODELS["dit"], utterance, 60.0):
                if not begun:
                    begun = time.monotonic()
                    os.kill(process_of(server, "token2wav_dit"), signal.SIGKILL)

    with pytest.raises((InferenceServerException, grpc.aio.AioRpcError)):
        asyncio.run(kill_after_the_first_chunk())
    assert time.monotonic() - begun < SOON_SECONDS
    # tritonserver aborts if the process died while holding the lock they share
    with pytest.raises(ServerError, match="the process of model token2wav_dit has died|ended unexpectedly with code"):
        server.wait()


def test_an_llm_model_whose_process_has_died_is_an_error_soon(serve: Serve, voice: np.ndarray) -> None:
    server = serve(stack="dit", settings={"model_timeout": "3"})
    os.kill(process_of(server, "tensorrt_llm"), signal.SIGKILL)
    for _ in range(2):  # the first request finds it dead, the second one starts after that
        begun = time.monotonic()
        with pytest.raises(ClientError, match="tensorrt_llm|LLM"):
            stream(server.grpc_url, MODELS["dit"], Utterance(TEXT, voice, VOICE_TEXT))
        assert time.monotonic() - begun < SOON_SECONDS
