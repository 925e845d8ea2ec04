"""Errors that a client of the real tritonserver gets when the LLM or the process of a model fails."""

import asyncio
import os
import signal
from typing import Any

import grpc
import numpy as np
import pytest
from cosyvoice_triton.client import grpc_client
from cosyvoice_triton.client.requests import ClientError, Utterance
from cosyvoice_triton.server.tritonserver import ServerError
from tritonclient.utils import InferenceServerException

from tests.support import failing_llm
from tests.support.server_requests import MODELS, TEXT, VOICE_TEXT, Serve, assert_speech, process_of, stream

pytestmark = [pytest.mark.server, pytest.mark.serial]

# An error comes after a timeout of 3 s, on a slow machine somewhat later. The client gives up then, with another error.
SOON_SECONDS = 30.0


@pytest.fixture(scope="module")
def llm_and_server(serve: Serve) -> Any:
    settings = {"model_timeout": "3"}
    with failing_llm.failing_llm() as llm:
        yield llm, serve(stack="dit", llm_transport="openai", llm_urls=(llm.url,), settings=settings)


@pytest.mark.parametrize("mode", ["error 500", "goes silent", "is down"])
def test_a_failing_llm_server_is_an_error_soon(mode: Any, llm_and_server: Any, voice: np.ndarray) -> None:
    """tests/llm/test_openai_client.py has the other ways to fail."""
    llm, server = llm_and_server
    utterance = Utterance(TEXT, voice, VOICE_TEXT)
    if mode == "is down":
        llm.stop()
    else:
        llm.mode = mode
    with pytest.raises(ClientError, match="cannot be reached" if mode == "is down" else "LLM"):
        stream(server.grpc_url, MODELS["dit"], utterance, SOON_SECONDS)
    if mode == "is down":
        llm.start()
    llm.mode = "good"
    assert_speech(stream(server.grpc_url, MODELS["dit"], utterance))


def test_the_death_of_a_models_process_ends_live_streams_and_is_reported(
    llm_and_server: Any, voice: np.ndarray
) -> None:
    """The last test of this server."""
    server = llm_and_server[1]

    async def kill_after_the_first_chunk() -> None:
        utterance = Utterance("word " * 400, voice, VOICE_TEXT)
        async with grpc_client.triton.InferenceServerClient(server.grpc_url) as connection:
            chunks = grpc_client.chunks(connection, MODELS["dit"], utterance, 120.0)
            await anext(chunks)
            os.kill(process_of(server, "token2wav_dit"), signal.SIGKILL)

            async def rest() -> None:
                async for _ in chunks:
                    pass

            await asyncio.wait_for(rest(), SOON_SECONDS)

    with pytest.raises((InferenceServerException, grpc.aio.AioRpcError)):
        asyncio.run(kill_after_the_first_chunk())
    # tritonserver aborts if the process died while holding the lock they share
    with pytest.raises(ServerError, match="the process of model token2wav_dit has died|ended unexpectedly with code"):
        server.wait()


def test_an_llm_model_whose_process_has_died_is_an_error_soon(serve: Serve, voice: np.ndarray) -> None:
    server = serve(stack="dit", settings={"model_timeout": "3"})
    os.kill(process_of(server, "tensorrt_llm"), signal.SIGKILL)
    for _ in range(2):  # the first request finds it dead, the second one starts after that
        with pytest.raises(ClientError, match="tensorrt_llm|LLM"):
            stream(server.grpc_url, MODELS["dit"], Utterance(TEXT, voice, VOICE_TEXT), SOON_SECONDS)
