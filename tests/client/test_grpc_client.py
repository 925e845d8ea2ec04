"""The threaded gRPC client's connection."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from cosyvoice_triton.client.grpc_client import ThreadConnection
from cosyvoice_triton.client.requests import ClientError, Recorder, Utterance


class SlowUtterance(Utterance):
    """It is encoded so slowly that the server has ended the call meanwhile."""

    def tensors(self, tensor: Any) -> Any:
        time.sleep(0.5)
        return super().tensors(tensor)


def test_a_call_that_ends_before_the_request_is_sent_gives_the_servers_reason() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"localhost:{server.add_insecure_port('localhost:0')}"
    server.start()

    async def ask() -> None:
        connection = ThreadConnection(address)
        try:
            await connection.record("m", SlowUtterance("a"), "streaming", 10.0, Recorder())
        finally:
            await connection.aclose()

    try:
        with pytest.raises(ClientError, match="[Mm]ethod not found"):
            asyncio.run(asyncio.wait_for(ask(), 30))
    finally:
        server.stop(None).wait()
