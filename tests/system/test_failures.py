"""Errors that a client of the real tritonserver gets when the LLM or the process of a model fails."""

import os
import signal
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton.client.failures import ClientError
from cosyvoice_triton.client.utterance import Utterance

from tests.support import failing_llm
from tests.support.server_requests import MODELS, TEXT, VOICE_TEXT, Serve, assert_speech, process_of, stream

pytestmark = pytest.mark.server

# An error comes after a timeout of 3 s, on a slow machine somewhat later. The client gives up then, with another error.
SOON_SECONDS = 30.0


@pytest.fixture(scope="module")
def llm_and_server(serve: Serve) -> Any:
    settings = {"model_timeout": "3"}
    with failing_llm.failing_llm() as llm:
        yield llm, serve(stack="dit", llm_transport="openai", llm_urls=(llm.url,), settings=settings)


def test_an_llm_server_that_goes_silent_is_an_error_soon_and_the_next_request_is_served(
    llm_and_server: Any, voice: np.ndarray
) -> None:
    """tests/llm/test_openai_client.py has the other ways to fail."""
    llm, server = llm_and_server
    utterance = Utterance(TEXT, voice, VOICE_TEXT)
    llm.mode = "goes silent"
    with pytest.raises(ClientError, match="LLM"):
        stream(server.grpc_url, MODELS["dit"], utterance, SOON_SECONDS)
    llm.mode = "good"
    assert_speech(stream(server.grpc_url, MODELS["dit"], utterance))


def test_an_llm_model_whose_process_has_died_is_an_error_soon(serve: Serve, voice: np.ndarray) -> None:
    server = serve(stack="dit", settings={"model_timeout": "3"})
    os.kill(process_of(server, "tensorrt_llm"), signal.SIGKILL)
    for _ in range(2):  # the first request finds it dead, the second one starts after that
        with pytest.raises(ClientError, match="tensorrt_llm|LLM"):
            stream(server.grpc_url, MODELS["dit"], Utterance(TEXT, voice, VOICE_TEXT), SOON_SECONDS)
