"""Uploaded recordings, decoded and validated before they are sent to a model or registered as a voice."""

import base64
import binascii
import io

import numpy as np

from cosyvoice_triton.constants import MAX_REFERENCE_SECONDS, PROMPT_SAMPLE_RATE
from cosyvoice_triton.voice.audio import load_audio, validate_reference


def decode(data: bytes, max_bytes: int) -> np.ndarray:
    """Decode an audio file to float32 (T,) at 16 kHz, channels averaged. ValueError with the reason if it is
    invalid."""
    if len(data) > max_bytes:
        raise ValueError(f"the recording has {len(data)} bytes, more than the limit of {max_bytes}")
    try:
        wav = load_audio(io.BytesIO(data), PROMPT_SAMPLE_RATE, max_seconds=MAX_REFERENCE_SECONDS)
    except RuntimeError:  # libsndfile's errors
        raise ValueError("the recording is not a readable audio file: send WAV, FLAC, OGG or MP3") from None
    return validate_reference(wav)


def decode_base64(text: str, max_bytes: int) -> np.ndarray:
    """Decode a file in base64, plain or as a data URL. ValueError, also for other URLs: none is fetched."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    elif "://" in text[:16]:
        raise ValueError("ref_audio is a URL, and URLs are not fetched: send the file itself in base64")
    if len(text) > max_bytes * 4 // 3 + 4:
        raise ValueError(f"ref_audio is longer than {max_bytes} bytes in base64")
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"ref_audio is not base64: {error}") from None
    return decode(data, max_bytes)


def from_pcm16(data: bytes, max_bytes: int) -> np.ndarray:
    """Return 16-bit samples at 16 kHz, which the plain runtime's gRPC clients send, as float32 (T,). ValueError."""
    if len(data) > max_bytes or len(data) % 2:
        raise ValueError(f"prompt_audio has {len(data)} bytes: expected whole 16-bit samples, up to {max_bytes} bytes")
    return validate_reference(np.frombuffer(data, "<i2").astype(np.float32) / (1 << 15))
