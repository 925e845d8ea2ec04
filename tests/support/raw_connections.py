"""Bytes of a client's own choice: over connections, and as recordings whose headers make little data cost much."""

import contextlib
import socket
import struct
from collections.abc import Iterator

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


def _crc(data: bytes, bits: int, polynomial: int) -> bytes:
    crc = 0
    for byte in data:
        crc ^= byte << bits - 8
        for _ in range(8):
            crc = (crc << 1 ^ (polynomial if crc >> bits - 1 else 0)) & (1 << bits) - 1
    return crc.to_bytes(bits // 8, "big")


def flac(rate: int, frames: int = 2, samples: int = 65_535, known: bool = False) -> bytes:
    """A FLAC of `frames` blocks of silence, 13 bytes each. known: the header says how many samples there are."""
    total = frames * samples if known else 0
    packed = rate << 44 | 15 << 36 | total
    info = struct.pack(">HH", samples, samples) + bytes(6) + packed.to_bytes(8, "big") + bytes(16)
    return b"fLaC" + bytes([0x80, 0, 0, len(info)]) + info + b"".join(_blocks(frames, samples))


def _blocks(frames: int, samples: int) -> Iterator[bytes]:
    for number in range(frames):
        # A fixed block size in 16 bits, the header's rate, one channel, 16 bits a sample; then a constant.
        head = struct.pack(">BBBBBH", 0xFF, 0xF8, 0x70, 0x08, number % 128, samples - 1)
        block = head + _crc(head, 8, 0x07) + bytes([0, 0, 0])
        yield block + _crc(block, 16, 0x8005)


BOMBS = {
    "6 Hz": flac(6),
    "6 Hz, of known length": flac(6, known=True),
    "a rate of 20 bits": flac(655_350, 120),
    "an hour": flac(8_000, 120, 60_000),
    "an hour of known length": flac(8_000, 120, 60_000, known=True),
    "no rate": flac(0),
}
