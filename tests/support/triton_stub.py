"""A server of Triton's gRPC protocol that answers with noise on a fixed schedule.

Clients and services in front of Triton are measured and tested against it, so that Triton's own timing does not matter.

If the text begins with one of these words, the answer is a different one:
    refuse   an error about the request              lost     a model that is not available
    break    one chunk, then an error                silent   no audio at all
    endless  chunks until the client disconnects     stall    nothing until the client disconnects
    warn     a warning with each chunk
    quick    three chunks at once                    fail     an error; further requests of the stream are answered
"""

import asyncio
import json
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import grpc
import numpy as np
from cosyvoice_triton import stacks
from cosyvoice_triton.constants import SAMPLE_RATE
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

REQUESTS_KEPT = 64
OVERLOADED = "unavailable: overloaded, retry after 3 s: token2wav: 9 listeners are served"
WARNING = b"speech was cut short"


def texts_of(request: Any) -> dict[str, str]:
    """The text inputs of a request."""
    pairs = zip(request.inputs, request.raw_input_contents, strict=True)
    return {tensor.name: raw[4:].decode() for tensor, raw in pairs if tensor.datatype == "BYTES"}  # 4 bytes of length


def arrays_of(request: Any) -> dict[str, np.ndarray]:
    """The other inputs of a request, with their dimension of the batch."""
    kinds = {"FP32": np.float32, "INT32": np.int32}
    pairs = zip(request.inputs, request.raw_input_contents, strict=True)
    known = ((tensor, raw) for tensor, raw in pairs if tensor.datatype in kinds)
    return {each.name: np.frombuffer(raw, kinds[each.datatype]).reshape(each.shape).copy() for each, raw in known}


@dataclass
class TritonStub(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`chunks` chunks of `samples` each: the first after `first` seconds, then one every `pause` seconds."""

    chunks: int = 3
    samples: int = SAMPLE_RATE // 5
    pause: float = 0.0
    first: float = 0.0
    model: str = stacks.DEFAULT.orchestrator
    decoupled: bool = True
    error: str = ""  # of every request
    places: int = 1 << 30  # for requests at once; others are refused
    asked: int = 0  # how many streamed requests came, with those that failed
    live: int = 0
    served: int = 0
    cancelled: int = 0
    address: str = ""  # once it has started
    headers: dict[str, str] = field(default_factory=dict)  # of the last stream
    requests: deque[Any] = field(default_factory=lambda: deque(maxlen=REQUESTS_KEPT))

    async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's names
        return service_pb2.ServerLiveResponse(live=True)

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=request.name == self.model)

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        config = model_config_pb2.ModelConfig(name=self.model)
        config.model_transaction_policy.decoupled = self.decoupled
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.error:
            await context.abort(grpc.StatusCode.NOT_FOUND, self.error)
        parts = [part async for part in self._synthesize(request, context)]
        return self._response(np.concatenate(parts) if parts else np.zeros(0, np.float32), request).infer_response

    async def ModelStreamInfer(self, iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.headers = dict(context.invocation_metadata())
        async for request in iterator:
            self.asked += 1
            full = self.live >= self.places and OVERLOADED
            if error := self.error or full or _first_word(request) == "fail" and "this request fails":
                yield service_pb2.ModelStreamInferResponse(error_message=error)
                continue
            async for part in self._synthesize(request, context):
                yield self._response(part, request)
            if request.parameters["triton_enable_empty_final_response"].bool_param:
                final = service_pb2.ModelInferResponse(model_name=self.model)
                final.parameters["triton_final_response"].bool_param = True
                yield service_pb2.ModelStreamInferResponse(infer_response=final)

    async def _synthesize(self, request: Any, context: Any) -> AsyncIterator[np.ndarray]:
        """The chunks of one request, float32 (N,)."""
        self.requests.append(request)
        self.live += 1
        self.served += 1
        loop = asyncio.get_running_loop()
        due = loop.time()
        try:
            word = _first_word(request)
            if texts_of(request).get("speaker") == "nobody":
                why = "invalid request: unknown speaker 'nobody'; known speakers: zoe"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
            heard = any(tensor.name == "source_wav" for tensor in request.inputs)
            empty = not texts_of(request)["target_text"] and "sequence_start" not in request.parameters and not heard
            if word in ("refuse", "nothing") or empty:
                why = "is refused" if word == "refuse" else "has nothing to speak: '→'"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"invalid request: target_text {why}")
            if word == "lost":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the LLM is down")
            first, pause = {"stall": (3600.0, 0.0), "quick": (0.0, 0.0), "endless": (0.0, max(self.pause, 0.05))}.get(
                word, (self.first, self.pause)
            )
            due += first
            for _ in range({"silent": 0, "break": 1, "quick": 3, "endless": 1 << 30}.get(word, self.chunks)):
                await asyncio.sleep(due - loop.time())
                yield self._noise
                due += pause
            if word == "break":
                await context.abort(grpc.StatusCode.INTERNAL, "token2wav broke")
        except (asyncio.CancelledError, GeneratorExit):  # the latter if it ends while gRPC sends a chunk
            self.cancelled += 1
            raise
        finally:
            self.live -= 1

    @cached_property
    def _noise(self) -> np.ndarray:
        return np.random.default_rng(0).uniform(-0.5, 0.5, self.samples).astype(np.float32)

    def _response(self, waveform: np.ndarray, request: Any) -> Any:
        """Each response is a segment of the whole text."""
        infer = service_pb2.ModelInferResponse(model_name=self.model)
        infer.outputs.add(name="waveform", datatype="FP32", shape=[1, waveform.size])
        infer.raw_output_contents.append(waveform.tobytes())
        if request.parameters["segments"].bool_param:
            segments = json.dumps([[texts_of(request)["target_text"], waveform.size]]).encode()
            infer.outputs.add(name="segments", datatype="BYTES", shape=[1, 1])
            infer.raw_output_contents.append(len(segments).to_bytes(4, "little") + segments)
        if _first_word(request) == "warn":
            infer.outputs.add(name="warning", datatype="BYTES", shape=[1, 1])
            infer.raw_output_contents.append(len(WARNING).to_bytes(4, "little") + WARNING)
        return service_pb2.ModelStreamInferResponse(infer_response=infer)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> tuple[grpc.aio.Server, str]:
        """Listen; returns the server and its address. port: 0 for any free one."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, server)
        bound = server.add_insecure_port(f"{host}:{port}")
        await server.start()
        self.address = f"{host}:{bound}"
        return server, self.address


def _first_word(request: Any) -> str:
    return texts_of(request)["target_text"].partition(" ")[0]


@dataclass(frozen=True)
class StubProcess:
    """host:port of a stub, and its process."""

    address: str
    process: subprocess.Popen[str]


@contextmanager
def stub_process(**fields: Any) -> Iterator[StubProcess]:
    """A stub in a separate process, killed at the end of the block; it also ends if this process is killed."""
    command = [sys.executable, "-m", "tests.support.triton_stub", json.dumps(fields)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield StubProcess(process.stdout.readline().strip(), process)
        finally:
            process.kill()


async def _serve(fields: dict[str, Any]) -> None:
    server, address = await TritonStub(**fields).start()
    print(address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))
