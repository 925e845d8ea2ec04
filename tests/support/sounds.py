"""Sound files: with tones, and such whose headers make little data cost much."""

import base64
import io
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import soundfile as sf
from cosyvoice_triton.constants import SAMPLE_RATE


def recording(
    seconds: float = 1.0, rate: int = SAMPLE_RATE, level: float = 0.3, kind: str = "WAV", channels: int = 1
) -> bytes:
    """An audio file with a tone."""
    tone = level * np.sin(np.arange(int(seconds * rate)) * 0.05)
    return sound_file(np.stack([tone] * channels, axis=1), rate, kind)


def sound_file(wave: np.ndarray, rate: int = SAMPLE_RATE, kind: str = "WAV", **options: Any) -> bytes:
    """An audio file with these samples, (N,) or (N, channels)."""
    file = io.BytesIO()
    sf.write(file, wave, rate, format=kind, **options)
    return file.getvalue()


def sine(hz: float, level: float = 0.3, seconds: float = 1.0, rate: int = SAMPLE_RATE) -> np.ndarray:
    """A tone, float32 (N,)."""
    return (level * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


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
