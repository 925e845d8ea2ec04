"""A request for speech: the text, the voice, and Triton's tensors of them.

`tritonclient.http` and `tritonclient.grpc` have the same `InferInput`, so it is passed in and this module imports
neither.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import numpy as np

from cosyvoice_triton.client.failures import ClientError
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.voice.audio import load_recording
from cosyvoice_triton.voice.prompt import Recording

VOICE_KEY = "x-voice-key"  # a header, see deploy/envoy/envoy.yaml
KEY_SAMPLES = 1024  # of a recording, that make its key

_TEXTS = ("reference_text", "speaker", "instruct_text", "target_text")  # of an utterance: input tensors

Parameters = dict[str, int | float | str | bool]
PieceT = TypeVar("PieceT", str, np.ndarray)


class Pieces(Generic[PieceT]):
    """A text while it is being written, or samples while somebody speaks: readers get the pieces as they are added,
    each reader from the beginning. join: makes one of several: "".join, or np.concatenate of samples, float32 (N,)."""

    def __init__(self, join: Callable[[list[PieceT]], PieceT]) -> None:
        self.length = 0  # characters or samples
        self.ended = False
        self._join: Callable[[list[PieceT]], PieceT] = join
        self._pieces: list[PieceT] = []
        self._changed = asyncio.Event()

    def add(self, piece: PieceT) -> None:
        """Add a piece; not after the end."""
        assert not self.ended
        if len(piece):
            self._pieces.append(piece)
            self.length += len(piece)
            self._changed.set()

    def end(self) -> None:
        """Say that there are no further pieces."""
        self.ended = True
        self._changed.set()

    async def __aiter__(self) -> AsyncGenerator[PieceT, None]:
        """Yield the pieces, several as one if they have been added since the last one was read."""
        read = 0
        while True:
            if new := self._pieces[read:]:
                read += len(new)
                yield self._join(new)
            elif self.ended:
                return
            else:
                self._changed.clear()
                await self._changed.wait()


@dataclass(frozen=True)
class Utterance:
    """One request for speech.

    reference: float32 (T,) at `reference_sample_rate` Hz, mono; without `reference_text` the voice is cloned
    cross-lingually. speaker: a registered voice, instead of a recording. instruct_text: how to speak. parameters:
    request parameters such as `seed`. pieces: the text while it is being written, after `target_text`; for streamed
    requests. source: speech to convert to the voice instead of a text, float32 (T,) at `source_sample_rate` Hz, or
    `source_pieces` of it while it is spoken. loudness: LUFS that whoever encodes the answer brings it to.
    """

    target_text: str
    reference: np.ndarray | None = None
    reference_text: str | None = None
    parameters: Parameters = field(default_factory=dict)
    speaker: str | None = None
    instruct_text: str | None = None
    pieces: Pieces[str] | None = field(default=None, repr=False)
    reference_sample_rate: int = PROMPT_SAMPLE_RATE
    source: np.ndarray | None = field(default=None, repr=False)
    source_sample_rate: int = PROMPT_SAMPLE_RATE
    source_pieces: Pieces[np.ndarray] | None = field(default=None, repr=False)
    loudness: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError naming a value that cannot be encoded: grpc.aio would end such a request as if it were
        cancelled."""
        texts = {name: getattr(self, name) for name in _TEXTS} | self.parameters
        for name, value in texts.items():
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                raise ValueError(f"{name} {value} is not a 64-bit integer")
            if isinstance(value, str):
                try:
                    value.encode()
                except UnicodeEncodeError as error:
                    raise ValueError(f"{name} is not Unicode text: {error}") from None

    def headers(self) -> dict[str, str]:
        """Return the key of the voice: its name, or a hash of the recording; nothing for the server's default voice.

        By it the gateway chooses the server that has the voice's prompt cache.
        """
        if self.reference is not None:
            # Of some samples: hashing all of a recording would delay its request.
            some = self.reference[:: 1 + len(self.reference) // KEY_SAMPLES]
            return {VOICE_KEY: hashlib.sha256(some.tobytes()).hexdigest()[:16]}
        return {VOICE_KEY: quote(self.speaker[:100], safe="")} if self.speaker else {}

    def arrays(self) -> dict[str, tuple[str, np.ndarray]]:
        """Return name -> Triton's datatype and the array with a batch dimension of one: wav (1, T), others (1, 1)."""
        arrays: dict[str, tuple[str, np.ndarray]] = {}
        if self.reference is not None:
            wav = np.ascontiguousarray(self.reference, dtype=np.float32)
            arrays["reference_wav"] = ("FP32", wav[None])  # (T,) -> (1, T)
            arrays["reference_wav_len"] = ("INT32", np.array([[wav.size]], dtype=np.int32))
            if self.reference_sample_rate != PROMPT_SAMPLE_RATE:  # upstream's server does not know this input
                arrays["reference_sample_rate"] = ("INT32", np.array([[self.reference_sample_rate]], dtype=np.int32))
        if self.source is not None:
            arrays["source_wav"] = ("FP32", np.ascontiguousarray(self.source, dtype=np.float32)[None])
            arrays["source_sample_rate"] = ("INT32", np.array([[self.source_sample_rate]], dtype=np.int32))
        for name in _TEXTS:
            if (text := getattr(self, name)) is not None:
                arrays[name] = ("BYTES", np.array([[text.encode("utf-8")]], dtype=np.object_))
        return arrays

    def tensors(self, infer_input: Callable[[str, list[int], str], Any]) -> list[Any]:
        """Return the input tensors of a request."""
        inputs = []
        for name, (datatype, array) in self.arrays().items():
            tensor = infer_input(name, list(array.shape), datatype)
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        return inputs


def read_reference(path: Path) -> Recording:
    """Return a recording of any rate and channel count; ClientError if it cannot be read."""
    try:
        return load_recording(path)
    except (OSError, RuntimeError, ValueError) as error:  # libsndfile's errors are RuntimeErrors
        raise ClientError(
            f"cannot read the reference audio {path}: {error}; use a WAV, FLAC, OGG or MP3 file"
        ) from None


def of_recording(recording: Recording | None) -> dict[str, Any]:
    """Return an utterance's fields for a recording, without its transcript; none for None."""
    return {} if recording is None else {"reference": recording.wav, "reference_sample_rate": recording.rate}
