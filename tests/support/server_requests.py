"""Requests to the real server, for the end-to-end tests."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tritonclient.grpc as triton
from cosyvoice_triton import samples, stacks
from cosyvoice_triton.client import grpc_client
from cosyvoice_triton.client.answer import WARNING, SpeechResult
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.monitoring import metrics
from cosyvoice_triton.server.rendering import settings_of
from cosyvoice_triton.voice.features import resample
from google.protobuf import json_format
from tritonclient.utils import np_to_triton_dtype

MODELS = {stack.name: stack.orchestrator for stack in stacks.BUILT_IN}
STACKS = (stacks.DIT.name, stacks.UNET.name)
TEXT = "A short sentence."
STREAMS = 8  # slots of token2wav in a server of the fixture `serve`
VOICE = samples.FOLDER / "reference_en.wav"
VOICE_TEXT = "Your call is now first in line and will be answered by the next available representative."

Serve = Callable[..., Any]


def stream(address: str, model: str, utterance: Utterance, timeout: float = 240.0) -> SpeechResult:
    return asyncio.run(grpc_client.synthesize(address, model, utterance, timeout=timeout))


def assert_speech(speech: SpeechResult) -> None:
    assert speech.waveform.dtype == np.float32
    assert np.isfinite(speech.waveform).all() and np.abs(speech.waveform).max() > 0
    assert np.abs(speech.waveform).max() <= 1.0
    assert speech.seconds > 0.1


def text_array(text: str) -> np.ndarray:
    return np.array([[text.encode()]], dtype=np.object_)


def request_arrays(wav: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a valid request, for tests that change one of them."""
    return {
        "reference_wav": wav[None],
        "reference_wav_len": np.array([[wav.size]], np.int32),
        "reference_text": text_array(VOICE_TEXT),
        "target_text": text_array(TEXT),
    }


@dataclass(frozen=True)
class Response:
    """The result of one request: its audio and possibly a warning, or the message of its error."""

    waveform: np.ndarray
    error: str | None
    warning: str | None = None


def send(address: str, model: str, arrays: dict[str, np.ndarray], parameters: dict[str, Any] | None = None) -> Response:
    """Send a streamed request of any tensors; TimeoutError unless the server ends it within 60 s."""

    async def run() -> Response:
        return await asyncio.wait_for(collect(address, model, inputs_of(arrays), parameters), 60)

    return asyncio.run(run())


def inputs_of(arrays: dict[str, np.ndarray]) -> list[triton.InferInput]:
    inputs = []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


async def collect(address: str, model: str, inputs: list[Any], parameters: dict[str, Any] | None) -> Response:
    async def requests() -> Any:
        yield {"model_name": model, "inputs": inputs, "parameters": parameters}

    chunks, error, warning = [np.zeros(0, np.float32)], None, None
    async with grpc_client.triton.InferenceServerClient(address) as connection:
        async for result, problem in connection.stream_infer(requests()):
            if problem is not None:
                assert error is None, f"two errors: {error} and {problem}"
                error = problem.message()
                continue
            chunks.append(result.as_numpy("waveform").reshape(-1))
            if (value := result.as_numpy(WARNING)) is not None:
                warning = value.item().decode()
    return Response(np.concatenate(chunks), error, warning)


def wav_of(values: np.ndarray) -> dict[str, np.ndarray]:
    return {"reference_wav": values[None], "reference_wav_len": np.array([[values.size]], np.int32)}


def cancelled_requests(server: Any) -> int:
    """How many requests to the orchestrators were cancelled so far; each has given its stream of token2wav back."""
    page = metrics.page(server.metrics_directory)
    return sum(int(found) for found in re.findall(r'outcome="cancelled"[^}]*\} (\d+)', page))


def read_settings(config: Any) -> Any:
    """The settings of a model, as it reads them from what Triton's python backend passes to `initialize`."""
    text = json_format.MessageToJson(config, preserving_proto_field_name=True)
    args = {"model_config": text, "model_instance_kind": "CPU", "model_instance_device_id": "0"}
    return settings_of(config.name).from_triton(args)


def process_of(server: Any, model: str) -> int:
    return next(process for process, name in server.model_processes().items() if name == model)


def at_rate(wav: np.ndarray, rate: int) -> np.ndarray:
    """The recording played at another rate, which changes the pitch and so the voice."""
    return resample(torch.from_numpy(wav), PROMPT_SAMPLE_RATE, rate).numpy()
