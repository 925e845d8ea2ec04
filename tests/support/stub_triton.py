"""A server of Triton's protocol whose chunks leave on a schedule, in a process of its own.

Prints its port, then serves until its standard input ends. Each stream's chunks leave at `SCHEDULE` seconds after its
request has come. A text of "fail" is answered with an error.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from common.constants import SAMPLE_RATE

ROOT = Path(__file__).resolve().parents[2]
SCHEDULE = (0.3, 0.7, 1.1, 1.5, 1.9)
CHUNK = np.full((1, SAMPLE_RATE // 2), 0.25, np.float32)  # 0.5 s, so that no gap is due


def response() -> service_pb2.ModelStreamInferResponse:
    infer = service_pb2.ModelInferResponse(model_name="stub")
    infer.outputs.add(name="waveform", datatype="FP32", shape=list(CHUNK.shape))
    infer.raw_output_contents.append(CHUNK.tobytes())
    return service_pb2.ModelStreamInferResponse(infer_response=infer)


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's names
        return service_pb2.ServerLiveResponse(live=True)

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=True)

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        config = model_config_pb2.ModelConfig(name=request.name)
        config.model_transaction_policy.decoupled = True
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelStreamInfer(self, iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        loop = asyncio.get_running_loop()
        async for request in iterator:
            begun = loop.time()
            if b"fail" in request.raw_input_contents[-1]:
                yield service_pb2.ModelStreamInferResponse(error_message="this request fails")
                continue
            for offset in SCHEDULE:
                await asyncio.sleep(begun + offset - loop.time())
                yield response()
            if request.parameters["triton_enable_empty_final_response"].bool_param:
                final = service_pb2.ModelInferResponse(model_name="stub")
                final.parameters["triton_final_response"].bool_param = True
                yield service_pb2.ModelStreamInferResponse(infer_response=final)


@dataclass(frozen=True)
class Stub:
    """host:port of the server, and its process."""

    address: str
    process: subprocess.Popen[str]


@contextmanager
def stub_server() -> Iterator[Stub]:
    """The server in its process, however the test treats that."""
    command = [sys.executable, "-m", "tests.support.stub_triton"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        yield Stub(f"127.0.0.1:{int(process.stdout.readline())}", process)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


async def serve() -> None:
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(serve())
