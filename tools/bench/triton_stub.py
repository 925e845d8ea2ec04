"""A server of Triton's gRPC protocol that speaks noise at a set pace: what a service in front of Triton is measured and
tested against, where Triton's own pace would be in the way.

    python -m tools.bench.triton_stub --chunks 20 --pause 0.5       prints its address, serves until SIGTERM

A text that begins with one of these words is answered otherwise:
    refuse   an error about the request              lost     a model that is not available
    break    one chunk, then an error                silent   no audio at all
    endless  chunks until the client leaves          stall    nothing until the client leaves
    quick    three chunks at once
"""

import argparse
import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from common import stacks
from common.constants import SAMPLE_RATE

REQUESTS_KEPT = 64


def texts_of(request: Any) -> dict[str, str]:
    """The text inputs of a request."""
    pairs = zip(request.inputs, request.raw_input_contents, strict=True)
    return {tensor.name: raw[4:].decode() for tensor, raw in pairs if tensor.datatype == "BYTES"}  # 4 bytes of length


@dataclass
class TritonStub(service_pb2_grpc.GRPCInferenceServiceServicer):
    """chunks of `samples` each, `pause` seconds apart, the first after `first` seconds."""

    chunks: int = 3
    samples: int = SAMPLE_RATE // 5
    pause: float = 0.0
    first: float = 0.0
    model: str = stacks.DEFAULT.orchestrator
    decoupled: bool = True
    live: int = 0
    served: int = 0
    cancelled: int = 0
    requests: deque[Any] = field(default_factory=lambda: deque(maxlen=REQUESTS_KEPT))

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's names
        answer = service_pb2.RepositoryIndexResponse()
        answer.models.add(name=self.model, version="1", state="READY")
        return answer

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        config = model_config_pb2.ModelConfig(name=self.model)
        config.model_transaction_policy.decoupled = self.decoupled
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        parts = [part async for part in self._speak(request, context)]
        return self._response(np.concatenate(parts) if parts else np.zeros(0, np.float32)).infer_response

    async def ModelStreamInfer(self, iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for request in iterator:
            async for part in self._speak(request, context):
                yield self._response(part)

    async def _speak(self, request: Any, context: Any) -> AsyncIterator[np.ndarray]:
        """The chunks of one request, float32 (N,)."""
        self.requests.append(request)
        self.live += 1
        self.served += 1
        try:
            manner = texts_of(request)["target_text"].partition(" ")[0]
            if manner == "refuse":
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "invalid request: target_text is refused")
            if manner == "lost":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the LLM is down")
            first, pause = {"stall": (3600.0, 0.0), "quick": (0.0, 0.0), "endless": (0.0, max(self.pause, 0.05))}.get(
                manner, (self.first, self.pause)
            )
            await asyncio.sleep(first)
            noise = np.random.default_rng(0).uniform(-0.5, 0.5, self.samples).astype(np.float32)
            count = {"silent": 0, "break": 1, "quick": 3, "endless": 1 << 30}.get(manner, self.chunks)
            for _ in range(count):
                yield noise
                await asyncio.sleep(pause)
            if manner == "break":
                await context.abort(grpc.StatusCode.INTERNAL, "the vocoder broke")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.live -= 1

    def _response(self, waveform: np.ndarray) -> Any:
        infer = service_pb2.ModelInferResponse(model_name=self.model)
        infer.outputs.add(name="waveform", datatype="FP32", shape=[1, waveform.size])
        infer.raw_output_contents.append(waveform.tobytes())
        return service_pb2.ModelStreamInferResponse(infer_response=infer)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> tuple[grpc.aio.Server, str]:
        """Listen; the server and its address."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, server)
        bound = server.add_insecure_port(f"{host}:{port}")
        await server.start()
        return server, f"{host}:{bound}"


async def _serve(stub: TritonStub, port: int) -> None:
    server, address = await stub.start(port=port)
    print(address, flush=True)
    await server.wait_for_termination()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between chunks")
    parser.add_argument("--first", type=float, default=0.1, help="seconds before the first chunk")
    args = parser.parse_args(argv)
    samples = int(SAMPLE_RATE * (args.pause or 0.5))
    asyncio.run(_serve(TritonStub(args.chunks, samples, args.pause, args.first), args.port))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
