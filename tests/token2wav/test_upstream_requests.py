"""token2wav in the real tritonserver, asked as upstream's BLS does: with a request id and no correlation id.

The requests are those of forward_token2wav in upstream's cosyvoice2 and cosyvoice2_dit (runtime/triton_trtllm).
"""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from cosyvoice_triton import samples, stacks
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, MEL_BINS, PROMPT_SAMPLE_RATE, SPEAKER_DIM, TOKEN_RATE
from cosyvoice_triton.llm.speech_tokens import read_first_speech_id
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.server.rendering import render
from cosyvoice_triton.server.tritonserver import Ports, TritonServer
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.voice.audio import load_audio

from tests.support.checkpoints import LLM_DIR
from tests.support.server_requests import inputs_of

pytestmark = pytest.mark.server

Tensors = dict[str, np.ndarray]
STACKS = (stacks.DIT, stacks.UNET)  # upstream's CosyVoice3 has other models in place of token2wav
TOKENS = np.random.default_rng(1).integers(0, 6561, 60)
FIRST_HOP = 15


class Client:
    """Requests to a stack's token2wav. `voices`: two, as upstream's BLS of the stack sends them."""

    def __init__(self, stack: Stack, address: str, first_speech_id: int) -> None:
        self.stack = stack
        self.first_speech_id = first_speech_id
        self._connection = triton.InferenceServerClient(address)
        self.voices = [self._recording(name) if stack is stacks.DIT else self._prompt(name) for name in ("en", "zh")]

    def infer(self, tensors: Tensors, **identity: Any) -> np.ndarray:
        result = self._connection.infer(self.stack.token2wav, inputs_of(tensors), **identity)
        return result.as_numpy("waveform")[0]

    def chunks(self, tokens: np.ndarray) -> Iterator[Tensors]:
        """Upstream's chunks of an utterance, by its exponential hops, without a voice."""
        offset, hop, index = 0, FIRST_HOP, 0
        while offset + hop + LOOKAHEAD_TOKENS <= len(tokens):
            yield self.chunk(tokens, offset, offset + hop + LOOKAHEAD_TOKENS, final=False)
            offset, hop, index = offset + hop, TOKEN_RATE * 2**index, index + 1
        yield self.chunk(tokens, offset, len(tokens), final=True)

    def chunk(self, tokens: np.ndarray, offset: int, end: int, *, final: bool) -> Tensors:
        if not self.stack.cumulative:
            return self.target(tokens[offset:end]) | {"finalize": np.array([[final]])}
        position = {"token_offset": np.array([[offset]], np.int32), "finalize": np.array([[final]])}
        return self.target(tokens[:end]) | position

    def target(self, tokens: np.ndarray) -> Tensors:
        return {"target_speech_tokens": self._ids(tokens)}

    def as_sequence(self, number: int, voice: Tensors, chunks: list[Tensors]) -> list[np.ndarray]:
        """The audio of the chunks when they are sent as a Triton sequence."""
        opening = self.target(TOKENS[:0]) | {"finalize": np.array([[False]])} | voice
        assert not len(self.infer(opening, sequence_id=number, sequence_start=True))
        last = len(chunks) - 1
        return [self.infer(chunk, sequence_id=number, sequence_end=i == last) for i, chunk in enumerate(chunks)]

    def _ids(self, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(tokens, np.int32)[None] + np.int32(self.first_speech_id)

    def _recording(self, language: str) -> Tensors:
        wav = load_audio(samples.FOLDER / f"reference_{language}.wav", PROMPT_SAMPLE_RATE)
        return {"reference_wav": wav[None], "reference_wav_len": np.array([[len(wav)]], np.int32)}

    def _prompt(self, language: str) -> Tensors:
        rng = np.random.default_rng(list(language.encode()))
        return {
            "prompt_speech_tokens": self._ids(rng.integers(0, 6561, 50)),
            "prompt_speech_feat": (rng.standard_normal((1, 100, MEL_BINS)) - 6).astype(np.float16),
            "prompt_spk_embedding": rng.standard_normal((1, SPEAKER_DIM)).astype(np.float16),
        }


@pytest.fixture(scope="module")
def server(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """It has the token2wav models of both stacks and nothing else."""
    directory = tmp_path_factory.mktemp("models")
    settings = {"n_timesteps": "2", "flow_precision": "float32", "profile": "unlimited"}
    for stack in STACKS:
        options = StackOptions(models_dir=demo_models, stack=stack.name, device="cpu", settings=settings)
        render(options, directory / stack.name)
        (directory / stack.name / stack.token2wav).rename(directory / stack.token2wav)
        shutil.rmtree(directory / stack.name)
    with TritonServer(directory, ports=Ports(0, 0, 0)) as server:
        yield server
        os.killpg(server._process.pid, signal.SIGKILL)  # unloading takes 4 s and is tested in test_server.py


@pytest.fixture(scope="module", params=STACKS, ids=lambda stack: stack.name)
def client(request: pytest.FixtureRequest, server: TritonServer, demo_models: Path) -> Client:
    return Client(request.param, server.grpc_url, read_first_speech_id(str(demo_models / LLM_DIR)))


def test_streams_are_named_by_their_request_ids(client: Client) -> None:
    """Two of them take turns, beside two sequences whose correlation ids are the same numbers."""
    utterances = [list(client.chunks(TOKENS)), list(client.chunks(TOKENS[::-1]))]
    expected = [client.as_sequence(50 + i, client.voices[i], chunks) for i, chunks in enumerate(utterances)]
    for number, voice in enumerate(client.voices, 1):
        client.infer(client.target(TOKENS[:0]) | voice, sequence_id=number, sequence_start=True)
    for position in range(len(utterances[0])):
        for i, chunks in enumerate(utterances):
            audio = client.infer(chunks[position] | client.voices[i], request_id=f"{i + 1}", priority=position + 1)
            np.testing.assert_allclose(audio, expected[i][position], atol=1e-5)
    assert len(utterances[0]) == 3 and not np.array_equal(expected[0][1], expected[1][1])
    assert sum(map(len, expected[0])) == sum(map(len, expected[1])) == len(TOKENS) * 960
    for number, chunks in enumerate(utterances, 1):
        client.infer(chunks[0], sequence_id=number, sequence_end=True)
