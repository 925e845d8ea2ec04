"""The ports of `synthesis` that call other models of the same Triton, through an injected `call`.

A token2wav stream is a Triton sequence: START with the prompt and no tokens, then the chunks, and END exactly once,
either with the final chunk or alone if the stream is aborted. The first stream of a listener has one request more:
START without the prompt, which reserves a place, and then the prompt. Its correlation id is generated here, never by a
client.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.errors import LostAnswerError, ModelDownError, OverloadedError, UnavailableError
from cosyvoice_triton.orchestrator.chunking import Hop
from cosyvoice_triton.voice.audio import at_rate
from cosyvoice_triton.voice.encoders import reference_mel
from cosyvoice_triton.voice.prompt import Prompt, Recording

logger = logging.getLogger(__name__)

Tensors = dict[str, np.ndarray]


class Call(Protocol):
    """Sends a request to a model and returns its single answer, as `triton_io.call`. The batch dimension is 1."""

    def __call__(
        self,
        model: str,
        inputs: Mapping[str, np.ndarray],
        outputs: Sequence[str],
        *,
        correlation_id: int = 0,
        start: bool = False,
        end: bool = False,
    ) -> Awaitable[Tensors]: ...


class TritonPromptEncoder:
    """Calls `audio_tokenizer` and `speaker_embedding`, answered from the response cache for a known recording.

    `first_speech_id`: id of <|s_0|> in the LLM's vocabulary; tokens travel between models as ids of the LLM.
    `mel_max_hz`: see `Stack`.
    """

    def __init__(self, call: Call, first_speech_id: int, mel_max_hz: float):
        self._call = call
        self._first_speech_id = first_speech_id
        self._mel_max_hz = mel_max_hz
        # The first call loads the filters: not in a request.
        reference_mel(Recording(np.zeros(PROMPT_SAMPLE_RATE, np.float32)), mel_max_hz)

    async def tokens(self, recording: Recording) -> np.ndarray:
        tokens = await self._ask("audio_tokenizer", recording, "prompt_speech_tokens")
        return tokens.reshape(-1).astype(np.int64) - self._first_speech_id

    async def mel(self, recording: Recording) -> np.ndarray:
        return await asyncio.to_thread(reference_mel, recording, self._mel_max_hz)

    async def embedding(self, recording: Recording) -> np.ndarray:
        return (await self._ask("speaker_embedding", recording, "prompt_spk_embedding")).reshape(-1)

    async def _ask(self, model: str, recording: Recording, output: str) -> np.ndarray:
        """Return `model`'s `output` for a recording. Only the recording is sent, so that equal ones hit the cache."""
        wav = recording.wav
        if recording.rate != PROMPT_SAMPLE_RATE:  # else a thread would take longer than the work
            wav = await asyncio.to_thread(at_rate, recording, PROMPT_SAMPLE_RATE)
        inputs = {"reference_wav": wav[None], "reference_wav_len": np.array([[len(wav)]], np.int32)}
        try:
            return (await self._call(model, inputs, [output]))[output]
        except LostAnswerError:  # the response cache keeps a failure: padding makes it a different request
            padded = inputs | {"reference_wav": np.pad(wav, (0, 1))[None]}
            return (await self._call(model, padded, [output]))[output]


FAILED_POLL_SECONDS = 0.25


class TritonToken2Wav:
    """The token2wav models of a server, which are replicas: a listener is served by one of them.

    `failed`: whether a model cannot serve any request. If it is one of several, calls in flight end with ModelDownError
    then; Triton leaves them unanswered.
    `cumulative`: a chunk is sent with all tokens before it and its offset (token2wav, whose flow computes a window of
    past tokens again); otherwise with its own tokens alone (token2wav_dit, which keeps caches).
    """

    def __init__(
        self,
        call: Call,
        models: Sequence[str],
        *,
        cumulative: bool,
        first_speech_id: int,
        failed: Callable[[str], bool] = lambda model: False,
    ):
        self._call = call
        self.live = dict.fromkeys(models, 0)  # streams by model
        self.failed = failed
        self._cumulative = cumulative
        self._first_speech_id = first_speech_id

    def open(self) -> "TritonToken2WavStream":
        return TritonToken2WavStream(self, self.by_load()[0])

    def by_load(self) -> list[str]:
        """Return the models that have not failed, those with the fewest streams first; all if all have failed."""
        working = [model for model in self.live if not self.failed(model)]
        return sorted(working or self.live, key=self.live.__getitem__)

    async def offline(self, prompt: Prompt, tokens: Sequence[int], speed: float) -> np.ndarray:
        inputs = self.target_inputs(tokens) | self.prompt_inputs(prompt) | {"speed": np.array([[speed]], np.float32)}

        async def whole(model: str) -> np.ndarray:
            self.live[model] += 1
            try:
                return await self.request(model, inputs, new_correlation_id(), start=True, end=True)
            finally:
                self.live[model] -= 1

        return await self.first_accepted(whole)

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

    async def request(
        self, model: str, inputs: Tensors, correlation_id: int, *, start: bool = False, end: bool = False
    ) -> np.ndarray:
        """Return the waveform (N,) of the answer."""
        answer = self._call(model, inputs, ["waveform"], correlation_id=correlation_id, start=start, end=end)
        outputs = await (answer if len(self.live) == 1 else self._unless_failed(model, answer))
        return outputs["waveform"].reshape(-1)

    async def _unless_failed(self, model: str, answer: Awaitable[Tensors]) -> Tensors:
        waiting = asyncio.ensure_future(answer)
        waiting.add_done_callback(_look_at)
        try:
            while not waiting.done():
                if self.failed(model):
                    raise ModelDownError(f"{model} has failed")
                await asyncio.wait({waiting}, timeout=FAILED_POLL_SECONDS)
            return waiting.result()
        finally:
            waiting.cancel()

    def target_inputs(self, tokens: Sequence[int]) -> Tensors:
        return {"target_speech_tokens": self._ids(tokens)}

    def prompt_inputs(self, prompt: Prompt) -> Tensors:
        return {
            "prompt_speech_tokens": self._ids(prompt.tokens),
            "prompt_speech_feat": prompt.mel.astype(np.float16)[None],
            "prompt_spk_embedding": prompt.embedding.astype(np.float16)[None],
        }

    def hop_inputs(self, tokens: Sequence[int], hop: Hop) -> Tensors:
        """Return the inputs of one chunk; `tokens` are all of the utterance so far."""
        begin = 0 if self._cumulative else hop.offset
        inputs = self.target_inputs(tokens[begin : hop.end_of_context]) | {"finalize": np.array([[hop.final]])}
        if self._cumulative:
            inputs["token_offset"] = np.array([[hop.offset]], np.int32)
        return inputs

    def _ids(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return speech ids (n,) as ids of the LLM's vocabulary (1, n)."""
        return np.asarray(tokens, np.int32)[None] + np.int32(self._first_speech_id)


def new_correlation_id() -> int:
    """Return a random id of 63 bits, never 0, which means "no sequence" to Triton."""
    return 1 + secrets.randbelow(2**63 - 1)


def _look_at(answer: "asyncio.Future[Any]") -> None:
    """Look at an answer's error, which asyncio otherwise logs with a traceback: "exception was never retrieved"."""
    if not answer.cancelled():
        answer.exception()


NO_TOKENS = Hop(0, 0, final=False)


class TritonToken2WavStream:
    """One sequence. Calls are made one after another, but `abort` may be called while another is in flight."""

    def __init__(self, token2wav: TritonToken2Wav, model: str, correlation_id: int | None = None):
        self._token2wav = token2wav
        self.model = model
        self._correlation_id = correlation_id or new_correlation_id()
        self._open = False
        self._in_flight: asyncio.Task[np.ndarray] | None = None

    async def reserve(self) -> None:
        async def ask(model: str) -> np.ndarray:
            self.model = model
            try:
                return await self._send(self._token2wav.hop_inputs([], NO_TOKENS), start=True)
            except UnavailableError as error:
                if self._token2wav.is_for_another(model, error):
                    self._set_open(False)  # a further call would only delay the refusal
                raise

        await self._token2wav.first_accepted(ask)

    async def start(self, prompt: Prompt, audio_left: float | None) -> None:
        inputs = self._token2wav.hop_inputs([], NO_TOKENS) | self._token2wav.prompt_inputs(prompt)
        if audio_left is not None:
            inputs["audio_left"] = np.array([[max(0.0, audio_left)]], np.float32)
        await self._send(inputs, start=not self._open)

    async def render(self, tokens: Sequence[int], hop: Hop) -> np.ndarray:
        return await self._send(self._token2wav.hop_inputs(tokens, hop), end=hop.final)

    def following(self) -> "TritonToken2WavStream":
        """Return a stream on the same model, which has the voice's prompt cache, unless it has failed. The id is the
        same, by which the model knows a listener whom it has admitted."""
        if self._token2wav.failed(self.model):
            return self._token2wav.open()
        return TritonToken2WavStream(self._token2wav, self.model, self._correlation_id)

    async def abort(self) -> None:
        # In a task of its own: a client who leaves meanwhile cancels its waiter, and END must be sent all the same.
        await asyncio.shield(asyncio.ensure_future(self._abort()))

    async def _abort(self) -> None:
        if self._in_flight is not None:
            await asyncio.wait({self._in_flight})
        if not self._open:
            return
        try:
            await self._send(self._token2wav.hop_inputs([], NO_TOKENS), end=True)
        except (ValueError, RuntimeError) as error:
            # It was never opened or is already freed; the error worth reporting is the one that ended the stream.
            logger.warning("stream %d could not be closed: %s", self._correlation_id, error)

    async def _send(self, inputs: Tensors, *, start: bool = False, end: bool = False) -> np.ndarray:
        # Set before the answer is known: even a request that fails has opened or ended the sequence.
        self._set_open(not end)
        # A request that was sent cannot be withdrawn. If only its waiter were cancelled, END could overtake it.
        self._in_flight = asyncio.ensure_future(
            self._token2wav.request(self.model, inputs, self._correlation_id, start=start, end=end)
        )
        self._in_flight.add_done_callback(_look_at)  # its waiter may have been cancelled
        return await asyncio.shield(self._in_flight)

    def _set_open(self, is_open: bool) -> None:
        self._token2wav.live[self.model] += is_open - self._open
        self._open = is_open
