"""Requests to the real server, for the end-to-end tests."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from cosyvoice_triton import samples, stacks
from cosyvoice_triton.client import grpc_client
from cosyvoice_triton.client.answer import SpeechResult
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.monitoring import metrics
from cosyvoice_triton.server.rendering import settings_of
from google.protobuf import json_format

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
