"""What all clients of the speech models share: the request's tensors, the recorded answer, error messages, options.

`tritonclient.http` and `tritonclient.grpc` have the same `InferInput`, so it is passed in and this module imports
neither.
"""

import argparse
import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from cosyvoice_triton import stacks
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE, SAMPLE_RATE
from cosyvoice_triton.voice.audio import load_recording, save_audio
from cosyvoice_triton.voice.prompt import Recording

logger = logging.getLogger(__name__)

WAVEFORM = "waveform"
WARNING = "warning"
VOICE_KEY = "x-voice-key"  # a header, see deploy/envoy/envoy.yaml
KEY_SAMPLES = 1024  # of a recording, that make its key
TIMELINE, SEGMENTS = "timeline", "segments"  # the request parameters and the outputs

_TEXTS = ("reference_text", "speaker", "instruct_text", "target_text")  # of an utterance: input tensors

Parameters = dict[str, int | float | str | bool]


class TextPieces:
    """A text while it is being written: readers get its pieces as they are added, each reader from the beginning."""

    def __init__(self) -> None:
        self.chars = 0
        self.ended = False
        self._pieces: list[str] = []
        self._changed = asyncio.Event()

    def add(self, piece: str) -> None:
        """Add a piece; not after the end."""
        assert not self.ended
        self._pieces.append(piece)
        self.chars += len(piece)
        self._changed.set()

    def end(self) -> None:
        """Say that there are no further pieces."""
        self.ended = True
        self._changed.set()

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        """Yield the pieces, several as one if they have been added since the last one was read."""
        read = 0
        while True:
            if piece := "".join(self._pieces[read:]):
                read = len(self._pieces)
                yield piece
            elif self.ended:
                return
            else:
                self._changed.clear()
                await self._changed.wait()


class ClientError(RuntimeError):
    """The request could not be sent or answered. The message is one line that says what to do next."""


@dataclass(frozen=True)
class Utterance:
    """One request for speech.

    reference: float32 (T,) at `reference_sample_rate` Hz, mono; without `reference_text` the voice is cloned
    cross-lingually. speaker: a registered voice, instead of a recording. instruct_text: how to speak. parameters:
    request parameters such as `seed`. pieces: the text while it is being written, after `target_text`; for streamed
    requests.
    """

    target_text: str
    reference: np.ndarray | None = None
    reference_text: str | None = None
    parameters: Parameters = field(default_factory=dict)
    speaker: str | None = None
    instruct_text: str | None = None
    pieces: TextPieces | None = field(default=None, repr=False)
    reference_sample_rate: int = PROMPT_SAMPLE_RATE

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

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "Utterance":
        """Return the request of a command line, see `add_voice_arguments`.

        Raise ClientError if there is no text, the recording cannot be read or a value cannot be sent.
        """
        if args.target_text is None:
            raise ClientError("no text to speak: add --target-text")
        recording = None if args.reference_audio is None else read_reference(args.reference_audio)
        try:
            return cls(
                target_text=args.target_text,
                **of_recording(recording),
                reference_text=args.reference_text or None,
                parameters=request_parameters(args),
                speaker=args.speaker or None,
                instruct_text=args.instruct_text or None,
            )
        except ValueError as error:
            raise ClientError(str(error)) from None

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


def waveform_of(result: Any) -> np.ndarray | None:
    """Return a response's audio, None if it has none. Log its warning, so that commands print it to standard error."""
    if (warning := result.as_numpy(WARNING)) is not None:
        logger.warning("%s", warning.item().decode())
    return result.as_numpy(WAVEFORM)


def timeline_of(result: Any) -> list[tuple[str, float]]:
    """Return the stages that the server has reached, in seconds since it received the request; none if it sends none.

    The names are those of `cosyvoice_triton.orchestrator.callbacks.OnStage`.
    """
    if (timeline := result.as_numpy(TIMELINE)) is None:
        return []
    return [(stage, milliseconds / 1000) for stage, milliseconds in json.loads(timeline.item())]


@dataclass(frozen=True)
class AudioPart:
    """One response: float32 (N,), and the text and samples of each segment that ends with it, "" for a pause.

    Segments are only sent if the request parameter `segments` is true; in order, they are all samples of an answer.
    """

    waveform: np.ndarray
    segments: list[tuple[str, int]] = field(default_factory=list)
    warning: str = ""

    @classmethod
    def of(cls, result: Any) -> "AudioPart":
        """Return the part that a response of tritonclient has; its warning is logged."""
        waveform, segments = waveform_of(result), result.as_numpy(SEGMENTS)
        warning = result.as_numpy(WARNING)
        return cls(
            np.zeros(0, np.float32) if waveform is None else waveform.reshape(-1),  # (1, N) -> (N,)
            [] if segments is None else [(text, samples) for text, samples in json.loads(segments.item())],
            "" if warning is None else warning.item().decode(),
        )


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


class Recorder:
    """Collects the chunks of one answer and their arrival times. The clock starts at construction, or at `start`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, start: float | None = None) -> None:
        self._clock = clock
        self._start = clock() if start is None else start
        self._chunks: list[np.ndarray] = []
        self.arrivals: list[float] = []  # seconds after the start, one per chunk with audio
        self.timeline: list[tuple[str, float]] = []  # see timeline_of

    def take(self, result: Any) -> None:
        """Record one response: its audio, its warning, its timeline."""
        now = self._clock()
        self.timeline += timeline_of(result)
        self._add(waveform_of(result), now)

    def add(self, waveform: np.ndarray | None) -> None:
        """Record the waveform of one response, (N,) or (1, N); a response without samples is not a chunk."""
        self._add(waveform, self._clock())

    def _add(self, waveform: np.ndarray | None, now: float) -> None:
        if waveform is not None and waveform.size:
            self._chunks.append(waveform.reshape(-1))
            self.arrivals.append(now - self._start)

    @property
    def samples(self) -> list[int]:
        """Return the number of samples of each chunk."""
        return [chunk.size for chunk in self._chunks]

    @property
    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return self._clock() - self._start

    def finish(self) -> "SpeechResult":
        """Return the complete answer. Raise ClientError if there were no samples."""
        total = self.elapsed
        if not self._chunks:
            raise ClientError("the server ended the request without audio; see its log for the reason")
        return SpeechResult(np.concatenate(self._chunks), tuple(self.arrivals), total)


@dataclass(frozen=True)
class SpeechResult:
    """One answered request: float32 (N,) at 24 kHz and its times in seconds since the request was sent."""

    waveform: np.ndarray
    arrivals: tuple[float, ...]
    total: float

    @property
    def seconds(self) -> float:
        return float(self.waveform.size / SAMPLE_RATE)

    @property
    def first_chunk(self) -> float:
        return self.arrivals[0]

    @property
    def real_time_factor(self) -> float:
        return self.total / self.seconds

    def save(self, path: Path) -> None:
        """Write a 16-bit WAV at 24 kHz; ClientError if the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_audio(path, self.waveform, SAMPLE_RATE)
        except (OSError, RuntimeError) as error:
            raise ClientError(f"cannot write {path}: {error}; choose another file") from None

    def summary(self) -> str:
        """Return the measurements of the request, one per line."""
        return "\n".join(
            (
                f"first chunk after  {self.first_chunk * 1000:8.0f} ms",
                f"total time         {self.total:8.2f} s",
                f"audio length       {self.seconds:8.2f} s in {len(self.arrivals)} chunk(s)",
                f"real-time factor   {self.real_time_factor:8.3f}",
            )
        )


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of all clients, with upstream's names."""
    add_voice_arguments(parser)
    parser.add_argument("--output-audio", type=Path, default=Path("output.wav"), help="24 kHz, 16-bit WAV")


def add_voice_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the text, the voice, the model and request parameters."""
    parser.add_argument("--target-text", help="the text to speak")
    parser.add_argument("--reference-audio", type=Path, help="the voice: any rate and channel count, 0.5 to 30 s")
    parser.add_argument("--reference-text", help="transcript of the reference audio; without it: cross-lingual cloning")
    parser.add_argument("--speaker", help="a registered voice, instead of --reference-audio")
    parser.add_argument("--instruct-text", help='how to speak, e.g. "Speak slowly."; not with --reference-text')
    parser.add_argument("--cross-lingual", action="store_true", help="keep a --speaker's timbre but not their language")
    parser.add_argument("--language", help="of the text: zh, en, ja, ko, de, fr, es, it, ru; without it: guessed")
    default, others = stacks.DEFAULT.orchestrator, stacks.orchestrators()[1:]
    parser.add_argument("--model-name", default=default, help=" or ".join([f"{default} (default)", *others]))
    parser.add_argument("--seed", type=int, help="makes the speech tokens reproducible")
    parser.add_argument(
        "--parameter",
        type=parameter,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another request parameter, e.g. sampling=triton or max_tokens=250; may be repeated",
    )
    parser.add_argument(
        "--timeout", type=positive_number, default=120.0, help="seconds until the answer must be complete"
    )


def request_parameters(args: argparse.Namespace) -> Parameters:
    """Return the request parameters of a command line, see `add_voice_arguments`."""
    named = {"seed": args.seed, "cross_lingual": args.cross_lingual or None, "language": args.language}
    return {name: value for name, value in named.items() if value is not None} | dict(args.parameter)


def parameter(text: str) -> tuple[str, int | str | bool]:
    """Parse a request parameter of a command line, NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    if value in ("true", "false"):
        return name, value == "true"
    try:
        return name, int(value)
    except ValueError:
        return name, value  # also fractions: Triton 2.51 has no float parameters, so the server parses text


def positive_number(text: str) -> float:
    """Parse a number of a command line that is above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return number


def unreachable(server: str, reason: object) -> ClientError:
    """Return the error for a server that does not answer at `server`."""
    return ClientError(
        f"no tritonserver answers at {server} ({one_line(reason)}): start one with `cosyvoice-triton serve`, "
        "or correct the address, such as localhost:8001 for gRPC"
    )


def not_served(server: str, model: str) -> ClientError:
    """Return the error for a server that is running but does not have the model."""
    return ClientError(
        f"{server} does not serve the model '{model}': choose another with --model-name, "
        f"or start its stack with {' or '.join(f'`cosyvoice-triton serve --stack {name}`' for name in stacks.names())}"
    )


def unavailable(server: str, reason: object) -> ClientError:
    """Return the error for a broken connection, or a server that is temporarily unavailable."""
    return ClientError(f"{server} cannot answer ({one_line(reason)}): check that it is running, and its log")


def timed_out(server: str, seconds: float) -> ClientError:
    """Return the error for an answer that was not complete in time."""
    return ClientError(f"no complete answer from {server} within {seconds:g} s: retry, or raise --timeout")


def streams_only(model: str) -> ClientError:
    """Return the error for an offline request to a model with the decoupled policy."""
    return ClientError(
        f"'{model}' is served for streaming: use `cosyvoice-triton client-grpc --mode streaming`, "
        "or serve it for offline requests with `cosyvoice-triton serve --offline`"
    )


def refused(reason: object) -> ClientError:
    """Return the error with the server's own message, which names the offending value."""
    return ClientError(f"the server answered with an error: {one_line(reason)}")


def one_line(text: object) -> str:
    return " ".join(str(text).splitlines())
