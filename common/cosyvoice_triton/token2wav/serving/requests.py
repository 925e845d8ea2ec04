"""A request to a token2wav model, and how it is read from tensors, which are named and shaped as upstream's.

Arrays only: nothing here depends on Triton.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

import numpy as np

from cosyvoice_triton import constants
from cosyvoice_triton.batches import scalar
from cosyvoice_triton.voice.prompt import Prompt

logger = logging.getLogger(__name__)

# Seconds of audio that a listener may still have: far above what any has, because it goes into sums that are published.
MAX_AUDIO_LEFT = 3600.0
TEST_STREAM = "test"  # the id of a service's own tests; no client can name it

Tensors = Mapping[str, np.ndarray]
Reply = Callable[[np.ndarray | BaseException], object]

PROMPT_TENSORS = ("prompt_speech_tokens", "prompt_speech_feat", "prompt_spk_embedding")


class Kind(Enum):
    """What a request asks for."""

    RESERVE = auto()  # a place for a listener, and nothing else yet
    OPEN = auto()  # a stream in a voice, without audio
    CHUNK = auto()  # the audio of a chunk, of a stream that it may open
    WHOLE = auto()  # the audio of a whole utterance
    ABORT = auto()  # the end of a stream, without audio


@dataclass(eq=False)
class Token2WavRequest:
    """One request of a stream, or a whole utterance.

    stream_id: which stream, as errors name it: "sequence 17" by its correlation id or "request abc" by its request id.
    start: opens the stream in the voice of `prompt`; `tokens` may be empty, then only the prompt cache is built. None:
        opens the stream unless it is live. Without voice and tokens it reserves a place for the listener; the stream's
        next request then opens it.
    end: closes the stream. Unless `final`, the stream is dropped and no audio is made (an abort).
    final: the tokens are the stream's last (tensor `finalize`). None on a request that both starts and ends a stream
        and has no offset: a whole utterance, rendered at once.
    speed: speaking rate of a whole utterance, or with `start` of the stream.
    audio_left: seconds of audio that the listener still has when the stream starts, if it continues what they are
        listening to; None if they have heard nothing yet. It counts only if a stream of the same id has just ended.
        With a later chunk: what they have of the stream so far, if its sender has cut something.
    reply, is_cancelled: see `Token2WavService.submit`, which sets them. arrived, arrived_at: its number in the order of
        arrival, and when that was.
    """

    stream_id: str
    start: bool | None
    end: bool
    tokens: np.ndarray  # (n,) int64 ids 0..6560
    prompt: Prompt | None = None
    offset: int | None = None
    final: bool | None = None
    speed: float = 1.0
    audio_left: float | None = None
    reply: Reply = lambda _: None
    is_cancelled: Callable[[], bool] = lambda: False
    arrived: int = 0
    arrived_at: float = 0.0

    @cached_property
    def kind(self) -> Kind:
        """Return what it asks for: as it arrives, and so also after `start` is changed."""
        if self.end and not self.final:
            return Kind.WHOLE if self.start and self.final is None and self.offset is None else Kind.ABORT
        if self.start and not self.end and self.prompt is None and not len(self.tokens):
            return Kind.RESERVE
        return Kind.CHUNK if len(self.tokens) or self.final else Kind.OPEN

    @property
    def first_of_listener(self) -> bool:
        """Return whether it may be the first request of somebody who has heard nothing yet. The start of a later
        segment belongs to one who has, and nobody listens to a whole utterance yet."""
        starts = self.start is not False and self.kind not in (Kind.WHOLE, Kind.ABORT)
        return starts and self.audio_left is None and self.stream_id != TEST_STREAM

    @property
    def voice(self) -> Prompt:
        """Return the voice that the request brings. ValueError if there is none."""
        if self.prompt is None:
            raise ValueError(
                "the first request of a stream needs a voice: prompt_speech_tokens, prompt_speech_feat and "
                "prompt_spk_embedding"
            )
        return self.prompt

    def check(self, voice: Prompt | None) -> None:
        """Raise ValueError for another voice than `voice`, with which the stream began; None: it has not begun."""
        own = self.prompt
        if own is None or voice is None:
            return
        if not (np.array_equal(own.tokens, voice.tokens) and np.array_equal(own.embedding, voice.embedding)):
            raise ValueError(f"{self.stream_id} began with another prompt: two streams have the same id")

    def client_has_gone(self) -> bool:
        """Return whether Triton says that the client has disconnected."""
        try:
            return self.is_cancelled()
        except Exception:  # an error with one request must not end the other streams
            logger.exception("cannot find out whether a client has disconnected")
            return False

    def answer(self, result: np.ndarray | BaseException) -> None:
        """Reply; never raises."""
        try:
            self.reply(result)
        except Exception:  # a receiver's error must not end the other streams
            logger.exception("a reply failed")


def read_request(
    tensors: Tensors,
    first_speech_id: int,
    *,
    correlation_id: int | str,
    start: bool,
    end: bool,
    request_id: str,
    prompt: Prompt | None = None,
) -> Token2WavRequest:
    """Return the request in `tensors`, which are given by name and with the batch dimension.

    target_speech_tokens (1, n), prompt_speech_tokens (1, P), prompt_speech_feat (1, T, 80), prompt_spk_embedding
    (1, 192), token_offset, finalize, speed and audio_left (1, 1). `prompt`: the voice, if the caller made it from a
    recording.

    With a correlation id the request belongs to a sequence of Triton's, of which `start` and `end` are the flags.
    Without one (0 or empty) it is a request as upstream's BLS sends it, with the voice each time: a whole utterance if
    it has neither token_offset nor finalize; otherwise the next chunk of the stream that is named by the request id,
    which begins at token_offset 0, or, without the tensor token_offset, with the first request. finalize ends it.

    Raises ValueError naming what is missing or malformed.
    """
    speed = float(scalar(tensors, "speed", 1.0))
    if not constants.MIN_SPEED <= speed <= constants.MAX_SPEED:
        raise ValueError(f"speed {speed} is not in {constants.MIN_SPEED}..{constants.MAX_SPEED}")
    offset: int | None = scalar(tensors, "token_offset")
    final: bool | None = scalar(tensors, "finalize")
    opens: bool | None = start
    stream_id = f"sequence {correlation_id}"
    if not correlation_id:
        whole = offset is None and final is None
        if not whole and not request_id:
            raise ValueError("a request with token_offset or finalize needs a correlation id or a request id")
        stream_id = f"{'utterance' if whole else 'request'} {request_id}"
        opens, end = (True, True) if whole else (None if offset is None else offset == 0, bool(final))
    return Token2WavRequest(
        stream_id=stream_id,
        start=opens,
        end=end,
        tokens=_target(tensors, first_speech_id),
        prompt=prompt or _prompt(tensors, first_speech_id),
        offset=offset,
        final=final,
        speed=speed,
        audio_left=_audio_left(tensors) if "audio_left" in tensors else None,
    )


def _audio_left(tensors: Tensors) -> float:
    seconds = float(scalar(tensors, "audio_left"))
    if not 0 <= seconds <= MAX_AUDIO_LEFT:  # also what is not a number
        raise ValueError(
            f"audio_left {seconds} is not in 0..{MAX_AUDIO_LEFT:g}, the seconds of audio that a listener still has"
        )
    return seconds


def _target(tensors: Tensors, first_speech_id: int) -> np.ndarray:
    """Return the tokens to render. Bounded, because one utterance of any length would hold up all others."""
    tokens = _ids(tensors, "target_speech_tokens", first_speech_id)
    if len(tokens) > constants.MAX_STREAM_TOKENS:
        raise ValueError(
            f"target_speech_tokens holds {len(tokens)} tokens; at most {constants.MAX_STREAM_TOKENS} are rendered, "
            f"{constants.MAX_STREAM_TOKENS // constants.TOKEN_RATE} s of speech: "
            "send a longer text as several utterances"
        )
    return tokens


def _ids(tensors: Tensors, name: str, first_speech_id: int) -> np.ndarray:
    """Convert ids (1, n) in the LLM's vocabulary to (n,) int64 in 0..6560."""
    if (array := tensors.get(name)) is None:
        raise ValueError(f"{name} is missing")
    if array.ndim != 2 or array.shape[0] != 1:
        raise ValueError(f"{name} must have the shape [1, n], not {list(array.shape)}")
    return array[0].astype(np.int64) - first_speech_id


def _prompt(tensors: Tensors, first_speech_id: int) -> Prompt | None:
    if tensors.keys().isdisjoint(PROMPT_TENSORS):
        return None
    if missing := [name for name in PROMPT_TENSORS if name not in tensors]:
        raise ValueError(f"a voice needs {', '.join(PROMPT_TENSORS)}; {', '.join(missing)} is missing")
    mel, embedding = tensors["prompt_speech_feat"], tensors["prompt_spk_embedding"]
    count, frames = tensors["prompt_speech_tokens"].size, mel.size // max(1, mel.shape[-1])
    if min(count, frames // constants.TOKEN_MEL_RATIO) > constants.MAX_PROMPT_TOKENS:
        raise ValueError(
            f"a voice of {count} prompt_speech_tokens and {frames} frames of prompt_speech_feat; at most "
            f"{constants.MAX_PROMPT_TOKENS} tokens are used, {constants.MAX_REFERENCE_SECONDS:g} s: "
            "send a shorter recording"
        )
    return Prompt.aligned(
        _ids(tensors, "prompt_speech_tokens", first_speech_id),
        mel.reshape(-1, mel.shape[-1]).astype(np.float32),  # (1, T, 80) -> (T, 80)
        embedding.reshape(-1).astype(np.float32),  # (1, 192) -> (192,)
    )
