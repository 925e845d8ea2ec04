"""A stack rendered for one answer per request, in the real tritonserver, through its clients."""

import asyncio
import io
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import soundfile as sf
from cosyvoice_triton import stacks
from cosyvoice_triton.client import grpc_client, http_client
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.speech_service.settings import Settings

from tests.support.server_requests import TEXT, VOICE_TEXT, Serve, assert_speech
from tests.support.speech_fixtures import RECORDING, serving

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


def test_the_speech_service_speaks_with_it(server: Any, tmp_path: Path) -> None:
    files = {"ref_audio": RECORDING.read_bytes()}
    fields = {"input": "Hello.", "model": MODEL, "response_format": "wav", "seed": "1", "max_tokens": "40"}
    with serving(Settings(urls=(server.grpc_url,), voices_dir=tmp_path)) as url:
        fast, usual = (
            httpx.post(f"{url}/v1/audio/speech", data={**fields, "speed": speed}, files=files, timeout=60)
            for speed in ("2", "1")
        )
    assert fast.status_code == usual.status_code == 200, fast.text
    lengths = [sf.info(io.BytesIO(answer.content)).duration for answer in (fast, usual)]
    assert lengths[0] == pytest.approx(lengths[1] / 2, abs=0.1)
