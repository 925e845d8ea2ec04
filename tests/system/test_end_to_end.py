"""The stacks in the real tritonserver, through the real clients."""

import asyncio
import os
import queue
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import torch
import tritonclient.grpc as triton
from cosyvoice_triton import samples, stacks
from cosyvoice_triton.cli import client_http
from cosyvoice_triton.client import grpc_client
from cosyvoice_triton.client.answer import SpeechResult
from cosyvoice_triton.client.utterance import Utterance
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.monitoring.metrics import page
from cosyvoice_triton.orchestrator.synthesis import SENTENCE_PAUSE
from cosyvoice_triton.text.frontend import TextFrontend
from cosyvoice_triton.voice.audio import load_audio
from cosyvoice_triton.voice.features import resample
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.queries import unknown
from tests.support.serve_process import get
from tests.support.server_requests import (
    MODELS,
    STACKS,
    STREAMS,
    TEXT,
    VOICE,
    VOICE_TEXT,
    Serve,
    assert_speech,
    cancelled_requests,
    process_of,
    stream,
)
from tests.support.speech_fixtures import until

pytestmark = pytest.mark.server


@dataclass(frozen=True)
class Server:
    """The orchestrator of a stack in the real server."""

    model: str
    triton: Any

    @property
    def address(self) -> str:
        return str(self.triton.grpc_url)

    def stream(self, text: str, wav: np.ndarray | None = None, words: str | None = None, **how: Any) -> SpeechResult:
        """The speech of an utterance; `how`: its further fields, the others being parameters of the request."""
        fields = {name: how.pop(name) for name in ("speaker", "instruct_text", "reference_sample_rate") if name in how}
        return stream(self.address, self.model, Utterance(text, wav, words, how, **fields))


@pytest.fixture(scope="module", params=STACKS)
def stack(request: pytest.FixtureRequest) -> str:
    """A fixture, not a mark: pytest then runs all tests of one stack together, and its server starts once."""
    return str(request.param)


COSYVOICE3 = stacks.COSYVOICE3.name
# The engine cuda reads the LLM's directory as it is, also on the CPU. There are as few slots as streams.
OPTIONS: dict[str, Any] = {COSYVOICE3: {"llm_engine": "cuda", "settings": {"max_streams": "2", "n_timesteps": "4"}}}
# Of tests of what the orchestrator does, which both stacks share.
once = pytest.mark.parametrize("stack", STACKS[:1], indirect=True)


@pytest.fixture
def server(stack: str, serve: Serve) -> Server:
    return Server(MODELS[stack], serve(stack=stack, **OPTIONS.get(stack, {})))


@once
def test_the_pages_have_every_metric_that_dashboard_and_alerts_ask_for(server: Server) -> None:
    assert unknown(page(server.triton.metrics_directory), "tts_") == set()
    assert unknown(get(f"http://{server.triton.metrics_url}/metrics")[1], "nv_") == set()


LONG_TEXT = ("The first sentence costs $3.50 and is spoken by nobody. " * 2 + "今天是2023年11月5日，一切都好。") * 2


@once
def test_a_long_text_is_one_stream_of_its_segments(server: Server, voice: np.ndarray) -> None:
    """The LLM gives each segment the answer that it gives to the segment alone, with the same voice and seed. Only the
    first one has the same audio, too: later ones begin with longer hops."""
    segments = list(TextFrontend().segments(LONG_TEXT))
    assert len(segments) > 1 and "three dollars and fifty cents" in segments[0]
    whole, first, *others = (server.stream(str(text), voice, VOICE_TEXT, seed=3) for text in (LONG_TEXT, *segments))
    assert_speech(whole)
    assert whole.arrivals[0] < whole.total / 2
    np.testing.assert_allclose(whole.waveform[: first.waveform.size], first.waveform, atol=1e-3)
    pauses = (len(segments) - 1) * round(SENTENCE_PAUSE * SAMPLE_RATE)
    assert whole.waveform.size == first.waveform.size + sum(part.waveform.size for part in others) + pauses


IMPOSSIBLE_SHAPES = [(1, 2**62), (1, 2**61), (1, 2**63 - 1), (2**32, 2**32), (1, -1), (0, 2**62), (1,) * 9 + (2**40,)]


def test_no_shape_of_an_input_ends_a_model(server: Server) -> None:
    """2^62 floats without data, which tritonserver takes for 0 bytes."""
    with grpc.insecure_channel(server.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for model in stub.RepositoryIndex(service_pb2.RepositoryIndexRequest()).models:
            metadata = stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=model.name))
            wanted = [(tensor, shape) for tensor in metadata.inputs for shape in IMPOSSIBLE_SHAPES]
            for tensor, shape in wanted:
                request = service_pb2.ModelInferRequest(model_name=model.name, raw_input_contents=[b""])
                request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
                (answer,) = stub.ModelStreamInfer(iter([request]), timeout=60)
                assert f"input '{tensor.name}'" in answer.error_message and "of its shape" in answer.error_message
            assert model.name in server.triton.model_processes().values()


@once
def test_a_stream_ends_with_exactly_one_final_response(server: Server, voice: np.ndarray) -> None:
    """As upstream's client sees it: one long-lived stream that requests an empty final response."""
    arrivals: queue.Queue[tuple[Any, Any]] = queue.Queue()
    finals, sizes = 0, []
    with triton.InferenceServerClient(server.address) as connection:
        connection.start_stream(lambda result, error: arrivals.put((result, error)))
        inputs = Utterance(TEXT, voice, VOICE_TEXT).tensors(triton.InferInput)
        connection.async_stream_infer(server.model, inputs, enable_empty_final_response=True)
        while not finals:
            result, error = arrivals.get(timeout=60)
            assert error is None
            finals += result.get_response().parameters["triton_final_response"].bool_param
            waveform = result.as_numpy("waveform")
            sizes.append(0 if waveform is None else waveform.size)
        connection.stop_stream()  # returns when no response is outstanding
    assert arrivals.empty()
    assert all(sizes[:-1]) and sizes[-1] == 0


def requests_of(stack: str, voice: np.ndarray) -> list[Utterance]:
    """Eight with different voices (recordings, excerpts, speeds), texts and seeds; every second one cross-lingual. Of
    CosyVoice3 one with its system words, and one with its marks and an instruction."""
    if stack == COSYVOICE3:
        return [
            Utterance("You are a helpful assistant.<|endofprompt|>" + TEXT, voice, VOICE_TEXT, {"seed": 1}),
            Utterance(
                "报道[j][ǐ]予好评。[breath]", voice[8_000:], parameters={"seed": 2}, instruct_text="Speak sadly."
            ),
        ]
    other = load_audio(samples.FOLDER / "reference_zh.wav", PROMPT_SAMPLE_RATE)
    recordings = [voice, other, voice[: 2 * PROMPT_SAMPLE_RATE], other[PROMPT_SAMPLE_RATE:]]
    for index, each in enumerate(recordings[:4]):  # played at another rate, which changes the pitch and so the voice
        recordings.append(resample(torch.from_numpy(each), PROMPT_SAMPLE_RATE, 14_000 + 500 * index).numpy())
    return [
        Utterance(f"Sentence {index} " + "goes " * index, wav, None if index % 2 else VOICE_TEXT, {"seed": index})
        for index, wav in enumerate(recordings)
    ]


@pytest.mark.parametrize("stack", MODELS, indirect=True)
def test_concurrent_streams_equal_the_same_streams_alone(stack: str, server: Server, voice: np.ndarray) -> None:
    """tests/token2wav compares chunks with whole utterances."""
    utterances = requests_of(stack, voice)
    alone = [stream(server.address, server.model, utterance) for utterance in utterances]

    async def at_once() -> list[SpeechResult]:
        return await asyncio.gather(
            *(grpc_client.synthesize(server.address, server.model, each, timeout=120.0) for each in utterances)
        )

    for one, other in zip(alone, asyncio.run(at_once()), strict=True):
        assert_speech(one)
        assert len(one.arrivals) > 1 and one.arrivals[0] < one.total
        np.testing.assert_allclose(one.waveform, other.waveform, atol=1e-3)
    assert len({speech.waveform.tobytes() for speech in alone}) == len(alone)


@once
def test_a_client_that_reads_late_gets_all_of_its_audio(server: Server, voice: np.ndarray) -> None:
    """Although its connection is full meanwhile, after which newer versions of Triton no longer cancel the stream."""
    speech = Utterance("word " * 25, voice, VOICE_TEXT, {"seed": 9})
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]

    async def samples(pause: float) -> int:
        count = 0
        async with grpc_client.triton.InferenceServerClient(server.address, channel_args=narrow) as connection:
            async with aclosing(grpc_client.chunks(connection, server.model, speech, 120.0)) as waveforms:
                async for one in waveforms:
                    count += one.waveform.size
                    await asyncio.sleep(pause)
                    pause = 0
        return count

    async def both() -> list[int]:
        return await asyncio.gather(samples(3.0), samples(0))

    late, prompt = asyncio.run(both())
    assert late == prompt > 5 * SAMPLE_RATE


@once
def test_cancelled_streams_free_their_slots_their_threads_and_leave_every_process_alive(server, voice) -> None:
    """There are more of them than token2wav has slots, and more than asyncio starts threads for blocking work, which it
    keeps. When each is cancelled, the LLM is generating ahead: as a call between models this damaged the heap or
    blocked the whole server, see triton_io/streams.py."""
    long, processes = Utterance("word " * 100, voice, VOICE_TEXT), server.triton.model_processes()
    threads = psutil.Process(process_of(server.triton, server.model)).num_threads

    async def cancel_after(chunks: int) -> None:
        async with grpc_client.triton.InferenceServerClient(server.address) as connection:
            async with aclosing(grpc_client.chunks(connection, server.model, long, 60.0)) as waveforms:
                for _ in range(chunks):
                    assert (await anext(waveforms)).waveform.size

    async def cancel_four() -> None:
        cancelled = cancelled_requests(server.triton)
        await asyncio.gather(*map(cancel_after, (1, 1, 2, 3)))
        until(lambda: cancelled_requests(server.triton) == cancelled + 4, 60)

    asyncio.run(cancel_four())  # threads that start once have started now
    before, pool = threads(), min(32, (os.cpu_count() or 1) + 4)
    rounds = max(5, (pool + 20) // 4)
    assert 4 * rounds > 2 * STREAMS
    for _ in range(rounds):
        asyncio.run(cancel_four())
    until(lambda: threads() <= before + pool + 2, 60)  # the last threads may still be ending
    assert_speech(server.stream(TEXT, voice, VOICE_TEXT))
    assert server.triton.model_processes() == processes


def test_offline_requests_give_the_same_audio_over_http_and_grpc(serve: Serve, voice: np.ndarray) -> None:
    """Of a stack that is rendered for one answer per request."""
    server, model = serve(stack=stacks.UNET.name, decoupled=False), stacks.UNET.orchestrator
    utterance = Utterance(TEXT, voice, VOICE_TEXT, {"seed": 5})
    by_http = client_http.synthesize(f"http://{server.http_url}", model, utterance, 60.0)
    by_grpc = asyncio.run(grpc_client.synthesize(server.grpc_url, model, utterance, "offline"))
    assert_speech(by_http)
    np.testing.assert_allclose(by_http.waveform, by_grpc.waveform, atol=1e-3)


@pytest.fixture(scope="session")
def voice() -> np.ndarray:
    return load_audio(VOICE, PROMPT_SAMPLE_RATE)
