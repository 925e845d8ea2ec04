"""What a client hears of an LLM that fails, through the real tritonserver."""

import os
import signal
import time
from typing import Any, get_args

import numpy as np
import pytest

from common.client.requests import ClientError, Utterance, read_reference
from common.server.tritonserver import free_port
from tests.support import failing_llm
from tests.support.server_requests import MODELS, TEXT, VOICE, VOICE_TEXT, Serve, assert_speech, process_of, stream

pytestmark = [pytest.mark.server, pytest.mark.serial]


@pytest.fixture(scope="module")
def voice() -> np.ndarray:
    return read_reference(VOICE)


@pytest.fixture(scope="module")
def llm_and_server(serve: Serve) -> Any:
    with failing_llm.failing_llm() as llm:
        yield llm, serve(stack="dit", llm_transport="openai", llm_urls=(llm.url,))


@pytest.mark.parametrize("mode", [mode for mode in get_args(failing_llm.Mode) if mode != "good"])
def test_a_failing_llm_server_is_an_error_within_five_seconds(
    mode: failing_llm.Mode, llm_and_server: Any, voice: np.ndarray
) -> None:
    llm, server = llm_and_server
    utterance = Utterance(TEXT, voice, VOICE_TEXT)
    llm.mode = mode
    begun = time.monotonic()
    with pytest.raises(ClientError, match="LLM|speech token"):
        stream(server.grpc_url, MODELS["dit"], utterance)
    assert time.monotonic() - begun < 5
    llm.mode = "good"
    assert_speech(stream(server.grpc_url, MODELS["dit"], utterance))


def test_an_llm_server_that_is_down_is_an_error_within_five_seconds(serve: Serve, voice: np.ndarray) -> None:
    server = serve(stack="dit", llm_transport="openai", llm_urls=(f"http://127.0.0.1:{free_port()}",))
    begun = time.monotonic()
    with pytest.raises(ClientError, match="cannot be reached"):
        stream(server.grpc_url, MODELS["dit"], Utterance(TEXT, voice, VOICE_TEXT))
    assert time.monotonic() - begun < 5


def test_an_llm_model_whose_process_has_died_is_an_error_within_five_seconds(serve: Serve, voice: np.ndarray) -> None:
    server = serve(stack="dit", settings={"model_timeout": "3"})
    os.kill(process_of(server, "tensorrt_llm"), signal.SIGKILL)
    for _ in range(2):  # found dead in the request, known to be dead before it
        begun = time.monotonic()
        with pytest.raises(ClientError, match="tensorrt_llm|LLM"):
            stream(server.grpc_url, MODELS["dit"], Utterance(TEXT, voice, VOICE_TEXT))
        assert time.monotonic() - begun < 5
