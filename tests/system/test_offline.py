"""Both stacks rendered for one answer per request, in the real tritonserver, through their clients."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import soundfile as sf
from cosyvoice_triton import samples
from cosyvoice_triton.cli import client_grpc
from cosyvoice_triton.client import grpc_client, http_client
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.speech_service.settings import Settings

from tests.support.server_requests import MODELS, STACKS, TEXT, VOICE_TEXT, Serve, assert_speech
from tests.support.speech_fixtures import RECORDING, serving

pytestmark = pytest.mark.server


@pytest.fixture(scope="module", params=STACKS)
def stack(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(stack: str, serve: Serve) -> Any:
    return serve(stack=stack, decoupled=False)


def test_offline_requests_give_the_same_audio_over_http_and_grpc(stack: str, server: Any, voice: np.ndarray) -> None:
    utterance = Utterance(TEXT, voice, VOICE_TEXT, {"seed": 5})
    by_http = http_client.synthesize(f"http://{server.http_url}", MODELS[stack], utterance, 60.0)
    by_grpc = asyncio.run(grpc_client.synthesize(server.grpc_url, MODELS[stack], utterance, "offline"))
    assert_speech(by_http)
    np.testing.assert_allclose(by_http.waveform, by_grpc.waveform, atol=1e-3)


@pytest.mark.parametrize("stack", ["dit"], indirect=True)
def test_the_load_client_measures_them(stack: str, server: Any, tmp_path: Path) -> None:
    host, port = server.grpc_url.split(":")
    options = ["--server-addr", host, "--server-port", port, "--manifest-path", str(samples.MANIFEST)]
    options += ["--num-requests", "4", "--num-tasks", "2", "--mode", "offline"]
    assert client_grpc.main([*options, "--log-dir", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "summary.json").read_text())
    assert (result["requests"], result["errors"]) == (4, 0) and result["stages_ms"] == {}
    assert "latency_99_percentile_ms: " in (tmp_path / "rtf-manifest.txt").read_text()


@pytest.mark.parametrize("stack", ["unet"], indirect=True)
def test_the_speech_service_speaks_with_it(stack: str, server: Any, tmp_path: Path) -> None:
    with serving(Settings(urls=(server.grpc_url,), voices_dir=tmp_path)) as url:
        files = {"ref_audio": RECORDING.read_bytes()}
        fields = {"input": "Hello.", "model": "cosyvoice2", "response_format": "wav", "seed": "1", "max_tokens": "40"}
        fields |= {"speed": "2"}
        fast = httpx.post(f"{url}/v1/audio/speech", data=fields, files=files, timeout=60)
        usual = httpx.post(f"{url}/v1/audio/speech", data={**fields, "speed": "1"}, files=files, timeout=60)
        assert fast.status_code == usual.status_code == 200, fast.text
        lengths = [sf.info(io.BytesIO(answer.content)).duration for answer in (fast, usual)]
        assert lengths[0] == pytest.approx(lengths[1] / 2, abs=0.1)
