"""Connections over which a client sends bytes of its own choice."""

import contextlib
import socket
import struct

SPEECH = "/v1/audio/speech"
WEBSOCKET = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


def opened(url: str, data: bytes = b"", receive_buffer: int = 0, seconds: float = 60.0) -> socket.socket:
    """A connection on which `data` has been sent. receive_buffer: its bytes, 0 for the system's choice."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.settimeout(seconds)
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect((host, int(port)))
    client.sendall(data)
    return client


def read_all(client: socket.socket) -> bytes:
    """What comes until the connection ends."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(1 << 16):
            data += part
    return data


def request(body: bytes = b"", headers: bytes = b"", length: int | None = None, line: str = f"POST {SPEECH}") -> bytes:
    """A request with a JSON body. length: what its header says, if that is not the body's."""
    sizes = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % (len(body) if length is None else length)
    return line.encode() + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n" + sizes + headers + b"\r\n" + body


def frame(opcode: int, data: bytes, length: int | None = None, fin: bool = True) -> bytes:
    """A WebSocket frame of a client, masked with zeros; `length`: what it says, if it is longer than `data`."""
    size = len(data) if length is None else length
    sizes = bytes([0x80 | size]) if size < 126 else b"\xff" + struct.pack(">Q", size)
    return bytes([opcode | (0x80 if fin else 0)]) + sizes + bytes(4) + data
