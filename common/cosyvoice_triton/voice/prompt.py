"""A voice as data: a recording with its transcript, or the prompt that the networks need. `encoders` makes the latter.

Imports numpy only: most processes handle prompts and never encode one.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np

from cosyvoice_triton.constants import MEL_BINS, PROMPT_SAMPLE_RATE, SPEAKER_DIM, SPEECH_VOCAB, TOKEN_MEL_RATIO

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class Recording:
    """A recording of a voice: `wav` (T,) float32 at `rate` Hz, and its transcript `text` (empty: unknown).

    It keeps the rate at which it came in, because CosyVoice3's mel has bands up to 12 kHz. Each network that reads it
    resamples it for itself.
    """

    wav: np.ndarray = field(repr=False)
    text: str = ""
    rate: int = PROMPT_SAMPLE_RATE

    @property
    def seconds(self) -> float:
        """Return its duration."""
        return len(self.wav) / self.rate

    @cached_property
    def digest(self) -> bytes:
        """Hash the samples and their rate: 0.2 ms for 5 s, less than passing it to another thread."""
        digest = hashlib.sha256(np.ascontiguousarray(self.wav).data)
        digest.update(self.rate.to_bytes(4, "little"))
        return digest.digest()


@dataclass(frozen=True)
class Prompt:
    """An encoded recording. `tokens` (P,) int64 in 0..6560, `mel` (2P, 80), `embedding` (192,), transcript `text`, the
    recording's `rate` if it is known.

    P = 0: a voice of which only the x-vector is known; it has no transcript.
    """

    tokens: np.ndarray
    mel: np.ndarray
    embedding: np.ndarray
    text: str
    rate: int | None = None

    @classmethod
    def aligned(cls, tokens: np.ndarray, mel: np.ndarray, embedding: np.ndarray, text: str = "") -> "Prompt":
        """Cut tokens (P',) and mel (T, 80) of one recording to the same duration, that of the shorter one.

        They come from different filters and roundings, so their lengths may differ by a frame or so.
        """
        if tokens.ndim != 1 or mel.ndim != 2 or mel.shape[1] != MEL_BINS or embedding.shape != (SPEAKER_DIM,):
            raise ValueError(
                f"prompt shapes {tokens.shape}, {mel.shape}, {embedding.shape}: "
                f"expected (P,), (T, {MEL_BINS}), ({SPEAKER_DIM},)"
            )
        length = min(len(mel) // TOKEN_MEL_RATIO, len(tokens))
        tokens = tokens[:length].astype(np.int64)
        stray = tokens[(tokens < 0) | (tokens >= SPEECH_VOCAB)]
        if len(stray):
            raise ValueError(f"prompt speech token {stray[0]} is not in 0..{SPEECH_VOCAB - 1}")
        if not (np.isfinite(mel).all() and np.isfinite(embedding).all()):
            raise ValueError("the prompt's mel or x-vector has values that are not finite")
        return cls(
            tokens=tokens,
            mel=mel[: length * TOKEN_MEL_RATIO].astype(np.float32),
            embedding=embedding.astype(np.float32),
            text=text,
        )

    @cached_property
    def digest(self) -> bytes:
        """Hash what token2wav gets: the digests of equal voices are equal, whatever the transcript."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.mel, self.embedding):
            digest.update(array.tobytes())
        return digest.digest()


class PromptEncoder(Protocol):
    """The parts of a recording's `Prompt`. All three are requested concurrently."""

    async def tokens(self, recording: Recording) -> np.ndarray:
        """Return speech ids (P,) 0..6560."""
        ...

    async def mel(self, recording: Recording) -> np.ndarray:
        """Return the mel (frames, 80) float32."""
        ...

    async def embedding(self, recording: Recording) -> np.ndarray:
        """Return the x-vector (192,)."""
        ...


class RecordingCache(Generic[ValueT]):
    """What was made of the samples of the `capacity` most recently used recordings, whatever their transcripts: a
    prompt has about 160 kB per 10 s.

    Triton's response cache saves running the encoders; a hit here also saves the calls to their models.
    """

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._known: OrderedDict[bytes, ValueT] = OrderedDict()  # by digest of the samples, most recently used last

    def get(self, recording: Recording) -> ValueT | None:
        """Return what is known of these samples, perhaps with another transcript."""
        if recording.digest in self._known:
            self._known.move_to_end(recording.digest)
        return self._known.get(recording.digest)

    def put(self, recording: Recording, value: ValueT) -> None:
        self._known[recording.digest] = value
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)
