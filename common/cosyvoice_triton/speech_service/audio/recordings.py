"""Uploaded recordings, decoded and validated before they are sent to a model or registered as a voice."""

import base64
import io
import itertools

import av
import numpy as np

from cosyvoice_triton.constants import MAX_REFERENCE_SECONDS, SAMPLE_RATE
from cosyvoice_triton.voice.audio import load_reference
from cosyvoice_triton.voice.prompt import Recording, validate_reference

MAX_CHANNELS = 8  # as 7.1; a header that claims more would multiply the memory of its samples
_MAGIC = {b"\x1aE\xdf\xa3": "matroska", b"FORM": "aiff", b"caff": "caf", b"#!AM": "amr"}  # matroska: WebM, too
# What phones, browsers and editors write: each decoder of FFmpeg is one more that a hostile file can attack.
_CODECS = (
    *("aac", "alac", "flac", "mp3", "mp3float", "opus", "libopus", "vorbis", "amrnb", "amrwb"),
    *("pcm_s16be", "pcm_s16le", "pcm_s24be", "pcm_s24le", "pcm_s32be", "pcm_f32be", "pcm_f32le", "pcm_alaw"),
    *("pcm_mulaw", "pcm_s8"),
)


def decode(data: bytes, max_bytes: int, max_seconds: float = MAX_REFERENCE_SECONDS) -> Recording:
    """Return an audio file as a recording, channels averaged. ValueError with the reason if it is invalid."""
    if len(data) > max_bytes:
        raise ValueError(f"the recording has {len(data)} bytes, more than the limit of {max_bytes}")
    if (container := _container(data)) is not None:
        samples = _load_with_ffmpeg(data, container, max_seconds)
        return Recording(validate_reference(samples, rate=SAMPLE_RATE, max_seconds=max_seconds), rate=SAMPLE_RATE)
    try:
        return load_reference(io.BytesIO(data), max_seconds)
    except RuntimeError:  # libsndfile's errors
        raise ValueError(
            "the recording is not a readable audio file: send WAV, FLAC, OGG, MP3, M4A, AAC, WebM, AIFF or CAF"
        ) from None


def _container(data: bytes) -> str | None:
    """Return FFmpeg's name of a file's format, for formats that phones and browsers record and libsndfile does not
    read or is not trusted with."""
    if data[4:8] == b"ftyp":
        return "mov"  # MP4, M4A, 3GP
    if data[:2] in (b"\xff\xf1", b"\xff\xf9"):  # ADTS; MP3 has other bits of the layer
        return "aac"
    if data[:4] == b"fLaC" and not int.from_bytes(data[18:26], "big") % (1 << 36):
        return "flac"  # of unknown length, as an encoder that streams writes it
    return _MAGIC.get(data[:4])


def _load_with_ffmpeg(data: bytes, container: str, max_seconds: float) -> np.ndarray:
    """Return the first sound of a file as float32 (T,) at SAMPLE_RATE, more than which no network reads. ValueError.

    FFmpeg opens nothing but these bytes: the demuxer is named, no protocol is allowed, and only common codecs are.
    """
    options = {"protocol_whitelist": "none", "codec_whitelist": ",".join(_CODECS)}
    resampler = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
    parts: list[np.ndarray] = []
    left = int(max_seconds * SAMPLE_RATE)
    try:
        with av.open(io.BytesIO(data), "r", format=container, options=options, metadata_errors="ignore") as file:
            if not file.streams.audio:
                raise ValueError("the recording has no sound")
            stream = file.streams.audio[0]
            codec = stream.codec_context  # None for one that this FFmpeg does not know
            name, channels = (codec.name, codec.channels) if codec is not None else ("unknown", 0)
            if name not in _CODECS or not 0 < channels <= MAX_CHANNELS:
                raise ValueError(
                    f"the recording's codec is {name} with {channels} channels: send one of {', '.join(_CODECS)} with "
                    f"up to {MAX_CHANNELS}"
                )
            for frame in itertools.chain(file.decode(stream), [None]):
                for part in resampler.resample(frame):
                    parts.append(part.to_ndarray().reshape(-1))
                    left -= parts[-1].size
                if left < 0:
                    raise ValueError(f"the recording is longer than {max_seconds:g} s")
    except (av.FFmpegError, OSError) as error:
        raise ValueError(f"the recording is a damaged file of the format {container}: {error}") from None
    return np.concatenate([np.zeros(0, np.float32), *parts])


def decode_base64(text: str, max_bytes: int, max_seconds: float = MAX_REFERENCE_SECONDS) -> Recording:
    """Decode a file in base64, plain or as a data URL. ValueError, also for other URLs: none is fetched."""
    if text.startswith("data:"):
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
    return Recording(validate_reference(np.frombuffer(data, "<i2").astype(np.float32) / (1 << 15)))
