"""The port of `synthesis` to token2wav: streams as sequences of requests, and the replicas that serve them.

A stream is a sequence: START with the voice and no tokens, then the chunks, and END exactly once, either with the final
chunk or alone if the stream is aborted. The first stream of a listener has one request more: START without the voice,
which reserves a place, and then the voice. How a request reaches a model is its `Send`: over Triton or
to a service of the same process (speaker/engines.py).
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Any, Protocol

import numpy as np

from cosyvoice_triton.errors import ModelDownError, OverloadedError, UnavailableError
from cosyvoice_triton.orchestrator.chunking import Hop
from cosyvoice_triton.token2wav.serving.requests import Token2WavRequest
from cosyvoice_triton.voice.prompt import Prompt

logger = logging.getLogger(__name__)

# Sends a request to a model and returns its single answer, as `triton_io.call`. The batch dimension is 1.
Call = Callable[..., Awaitable[dict[str, np.ndarray]]]
# Sends a request of the sequence with that id, of 63 bits, and returns its waveform (N,) float32.
Send = Callable[[int, Token2WavRequest], Awaitable[np.ndarray]]


def send_over_triton(call: Call, model: str, first_speech_id: int) -> Send:
    """Return what sends requests to the token2wav model of that name, as the tensors that `read_request` reads: tokens
    (n,) as ids (1, n) of the LLM."""

    async def send(sequence: int, request: Token2WavRequest) -> np.ndarray:
        inputs: dict[str, np.ndarray] = {}
        inputs["target_speech_tokens"] = (request.tokens + first_speech_id).astype(np.int32)[None]
        if (prompt := request.prompt) is not None:
            inputs["prompt_speech_tokens"] = (prompt.tokens + first_speech_id).astype(np.int32)[None]
            inputs["prompt_speech_feat"] = prompt.mel.astype(np.float16)[None]
            inputs["prompt_spk_embedding"] = prompt.embedding.astype(np.float16)[None]
        if request.final is not None:
            inputs["finalize"] = np.array([[request.final]])
        if request.offset is not None:
            inputs["token_offset"] = np.array([[request.offset]], np.int32)
        if request.speed != 1.0:
            inputs["speed"] = np.array([[request.speed]], np.float32)
        if request.audio_left is not None:
            inputs["audio_left"] = np.array([[request.audio_left]], np.float32)
        flags = {"start": bool(request.start), "end": request.end}
        return (await call(model, inputs, ["waveform"], correlation_id=sequence, **flags))["waveform"].reshape(-1)

    return send


FAILED_POLL_SECONDS = 0.25


class Token2WavPort(Protocol):
    """Speech tokens to audio, by flow and vocoder."""

    def open(self, speed: float = 1.0) -> "Token2WavSequence":
        """Return a stream for a new listener, at `speed` times the usual rate."""
        ...

    async def offline(self, prompt: Prompt, tokens: Sequence[int], speed: float) -> np.ndarray:
        """Return audio (N,) float32 of a whole utterance, at `speed` times the usual rate."""
        ...


class Token2WavReplicas:
    """Token2wav models that are replicas: a listener is served by one of them.

    models: how to send to each, by name. failed: whether a model cannot serve any request. If it is one of several,
    calls in flight end with ModelDownError then; Triton leaves them unanswered.
    cumulative: a chunk is sent with all tokens before it and its offset (token2wav, whose flow computes a window of
    past tokens again); otherwise with its own tokens alone (token2wav_dit, which keeps caches).
    """

    def __init__(
        self, models: Mapping[str, Send], *, cumulative: bool, failed: Callable[[str], bool] = lambda model: False
    ):
        self._models = models
        self.live = dict.fromkeys(models, 0)  # streams by model
        self.failed = failed
        self.cumulative = cumulative

    def open(self, speed: float = 1.0) -> "Token2WavSequence":
        return Token2WavSequence(self, self.by_load()[0], speed)

    def by_load(self) -> list[str]:
        """Return the models that have not failed, those with the fewest streams first; all if all have failed."""
        working = filterfalse(self.failed, self.live)
        return sorted(working, key=self.live.__getitem__) or sorted(self.live, key=self.live.__getitem__)

    async def offline(self, prompt: Prompt, tokens: Sequence[int], speed: float) -> np.ndarray:
        async def ask(model: str) -> np.ndarray:
            self.live[model] += 1
            try:
                sequence = new_sequence_id()
                whole = np.asarray(tokens, np.int64)
                request = Token2WavRequest(f"sequence {sequence}", True, True, whole, prompt, speed=speed)
                return await self.request(model, sequence, request)
            finally:
                self.live[model] -= 1

        return await self.first_accepted(ask)

    async def first_accepted(self, ask: Callable[[str], Awaitable[np.ndarray]]) -> np.ndarray:
        """Return the answer of the first model that neither refuses nor is down. Raises the first refusal if there is
        none."""
        errors: list[UnavailableError] = []
        for model in self.by_load():
            try:
                return await ask(model)
            except UnavailableError as error:
                if not self.is_for_another(model, error):
                    raise
                errors.append(error)
        raise next((error for error in errors if isinstance(error, OverloadedError)), errors[0])

    def is_for_another(self, model: str, error: UnavailableError) -> bool:
        """Return whether a request that `model` answered so may be sent to another one."""
        return isinstance(error, (OverloadedError, ModelDownError)) or self.failed(model)

    async def request(self, model: str, sequence: int, request: Token2WavRequest) -> np.ndarray:
        """Return the waveform (N,) of the answer."""
        answer = self._models[model](sequence, request)
        if len(self.live) == 1:
            return await answer
        waiting = asyncio.ensure_future(answer)
        waiting.add_done_callback(_retrieve_error)
        try:
            while not waiting.done():
                if self.failed(model):
                    raise ModelDownError(f"{model} has failed")
                await asyncio.wait({waiting}, timeout=FAILED_POLL_SECONDS)
            return waiting.result()
        finally:
            waiting.cancel()


def new_sequence_id() -> int:
    """Return a random id of 63 bits, never 0, which means "no sequence" to Triton. It is never a client's."""
    return 1 + secrets.randbelow(2**63 - 1)


def _retrieve_error(answer: "asyncio.Future[Any]") -> None:
    """Retrieve an answer's error, which asyncio otherwise logs with a traceback: "exception was never retrieved"."""
    if not answer.cancelled():
        answer.exception()


@dataclass(eq=False)
class Token2WavSequence:
    """One stream, rendered chunk by chunk: `start` once, then the hops in order, then `abort`. speed: of the speech.

    Calls are made one after another, but `abort` may be called while another is in flight: the place is free for the
    next listener before the chunk is done that was being rendered.
    """

    replicas: Token2WavReplicas
    model: str
    speed: float = 1.0
    sequence: int = field(default_factory=new_sequence_id)
    _open: bool = False
    _last: "asyncio.Future[np.ndarray] | None" = None  # the answer to the last request
    _starts: bool = False  # whether that request is a START

    async def reserve(self) -> None:
        """Reserve a place for a new listener, before `start`. OverloadedError, soon, if there is none."""

        async def ask(model: str) -> np.ndarray:
            self.model = model
            try:
                return await self._send(start=True)
            except UnavailableError as error:
                if self.replicas.is_for_another(model, error):
                    self.replicas.live[model] -= self._open
                    self._open = False  # a further call would only delay the refusal
                raise

        await self.replicas.first_accepted(ask)

    async def start(self, prompt: Prompt, audio_left: float | None) -> None:
        """Prefill the prompt. audio_left: seconds that the listener still has of earlier segments; None: none yet."""
        left = None if audio_left is None else max(0.0, audio_left)
        await self._send(start=not self._open, prompt=prompt, speed=self.speed, audio_left=left)

    async def restart(self, prompt: Prompt, audio_left: float | None) -> None:
        """Begin anew, with the place that the listener has. audio_left: as of `start`."""
        await self._send(start=True, prompt=prompt, speed=self.speed, audio_left=max(0.0, audio_left or 0.0))

    async def render(self, tokens: Sequence[int], hop: Hop, audio_left: float | None = None) -> np.ndarray:
        """Return audio (N,) float32 of `hop`; `tokens` are all so far, at least `hop.end_of_context`. audio_left:
        seconds that the listener has, where that is not what token2wav rendered."""
        left = None if audio_left is None else max(0.0, audio_left)
        begin = 0 if self.replicas.cumulative else hop.offset
        chunk = tokens[begin : hop.end_of_context]
        return await self._send(end=hop.final, final=hop.final, tokens=chunk, offset=hop.offset, audio_left=left)

    def following(self) -> "Token2WavSequence":
        """Return a stream for the listener's next segment: on the same model, which has the voice's prompt cache,
        unless it has failed. The id is the same, by which the model knows a listener whom it has admitted."""
        if self.replicas.failed(self.model):
            return self.replicas.open(self.speed)
        return Token2WavSequence(self.replicas, self.model, self.speed, self.sequence)

    async def abort(self) -> None:
        """Free what is still held; a no-op before the first call and after the final hop is answered. Never raises."""
        # In a task of its own: a client who leaves meanwhile cancels its waiter, and END must be sent all the same.
        await asyncio.shield(asyncio.ensure_future(self._abort()))

    async def _abort(self) -> None:
        if self._last is None:
            return
        if self._starts:  # if END overtook it, it would take a place that nobody gives back
            await asyncio.wait({self._last})
        if not self._open and self._last.done():
            return
        try:
            await self._send(end=True)
        except (ValueError, RuntimeError) as error:
            # It was never opened or is already freed; the error worth reporting is the one that ended the stream.
            logger.warning("stream %d could not be closed: %s", self.sequence, error)

    async def _send(
        self,
        *,
        start: bool = False,
        end: bool = False,
        tokens: Sequence[int] = (),
        final: bool = False,
        offset: int = 0,
        **fields: Any,
    ) -> np.ndarray:
        # Set before the answer is known: even a request that fails has opened or ended the sequence.
        self.replicas.live[self.model] += (not end) - self._open
        self._open = not end
        request = Token2WavRequest(
            f"sequence {self.sequence}",
            start,
            end,
            np.asarray(tokens, np.int64),
            final=final,
            offset=offset if self.replicas.cumulative else None,
            **fields,
        )
        answer = self.replicas.request(self.model, self.sequence, request)
        self._last, self._starts = asyncio.ensure_future(answer), start  # what was sent cannot be withdrawn
        self._last.add_done_callback(_retrieve_error)  # its waiter may have been cancelled
        return await asyncio.shield(self._last)
