"""The ports of `synthesis` that ask other models of the same Triton, through an injected `call`.

A vocoder stream is a sequence: START with the prompt and no tokens, then the chunks, and END exactly once, with the
final chunk or without one when the stream is given up. Its correlation id is made here and is never a client's.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol

import numpy as np

from common.constants import PROMPT_SAMPLE_RATE
from common.errors import LostAnswerError
from common.orchestrator.chunking import Chunk
from common.voice.encoders import reference_mel
from common.voice.prompt import Prompt

logger = logging.getLogger(__name__)

Tensors = dict[str, np.ndarray]


class Call(Protocol):
    """One request to a model with a single answer, as `triton_io.call`. Tensors carry the batch dimension 1."""

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
    """`audio_tokenizer` and `speaker_embedding`, both answered from Triton's cache for a voice it has met.

    `first_speech_id` is the id of the LLM's first speech token, which tokens carry between models.
    """

    def __init__(self, call: Call, first_speech_id: int):
        self._call = call
        self._first_speech_id = first_speech_id
        reference_mel(np.zeros(PROMPT_SAMPLE_RATE, np.float32))  # the first one loads the filters: not in a request

    async def tokens(self, wav: np.ndarray) -> np.ndarray:
        tokens = await self._ask("audio_tokenizer", wav, "prompt_speech_tokens")
        return tokens.reshape(-1).astype(np.int64) - self._first_speech_id

    async def mel(self, wav: np.ndarray) -> np.ndarray:
        return await asyncio.to_thread(reference_mel, wav)

    async def embedding(self, wav: np.ndarray) -> np.ndarray:
        return (await self._ask("speaker_embedding", wav, "prompt_spk_embedding")).reshape(-1)

    async def _ask(self, model: str, wav: np.ndarray, output: str) -> np.ndarray:
        """`model`'s `output` for a recording: nothing but the voice is sent, so that equal ones meet in the cache."""
        inputs = {"reference_wav": wav[None], "reference_wav_len": np.array([[len(wav)]], np.int32)}
        try:
            return (await self._call(model, inputs, [output]))[output]
        except LostAnswerError:  # one failure must not silence a voice for good: padding makes it another request
            padded = inputs | {"reference_wav": np.pad(wav, (0, 1))[None]}
            return (await self._call(model, padded, [output]))[output]


class TritonVocoder:
    """`token2wav` or `token2wav_dit`.

    `cumulative`: a chunk is sent with all tokens before it and its offset (token2wav, whose flow looks back);
    otherwise with its own tokens alone (token2wav_dit, which keeps caches).
    """

    def __init__(self, call: Call, model: str, *, cumulative: bool, first_speech_id: int):
        self._call = call
        self._model = model
        self._cumulative = cumulative
        self._first_speech_id = first_speech_id

    def open(self, prompt: Prompt) -> "TritonVocoderStream":
        return TritonVocoderStream(self, prompt)

    async def offline(self, prompt: Prompt, tokens: Sequence[int], speed: float) -> np.ndarray:
        inputs = self.target(tokens) | self.voice(prompt) | {"speed": np.array([[speed]], np.float32)}
        return await self.render(inputs, new_correlation_id(), start=True, end=True)

    async def render(
        self, inputs: Tensors, correlation_id: int, *, start: bool = False, end: bool = False
    ) -> np.ndarray:
        outputs = await self._call(
            self._model, inputs, ["waveform"], correlation_id=correlation_id, start=start, end=end
        )
        return outputs["waveform"].reshape(-1)

    def target(self, tokens: Sequence[int]) -> Tensors:
        return {"target_speech_tokens": self._ids(tokens)}

    def voice(self, prompt: Prompt) -> Tensors:
        return {
            "prompt_speech_tokens": self._ids(prompt.tokens),
            "prompt_speech_feat": prompt.mel.astype(np.float16)[None],
            "prompt_spk_embedding": prompt.embedding.astype(np.float16)[None],
        }

    def part(self, tokens: Sequence[int], chunk: Chunk) -> Tensors:
        """Inputs of one chunk, `tokens` being all of the utterance so far."""
        begin = 0 if self._cumulative else chunk.offset
        inputs = self.target(tokens[begin : chunk.end_of_context]) | {"finalize": np.array([[chunk.final]])}
        if self._cumulative:
            inputs["token_offset"] = np.array([[chunk.offset]], np.int32)
        return inputs

    def _ids(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """(n,) -> (1, n) in the LLM's vocabulary."""
        return np.asarray(tokens, np.int32)[None] + np.int32(self._first_speech_id)


def new_correlation_id() -> int:
    """Random, 63 bits, never 0, which means "no sequence" to Triton."""
    return 1 + secrets.randbelow(2**63 - 1)


NO_TOKENS = Chunk(0, 0, final=False)


class TritonVocoderStream:
    """One sequence. Calls come one after another; `abort` may come while one is under way."""

    def __init__(self, vocoder: TritonVocoder, prompt: Prompt):
        self._vocoder = vocoder
        self._prompt = prompt
        self._correlation_id = new_correlation_id()
        self._open = False
        self._under_way: asyncio.Task[np.ndarray] | None = None

    async def start(self) -> None:
        await self._send(self._vocoder.part([], NO_TOKENS) | self._vocoder.voice(self._prompt), start=True)

    async def chunk(self, tokens: Sequence[int], chunk: Chunk) -> np.ndarray:
        return await self._send(self._vocoder.part(tokens, chunk), end=chunk.final)

    async def abort(self) -> None:
        if self._under_way is not None:
            await asyncio.wait({self._under_way})
        if not self._open:
            return
        try:
            await self._send(self._vocoder.part([], NO_TOKENS), end=True)
        except (ValueError, RuntimeError) as error:
            # It was never opened, or is freed already: what ended the stream is the error worth reporting.
            logger.warning("stream %d could not be closed: %s", self._correlation_id, error)

    async def _send(self, inputs: Tensors, *, start: bool = False, end: bool = False) -> np.ndarray:
        # Noted before the answer is known: a request that fails has opened or ended the sequence all the same.
        self._open = not end
        # A request that has been sent cannot be taken back. Were its waiter alone cancelled, END could overtake it.
        self._under_way = asyncio.ensure_future(
            self._vocoder.render(inputs, self._correlation_id, start=start, end=end)
        )
        return await asyncio.shield(self._under_way)
