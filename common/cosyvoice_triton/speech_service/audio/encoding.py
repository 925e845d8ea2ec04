"""Encodes audio chunk by chunk, so that it can be sent while the rest is generated.

Uses FFmpeg's encoders and filters through PyAV. An encoder belongs to one answer. Its calls take milliseconds and
release the GIL, so those of compressed formats should run in a thread.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import av
import numpy as np
from av.filter import Graph

from cosyvoice_triton.constants import MAX_SPEED, MIN_SPEED, PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.speech_service.settings import RATES

_INT16_PEAK = 32767
_SLICE = 1024  # samples: 43 ms, the most that a filter which withholds one frame delays
MAX_VOLUME = 10.0
_TEMPO_RANGE = (0.5, 2.0)  # of one atempo filter: outside this range it drops samples instead of blending them


@dataclass(frozen=True)
class Format:
    """A container and its codec, by FFmpeg's names; without a container, raw 16-bit samples.

    silence: a sample of it, of the formats that are nothing but samples.
    """

    media_type: str
    container: str = ""
    codec: str = ""
    bit_rate: int | None = None
    options: dict[str, str] = field(default_factory=dict)
    rates: frozenset[int] = RATES
    silence: bytes = b""


TELEPHONE = frozenset((8_000,))

FORMATS = {
    # The header of an MP3 or WAV file has its length, which is not known yet. Players accept a header without one, or
    # with the largest possible one.
    # Neither a Xing header, which is written by seeking back, nor tags.
    "mp3": Format("audio/mpeg", "mp3", "libmp3lame", 96_000, {"write_xing": "0", "id3v2_version": "0"}),
    "opus": Format(
        "audio/ogg",
        "ogg",
        "libopus",
        48_000,
        {"page_duration": "20000"},  # microseconds; by default a page is sent once it has a second
        frozenset((8_000, 12_000, PROMPT_SAMPLE_RATE, SAMPLE_RATE, 48_000)),
    ),
    "aac": Format("audio/aac", "adts", "aac", 64_000),
    "flac": Format("audio/flac", "flac", "flac"),
    "wav": Format("audio/wav", "wav", "pcm_s16le", options={"fflags": "+bitexact"}),  # no tag of the encoder's name
    "pcm": Format("audio/pcm", silence=b"\0\0"),
    # Telephony (G.711); the media types are those of RTP.
    "mulaw": Format("audio/PCMU", "mulaw", "pcm_mulaw", rates=TELEPHONE, silence=b"\xff"),
    "alaw": Format("audio/PCMA", "alaw", "pcm_alaw", rates=TELEPHONE, silence=b"\xd5"),
    "mulaw_wav": Format("audio/wav", "wav", "pcm_mulaw", options={"fflags": "+bitexact"}, rates=TELEPHONE),
    "alaw_wav": Format("audio/wav", "wav", "pcm_alaw", options={"fflags": "+bitexact"}, rates=TELEPHONE),
}
FRAME_MS = (10, 20, 30, 40, 60)  # of telephony's packets


class AudioEncoder:
    """Float chunks at the models' rate -> bytes of the format `name`, at `rate` and `speed`, `volume` times as loud.

    rate: as far as the format has a choice. frame_ms: of the pieces that `framed` makes; None: they come as they are.
    ValueError for an unsupported value. `direct`: the samples are hardly changed, so no thread is needed.
    """

    def __init__(
        self,
        name: str,
        rate: int | None = None,
        speed: float = 1.0,
        volume: float = 1.0,
        frame_ms: int | None = None,
    ) -> None:
        if name not in FORMATS:
            raise ValueError(f"response_format {name!r} is not one of {', '.join(FORMATS)}")
        self.format = FORMATS[name]
        if rate is None:
            rate = SAMPLE_RATE if SAMPLE_RATE in self.format.rates else min(self.format.rates)
        if rate not in self.format.rates:
            rates = ", ".join(map(str, sorted(self.format.rates)))
            raise ValueError(f"sample_rate {rate} is not one of {rates}, which {name} supports")
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise ValueError(f"speed {speed:g} is not in {MIN_SPEED:g}..{MAX_SPEED:g}")
        if not 0 < volume <= MAX_VOLUME:
            raise ValueError(f"volume_multiplier {volume:g} is not above 0 and at most {MAX_VOLUME:g}")
        if frame_ms is not None and (frame_ms not in FRAME_MS or not self.format.silence or rate * frame_ms % 1000):
            lengths, formats = (
                ", ".join(map(str, FRAME_MS)),
                ", ".join(n for n, kind in FORMATS.items() if kind.silence),
            )
            raise ValueError(
                f"frame_ms {frame_ms}: frames have {lengths} ms and whole samples, in the formats {formats}"
            )
        self._frame_bytes = rate * (frame_ms or 0) // 1000 * len(self.format.silence)  # 0: no frames
        self._rest = b""  # of a frame that is not whole
        self.rate = rate
        self._volume = volume
        self._samples = 0  # encoded so far
        self._filter = _filter_of(rate, speed)
        self.direct = self._filter is None and self.format.codec in ("", "pcm_s16le")
        self._writer = _ContainerWriter(self.format, rate) if self.format.container else None

    def push(self, chunk: np.ndarray) -> bytes:
        """Encode float32 (N,) and return the bytes that are complete, possibly none."""
        return b"".join(self._bytes(part) for part in self._filtered(chunk))

    def finish(self) -> bytes:
        """Return the remaining bytes, and the end of the container."""
        rest = b"".join(self._bytes(part) for part in self._filtered(None))
        return rest if self._writer is None else rest + self._writer.close()

    def framed(self, data: bytes, last: bool = False) -> Iterator[bytes]:
        """Yield encoded bytes in frames of equal length, the last one filled with silence; unchanged without frames."""
        size, data = self._frame_bytes or len(data), self._rest + data
        if last and self._frame_bytes:
            data += self.format.silence * (-len(data) % size // len(self.format.silence))
        whole = len(data) - len(data) % size if size else 0
        self._rest = data[whole:]
        for begin in range(0, whole, size or 1):
            yield data[begin : begin + size]

    def complete(self, audio: bytes) -> bytes:
        """Return all bytes of an answer, with the length in the header of a WAV or FLAC file, which is not known while
        it is streamed."""
        if self.format.container == "flac":  # 36 bits of the first block: see RFC 9639, 8.2
            about = int.from_bytes(audio[18:26], "big") >> 36 << 36 | self._samples
            return audio[:18] + about.to_bytes(8, "big") + audio[26:]
        if self.format.container != "wav":
            return audio
        samples = audio.index(b"data") + 8  # a chunk begins with its name and its length
        lengths = [struct.pack("<I", len(audio) - begin) for begin in (8, samples)]
        return audio[:4] + lengths[0] + audio[8 : samples - 4] + lengths[1] + audio[samples:]

    def _filtered(self, chunk: np.ndarray | None) -> Iterator[np.ndarray]:
        if self._filter is None:
            yield from () if chunk is None else (chunk,)
            return
        # In slices, because atempo delays its output by one frame.
        slices = [None] if chunk is None else np.split(chunk, range(_SLICE, chunk.size, _SLICE))
        for part in slices:
            self._filter.push(None if part is None else _frame(np.ascontiguousarray(part), "flt", SAMPLE_RATE))
            while True:
                try:
                    yield self._filter.pull().to_ndarray().reshape(-1)
                except (av.BlockingIOError, av.EOFError):  # nothing more for now, or ever
                    break

    def _bytes(self, wave: np.ndarray) -> bytes:
        pcm = np.rint(np.clip(wave * self._volume, -1.0, 1.0) * _INT16_PEAK).astype("<i2")
        self._samples += len(pcm)
        return pcm.tobytes() if self._writer is None else self._writer.write(pcm)


class _ContainerWriter:
    """A codec and its container, written to a stream that does not support seeking."""

    def __init__(self, kind: Format, rate: int) -> None:
        self._sink = _Sink()
        self._rate = rate
        self._container = av.open(
            self._sink, "w", format=kind.container, options={**kind.options, "flush_packets": "1"}
        )
        extra: dict[str, Any] = {} if kind.bit_rate is None else {"bit_rate": kind.bit_rate}
        self._stream: Any = self._container.add_stream(kind.codec, rate=rate, layout="mono", **extra)

    def write(self, pcm: np.ndarray) -> bytes:
        self._container.mux(self._stream.encode(_frame(pcm, "s16", self._rate)))
        return self._sink.take()

    def close(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._sink.take()


class _Sink:
    """The file object that PyAV writes to."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        data = bytes(self._data)
        self._data.clear()
        return data


def _frame(samples: np.ndarray, kind: str, rate: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(samples[None], format=kind, layout="mono")  # (N,) -> (1, N)
    frame.sample_rate = rate
    return frame


def _filter_of(rate: int, speed: float) -> Graph | None:
    """Return a time-stretch that keeps the pitch, then resampling; None if neither is needed."""
    tempos = list(_tempos(speed))
    if not tempos and rate == SAMPLE_RATE:
        return None
    graph = Graph()
    source = graph.add_abuffer(format="flt", sample_rate=SAMPLE_RATE, layout="mono", time_base=None)
    stages = [source, *(graph.add("atempo", f"{tempo:.6f}") for tempo in tempos)]
    stages.append(graph.add("aresample", str(rate)))
    stages.append(graph.add("aformat", "sample_fmts=flt:channel_layouts=mono"))
    stages.append(graph.add("abuffersink"))
    graph.link_nodes(*stages).configure()
    return graph


def _tempos(speed: float) -> Iterator[float]:
    """Yield factors whose product is `speed`, each within the range of one filter."""
    low, high = _TEMPO_RANGE
    while speed < low or speed > high:
        factor = low if speed < low else high
        yield factor
        speed /= factor
    if speed != 1.0:
        yield speed
