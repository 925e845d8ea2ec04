"""An HTTP server on loopback that sends prepared bytes, and functions that build them in the OpenAI format."""

import asyncio
import contextlib
import json
from contextlib import asynccontextmanager

from cosyvoice_triton.background import BackgroundLoop


def event(text, finish_reason=None):
    content = {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def ids_event(ids, finish_reason=None):
    content = {"choices": [{"index": 0, "text": "", "token_ids": ids, "finish_reason": finish_reason}]}
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def reply(status, body):
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class RawHttpServer:
    """Answers each request on loopback with raw bytes; a number in an answer is a pause in seconds."""

    def __init__(self, *answers):
        self.answers = list(answers)  # the last one repeats
        self.bodies = []
        self.live = 0
        self.closed_by_client = asyncio.Event()

    @asynccontextmanager
    async def running(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def answer_to(self, body):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def _serve(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # the client left before its request
            return writer.close()
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-l"))
        self.bodies.append(json.loads(await reader.readexactly(length)))
        answer = await self.answer_to(self.bodies[-1])
        watch = asyncio.create_task(self._watch(reader))
        self.live += 1
        try:
            for part in answer:
                if isinstance(part, bytes):
                    writer.write(part)
                    await writer.drain()
                else:
                    await asyncio.wait({watch}, timeout=part)
        except ConnectionError:
            pass
        finally:
            self.live -= 1
            watch.cancel()
            writer.close()

    async def _watch(self, reader):
        if not await reader.read(1):
            self.closed_by_client.set()


TOKENS = 60  # of a good answer
GOOD = [
    STREAM,
    *(event(f"<|s_{token * 7}|>") for token in range(TOKENS)),
    event("<|eos1|>", "stop"),
    b"data: [DONE]\n\n",
]


@contextlib.contextmanager
def llm_server():
    """A server that answers well, whose `answers` may be changed, and its URL."""
    server = RawHttpServer(GOOD)
    with contextlib.closing(BackgroundLoop("llm")) as loop:
        running = server.running()
        yield server, loop.run(running.__aenter__())
        loop.run(running.__aexit__(None, None, None))
