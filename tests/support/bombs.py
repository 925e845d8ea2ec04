"""Recordings whose headers make little data cost much."""

import struct
from collections.abc import Iterator


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
