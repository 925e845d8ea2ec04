"""A stack rendered for one answer per request, in the real tritonserver, through its clients."""

import asyncio
from typing import Any

import numpy as np
import pytest
from cosyvoice_triton import stacks
from cosyvoice_triton.client import grpc_client, http_client
from cosyvoice_triton.client.utterance import Utterance

from tests.support.server_requests import TEXT, VOICE_TEXT, Serve, assert_speech

pytestmark = pytest.mark.server

MODEL = stacks.UNET.orchestrator


@pytest.fixture(scope="module")
def server(serve: Serve) -> Any:
    return serve(stack=stacks.UNET.name, decoupled=False)


def test_offline_requests_give_the_same_audio_over_http_and_grpc(server: Any, voice: np.ndarray) -> None:
    utterance = Utterance(TEXT, voice, VOICE_TEXT, {"seed": 5})
    by_http = http_client.synthesize(f"http://{server.http_url}", MODEL, utterance, 60.0)
    by_grpc = asyncio.run(grpc_client.synthesize(server.grpc_url, MODEL, utterance, "offline"))
    assert_speech(by_http)
    np.testing.assert_allclose(by_http.waveform, by_grpc.waveform, atol=1e-3)
