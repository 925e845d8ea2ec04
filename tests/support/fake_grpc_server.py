"""A fake of tritonserver's gRPC service: streamed requests reach the decoupled models of `fake_triton.models`."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from tests.support import fake_triton
from tests.support.fake_triton import InferenceRequest, InferenceResponse


class FakeGrpcServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`live`: number of requests in progress. `stop` ends the server immediately."""

    def __init__(self, server: grpc.Server) -> None:
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, server)
        self.address, self.live = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", 0
        self.stop = lambda: server.stop(grace=None).wait()

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802 - the protocol's name
        for request in requests:
            self.live += 1
            try:
                responses = fake_triton.models[request.model_name](_read(request))
                for response in cast("Iterable[InferenceResponse]", responses):
                    if not context.is_active():
                        return
                    yield _written(response)
            finally:
                self.live -= 1


def _read(request: Any) -> InferenceRequest:
    arrays = {
        sent.name: np.frombuffer(raw, triton_to_np_dtype(sent.datatype)).reshape(sent.shape)
        for sent, raw in zip(request.inputs, request.raw_input_contents, strict=True)
    }
    parameters = {name: value.string_param for name, value in request.parameters.items()}
    return InferenceRequest.from_client(arrays, parameters=parameters, decoupled=True)


def _written(response: InferenceResponse) -> Any:
    if (error := response.error()) is not None:
        return service_pb2.ModelStreamInferResponse(error_message=error.message())
    infer = service_pb2.ModelInferResponse()
    for name, array in response.arrays().items():
        infer.outputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=list(array.shape))
        infer.raw_output_contents.append(array.tobytes())
    return service_pb2.ModelStreamInferResponse(infer_response=infer)


@contextmanager
def fake_grpc_server() -> Iterator[FakeGrpcServer]:
    with ThreadPoolExecutor(64) as threads:
        server = grpc.server(threads)
        fake = FakeGrpcServer(server)
        server.start()
        try:
            yield fake
        finally:
            fake.stop()
