"""Recordings as files that anybody may have made: their formats, and what is refused before a sample is decoded.

The speech service decodes strangers' files in processes of their own, see `speech_service/audio/recordings.py`.
"""

import io
import itertools

import numpy as np

from cosyvoice_triton.constants import MAX_REFERENCE_SECONDS, SAMPLE_RATE
from cosyvoice_triton.voice.audio import load_untrusted, require_cheap
from cosyvoice_triton.voice.prompt import Recording, validate_reference

# Endings of the files that are read, from the first one looked up to the last.
ENDINGS = (".wav", ".flac", ".mp3", ".ogg", ".m4a", ".mp4", ".3gp", ".aac", ".webm", ".aiff", ".caf")
_MAGIC = {b"\x1aE\xdf\xa3": "matroska", b"FORM": "aiff", b"caff": "caf", b"#!AM": "amr"}  # matroska: WebM, too
# What phones, browsers and editors write: each decoder of FFmpeg is one more that a hostile file can attack.
_CODECS = (
    *("aac", "alac", "flac", "mp3", "mp3float", "opus", "libopus", "vorbis", "amrnb", "amrwb"),
    *("pcm_s16be", "pcm_s16le", "pcm_s24be", "pcm_s24le", "pcm_s32be", "pcm_f32be", "pcm_f32le", "pcm_alaw"),
    *("pcm_mulaw", "pcm_s8"),
)


def parse_recording(data: bytes, max_seconds: float = MAX_REFERENCE_SECONDS) -> Recording:
    """Return an audio file as a validated recording, channels averaged. ValueError with the reason if it is invalid."""
    if (container := _container(data)) is not None:
        recording = Recording(_load_with_ffmpeg(data, container, max_seconds), rate=SAMPLE_RATE)
    else:
        try:
            recording = load_untrusted(data, max_seconds)
        except RuntimeError:  # libsndfile's errors
            formats = ", ".join(each[1:].upper() for each in ENDINGS)
            raise ValueError(f"the recording is not a readable audio file: use one of {formats}") from None
    validate_reference(recording.wav, rate=recording.rate, name="the recording", max_seconds=max_seconds)
    return recording


def _container(data: bytes) -> str | None:
    """Return FFmpeg's name of a file's format, for formats that phones and browsers record and libsndfile does not
    read or is not trusted with."""
    if data[4:8] == b"ftyp":
        return "mov"  # MP4, M4A, 3GP
    begin = 0
    if data[:3] == b"ID3":  # before MP3 and AAC; its length has seven bits a byte
        begin = 10 + sum((byte & 0x7F) << 7 * place for place, byte in enumerate(reversed(data[6:10])))
    if data[begin : begin + 2] in (b"\xff\xf1", b"\xff\xf9"):  # ADTS; MP3 has other bits of the layer
        return "aac"
    if data[:4] == b"fLaC" and not int.from_bytes(data[18:26], "big") % (1 << 36):
        return "flac"  # of unknown length, as an encoder that streams writes it
    return _MAGIC.get(data[:4])


def _load_with_ffmpeg(data: bytes, container: str, max_seconds: float) -> np.ndarray:
    """Return the first sound of a file as float32 (T,) at SAMPLE_RATE, more than which no network reads. ValueError.

    FFmpeg opens nothing but these bytes: the demuxer is named, no protocol is allowed, and only common codecs are.
    """
    try:
        import av  # here: only the speech service needs it
    except ImportError:
        raise ValueError(f"the recording is a file of the format {container}, which needs the package av") from None
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
            if codec is None or codec.name not in _CODECS:
                name = "unknown" if codec is None else codec.name
                raise ValueError(f"the recording's codec is {name}: send one of {', '.join(_CODECS)}")
            require_cheap(codec.channels, codec.sample_rate)
            for frame in itertools.chain(file.decode(stream), [None]):
                if frame is not None:  # each says it again
                    require_cheap(frame.layout.nb_channels, frame.sample_rate)
                for part in resampler.resample(frame):
                    parts.append(part.to_ndarray().reshape(-1))
                    left -= parts[-1].size
                if left < 0:
                    raise ValueError(f"the recording is longer than {max_seconds:g} s")
    except (av.FFmpegError, OSError) as error:
        raise ValueError(f"the recording is a damaged file of the format {container}: {error}") from None
    return np.concatenate([np.zeros(0, np.float32), *parts])
