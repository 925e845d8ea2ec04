"""A speech service as the server of a load: `POST /v1/audio/speech`, answered with raw PCM."""

import asyncio
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import aiohttp
import numpy as np
from tritonclient.utils import InferenceServerException

from cosyvoice_triton.client import requests as speech
from cosyvoice_triton.client.grpc_client import CONNECT_SECONDS
from cosyvoice_triton.errors import OverloadedError, unavailable_message
from cosyvoice_triton.voice.audio import save_audio

SAMPLE_BYTES = 2  # of 16-bit PCM


class SpeechService:
    """The speech service at a URL, over as many kept connections as there are requests at once.

    It has the methods of `AsyncConnection`, and those of tritonclient's that a run's monitors call.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def require(self) -> None:
        """Raise ClientError unless the service has a Triton that serves a speech model."""
        try:
            ready = await self.is_server_live(client_timeout=CONNECT_SECONDS)
        except InferenceServerException as error:
            raise speech.unreachable(self._url, error.message()) from None
        if not ready:
            raise speech.unavailable(self._url, "it has no Triton that is ready")

    async def record(
        self, model: str, request: speech.Utterance, mode: str, timeout: float, recorder: speech.Recorder
    ) -> None:
        """Sends one request and records its answer; ClientError if it fails."""
        body = _body(model, request, stream=mode == "streaming")
        with self._explained(timeout):
            limit = aiohttp.ClientTimeout(total=timeout)
            async with self._session.post(f"{self._url}/v1/audio/speech", timeout=limit, **body) as answer:
                if answer.status != 200:
                    _refuse(answer.status, answer.headers.get("Retry-After", ""), await answer.text())
                received = b""
                async for data, chunk_ends in answer.content.iter_chunks():
                    received += data
                    if chunk_ends:
                        received = _take(received, recorder)
                _take(received, recorder)

    async def is_server_live(self, client_timeout: float) -> bool:
        """Return whether the service can answer; InferenceServerException if nothing answers at its address."""
        limit = aiohttp.ClientTimeout(total=client_timeout)
        try:
            with self._explained(client_timeout):
                async with self._session.get(f"{self._url}/health", timeout=limit) as answer:
                    return answer.status == 200
        except speech.ClientError as error:
            raise InferenceServerException(str(error)) from None

    async def get_inference_statistics(self, _model: str, client_timeout: float) -> NoReturn:
        """Raise InferenceServerException: Triton's counters are behind the service."""
        raise InferenceServerException(f"{self._url} has no statistics of Triton")

    async def aclose(self) -> None:
        await self._session.close()

    @contextmanager
    def _explained(self, timeout: float) -> Iterator[None]:
        try:
            yield
        except asyncio.TimeoutError:
            raise speech.timed_out(self._url, timeout) from None
        except (aiohttp.ClientError, OSError) as error:
            raise speech.unavailable(self._url, error) from None


def _body(model: str, request: speech.Utterance, stream: bool) -> dict[str, Any]:
    """Return the body as a keyword argument of aiohttp: a form if there is a recording, JSON otherwise."""
    fields: dict[str, Any] = {"model": model, "input": request.target_text, "response_format": "pcm", "stream": stream}
    fields |= {name: value for name, value in request.parameters.items() if name != speech.TIMELINE}
    texts = {"voice": request.speaker, "instructions": request.instruct_text, "ref_text": request.reference_text}
    fields |= {name: text for name, text in texts.items() if text is not None}
    if request.reference is None:
        return {"json": fields}
    form = aiohttp.FormData()
    for name, value in fields.items():
        form.add_field(name, value if isinstance(value, str) else json.dumps(value))
    recording = io.BytesIO()
    save_audio(recording, request.reference, request.reference_sample_rate)
    form.add_field("ref_audio", recording.getvalue(), filename="voice.wav", content_type="audio/wav")
    return {"data": form}


def _take(received: bytes, recorder: speech.Recorder) -> bytes:
    """Record the whole samples that were received; return the rest, less than one sample."""
    whole = len(received) // SAMPLE_BYTES
    recorder.add(np.frombuffer(received, "<i2", whole).astype(np.float32) / 32768)
    return received[whole * SAMPLE_BYTES :]


def _refuse(status: int, retry_after: str, text: str) -> NoReturn:
    """Raise the ClientError of an answer that is not audio."""
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):  # not the service's own: a proxy's
        text = f"HTTP {status}: {text[:300]}"
    seconds = float(retry_after) if retry_after.isdecimal() else 0.0  # a proxy's may be a date
    raise speech.refused(unavailable_message(OverloadedError(text, seconds)) if status == 429 else text)
