"""A voice as data: a recording with its transcript, or the prompt that the networks need. `encoders` makes the latter.

Imports numpy only: most processes handle prompts and never encode one.
"""

import hashlib
import math
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np

from cosyvoice_triton import constants

SILENCE_PEAK = 1e-4  # -80 dB of full scale: about three steps of 16-bit audio
# Decoding and resampling exceed full scale by less than 6 dB. Beyond this, samples are integers or not audio.
MAX_PEAK = 4.0

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class Recording:
    """A recording of a voice: `wav` (T,) float32 at `rate` Hz, its transcript `text` (empty: unknown), and the
    `instruction` that the voice is spoken with (empty: none), and the `loudness` of its answers in LUFS (None: any).

    It keeps the rate at which it came in, because CosyVoice3's mel has bands up to 12 kHz. Each network that reads it
    resamples it for itself.
    """

    wav: np.ndarray = field(repr=False)
    text: str = ""
    rate: int = constants.PROMPT_SAMPLE_RATE
    instruction: str = ""
    loudness: float | None = None

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


def validate_reference(
    wav: np.ndarray,
    length: int | None = None,
    rate: int = constants.PROMPT_SAMPLE_RATE,
    *,
    of: str = "reference",
    name: str = "",
    max_seconds: float = constants.MAX_REFERENCE_SECONDS,
    may_be_silent: bool = False,
) -> np.ndarray:
    """Return the recording in a request's `reference_wav`, without padding: float32 (N,).

    wav: (T,) or (1, T), possibly padded at the end. length: the request's `reference_wav_len`; samples beyond it are
    neither checked nor used. None: all samples. rate: the request's `reference_sample_rate`. of: what the inputs'
    names begin with. name: of the recording in messages, if not `reference_wav`.
    ValueError with the offending value: a rate that is not carried, wrong shape or type, length not in 1..T, duration
    out of range, NaN or infinite samples, silence.
    """
    name = name or f"{of}_wav"
    if length is not None and wav.size:
        if not 0 < length <= wav.size:
            raise ValueError(f"{of}_wav_len {length} is not in 1..{wav.size}, the samples of {name}")
        wav = wav[..., :length]
    wav = validate_samples(wav, rate, of, name)
    seconds = wav.size / rate
    if not constants.MIN_REFERENCE_SECONDS <= seconds <= max_seconds:
        raise ValueError(
            f"{name} of {wav.size} samples lasts {seconds:.7g} s at {rate} Hz: "
            f"expected {constants.MIN_REFERENCE_SECONDS} to {max_seconds} s"
        )
    swing = (float(wav.max()) - float(wav.min())) / 2
    if swing < SILENCE_PEAK and not may_be_silent:  # also if all samples are the same
        raise ValueError(f"{name} is silent: its samples vary by {swing:.1e}, less than {SILENCE_PEAK:.0e}")
    return wav


def validate_samples(wav: np.ndarray, rate: int, of: str, name: str = "") -> np.ndarray:
    """Return samples (T,) or (1, T) of any duration as float32 (T,). Parameters and errors are those of
    `validate_reference`."""
    name = name or f"{of}_wav"
    if rate % constants.REFERENCE_RATE_STEP or not constants.MIN_REFERENCE_RATE <= rate <= constants.MAX_REFERENCE_RATE:
        raise ValueError(
            f"{of}_sample_rate {rate} is not a multiple of {constants.REFERENCE_RATE_STEP} from "
            f"{constants.MIN_REFERENCE_RATE} to {constants.MAX_REFERENCE_RATE}: resample the recording, "
            f"for example to {constants.SAMPLE_RATE}"
        )
    if not np.issubdtype(wav.dtype, np.floating) or wav.ndim == 0 or wav.size != wav.shape[-1]:
        raise ValueError(f"{name} is {wav.dtype} of shape {list(wav.shape)}: expected floats of shape [T]")
    wav = wav.reshape(-1).astype(np.float32, copy=False)
    if wav.size == 0:
        raise ValueError(f"{name} is empty: 0 samples")
    low, high = float(wav.min()), float(wav.max())  # NaN if there is one: no array is made that is as large
    if not math.isfinite(high - low):
        bad = np.flatnonzero(~np.isfinite(wav))[0]
        raise ValueError(f"{name} is {wav[bad]} at sample {bad}: every sample must be finite")
    if (peak := max(-low, high)) > MAX_PEAK:
        raise ValueError(f"{name} holds a sample of {peak:g}: samples are -1..1; divide 16-bit ones by {1 << 15}")
    return wav


def validate_loudness(lufs: float | None) -> float | None:
    """Return the loudness of a voice. ValueError for one out of range."""
    if lufs is not None and not constants.QUIETEST <= lufs <= constants.LOUDEST:
        raise ValueError(f"loudness {lufs!r} is not in {constants.QUIETEST:g}..{constants.LOUDEST:g} LUFS")
    return lufs


@dataclass(frozen=True)
class Prompt:
    """An encoded recording. `tokens` (P,) int64 in 0..6560, `mel` (2P, 80), `embedding` (192,), transcript `text`, the
    recording's `rate` if it is known, `instruction` and `loudness` as of a `Recording`.

    P = 0: a voice of which only the x-vector is known; it has no transcript.
    """

    tokens: np.ndarray
    mel: np.ndarray
    embedding: np.ndarray
    text: str
    instruction: str = ""
    rate: int | None = None
    loudness: float | None = None

    @classmethod
    def aligned(
        cls, tokens: np.ndarray, mel: np.ndarray, embedding: np.ndarray, text: str = "", instruction: str = ""
    ) -> "Prompt":
        """Cut tokens (P',) and mel (T, 80) of one recording to the same duration, that of the shorter one.

        They come from different filters and roundings, so their lengths may differ by a frame or so.
        """
        if (
            tokens.ndim != 1
            or mel.ndim != 2
            or mel.shape[1] != constants.MEL_BINS
            or embedding.shape != (constants.SPEAKER_DIM,)
        ):
            raise ValueError(
                f"prompt shapes {tokens.shape}, {mel.shape}, {embedding.shape}: "
                f"expected (P,), (T, {constants.MEL_BINS}), ({constants.SPEAKER_DIM},)"
            )
        length = min(len(mel) // constants.TOKEN_MEL_RATIO, len(tokens))
        tokens = tokens[:length].astype(np.int64)
        stray = tokens[(tokens < 0) | (tokens >= constants.SPEECH_VOCAB)]
        if len(stray):
            raise ValueError(f"prompt speech token {stray[0]} is not in 0..{constants.SPEECH_VOCAB - 1}")
        if not (np.isfinite(mel).all() and np.isfinite(embedding).all()):
            raise ValueError("the prompt's mel or x-vector has values that are not finite")
        return cls(
            tokens=tokens,
            mel=mel[: length * constants.TOKEN_MEL_RATIO].astype(np.float32),
            embedding=embedding.astype(np.float32),
            text=text,
            instruction=instruction,
        )

    def of(self, recording: Recording) -> "Prompt":
        """Return the same prompt with a recording's transcript and instruction."""
        if (self.text, self.instruction) == (recording.text, recording.instruction):
            return self
        return replace(self, text=recording.text, instruction=recording.instruction)

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
