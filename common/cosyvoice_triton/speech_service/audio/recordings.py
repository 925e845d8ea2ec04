"""Uploaded recordings, decoded and validated before they are sent to a model or registered as a voice."""

import base64

import numpy as np

from cosyvoice_triton.constants import MAX_REFERENCE_SECONDS
from cosyvoice_triton.speech_service.audio.decoders import decoded
from cosyvoice_triton.voice.prompt import Recording, validate_reference


def decode(data: bytes, max_bytes: int, max_seconds: float = MAX_REFERENCE_SECONDS) -> Recording:
    """Return an audio file as a recording, channels averaged. ValueError with the reason if it is invalid."""
    if len(data) > max_bytes:
        raise ValueError(f"the recording has {len(data)} bytes, more than the limit of {max_bytes}")
    return decoded(data, max_seconds)


def decode_base64(text: str, max_bytes: int, max_seconds: float = MAX_REFERENCE_SECONDS) -> Recording:
    """Decode a file in base64, plain or as a data URL. ValueError, also for other URLs: none is fetched."""
    if not text.isascii():
        raise ValueError("ref_audio is not base64: it has characters beyond ASCII")
    if text[:5].lower() == "data:":
        text = text.partition(",")[2]
    elif "://" in text[:16]:
        raise ValueError("ref_audio is a URL, and URLs are not fetched: send the file itself in base64")
    # Lines, the alphabet for URLs and missing padding are variants of base64 (RFC 4648), which many encoders write.
    text = text.strip().translate({ord("-"): "+", ord("_"): "/", **dict.fromkeys(map(ord, "\r\n\t"))}).rstrip("=")
    text += "=" * (-len(text) % 4)
    if len(text) > max_bytes * 4 // 3 + 4:
        raise ValueError(f"ref_audio is longer than {max_bytes} bytes in base64")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"ref_audio is not base64: {error}") from None
    return decode(data, max_bytes, max_seconds)


def from_pcm16(data: bytes, max_bytes: int) -> Recording:
    """Return 16-bit samples at 16 kHz, which the plain runtime's gRPC clients send. ValueError."""
    if len(data) > max_bytes or len(data) % 2:
        raise ValueError(f"prompt_audio has {len(data)} bytes: expected whole 16-bit samples, up to {max_bytes} bytes")
    samples = np.frombuffer(data, "<i2").astype(np.float32) / (1 << 15)
    return Recording(validate_reference(samples, name="prompt_audio"))
