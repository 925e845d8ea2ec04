"""The LLM as a model of the same Triton, with the tensors of TensorRT-LLM's backend, whichever backend serves it."""

import asyncio
import logging
import secrets
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Protocol

import numpy as np

from common.errors import UnavailableError
from common.llm.base import MAX_SEED, LLMPrompt, Sampling, Timeouts, TokenChunk, TokenStream
from common.speech_tokens import LLMTokenizer

logger = logging.getLogger(__name__)

# The `sequence_length` by which our python backend of the model tells that it failed in the middle of an answer, since
# Triton 2.51 loses an error there. The C++ backend never sends it.
FAILED = -1
# To tell a request's end, which is on its way at once; longer than that the error which ended it must not wait.
STOP_SECONDS = 0.3

Tensors = Mapping[str, np.ndarray]


class ResponseStream(Protocol):
    """Sends a request to the LLM model; yields the outputs of each of its responses. See `triton_io.stream`.

    Raises ValueError, UnavailableError or RuntimeError as the model's error says.
    """

    def __call__(self, inputs: Tensors, *, request_id: str) -> AsyncGenerator[Tensors, None]: ...


class TritonLM:
    """Speech from the `tensorrt_llm` model, over an injected stream function."""

    def __init__(self, stream: ResponseStream, tokenizer: LLMTokenizer, timeouts: Timeouts | None = None) -> None:
        self._stream = stream
        self._tokenizer = tokenizer
        self._timeouts = timeouts or Timeouts()

    def generate(self, prompt: LLMPrompt, sampling: Sampling) -> TokenStream:
        return TokenStream(self._generate(prompt, sampling))

    async def aclose(self) -> None:
        """Nothing is held between requests."""

    async def _generate(self, prompt: LLMPrompt, sampling: Sampling) -> AsyncGenerator[TokenChunk, None]:
        input_ids = self._tokenizer.encode_prompt(prompt.prompt_text, prompt.target_text, prompt.prompt_tokens)
        inputs = request_tensors(input_ids, sampling, self._tokenizer.end_ids[0])
        request_id = str(uuid.uuid4())
        wait = self._timeouts.first_token
        generated, ended, closed_by_llm = 0, False, False
        try:
            async with aclosing(self._stream(inputs, request_id=request_id)) as responses:
                while not ended:
                    outputs = await asyncio.wait_for(anext(responses, None), wait)
                    if outputs is None:
                        break
                    llm_ids = output_tokens(outputs)
                    generated += len(llm_ids)
                    ended = any(token in self._tokenizer.end_ids for token in llm_ids)
                    wait = self._timeouts.token
                    yield TokenChunk(self._tokenizer.to_speech_ids(llm_ids))
                # Read to the final response, lest the LLM is told to stop what has ended by itself.
                closed_by_llm = outputs is None or await asyncio.wait_for(anext(responses, None), wait) is None
            # TensorRT-LLM's tensors give no reason for the end; the count does.
            yield TokenChunk([], "length" if generated >= sampling.max_tokens and not ended else "stop")
        except asyncio.TimeoutError:
            raise UnavailableError(f"the LLM sent no token for {wait} s") from None
        except UnavailableError:
            raise
        except RuntimeError as error:
            raise UnavailableError(f"the LLM failed: {error}") from error
        finally:
            if not closed_by_llm:
                await self._stop(inputs, request_id)

    async def _stop(self, inputs: Tensors, request_id: str) -> None:
        """End a live request by its id, the only way there is: Triton's model-to-model calls cannot be cancelled."""
        stop = {**inputs, "stop": np.array([[True]])}

        async def send() -> None:
            async with aclosing(self._stream(stop, request_id=request_id)) as responses:
                async for _ in responses:
                    pass

        try:
            await asyncio.wait_for(send(), STOP_SECONDS)
        except (asyncio.TimeoutError, RuntimeError, ValueError) as error:
            # The request may have ended meanwhile, or the LLM be down: nothing is left to free then.
            logger.info("could not stop LLM request %s: %s", request_id, error or type(error).__name__)


def request_tensors(input_ids: list[int], sampling: Sampling, end_id: int) -> dict[str, np.ndarray]:
    """A streaming request of one prompt: every tensor has the shape (1, n) with its batch dimension."""
    seed = secrets.randbelow(MAX_SEED) if sampling.seed is None else sampling.seed
    return {
        "input_ids": np.array([input_ids], np.int32),
        "input_lengths": np.array([[len(input_ids)]], np.int32),
        "request_output_len": np.array([[sampling.max_tokens]], np.int32),
        "end_id": np.array([[end_id]], np.int32),
        "pad_id": np.array([[end_id]], np.int32),
        "streaming": np.array([[True]]),
        "temperature": np.array([[sampling.temperature]], np.float32),
        "runtime_top_k": np.array([[sampling.top_k]], np.int32),
        "runtime_top_p": np.array([[sampling.top_p]], np.float32),
        "repetition_penalty": np.array([[sampling.repetition_penalty]], np.float32),
        "random_seed": np.array([[seed]], np.uint64),
    }


def output_tokens(outputs: Tensors) -> list[int]:
    """New ids in one response: `output_ids` (1, 1, n), padded beyond `sequence_length` (1, 1).

    UnavailableError where the response says that the LLM has failed.
    """
    length = int(outputs["sequence_length"].reshape(-1)[0])
    if length == FAILED:
        raise UnavailableError("the LLM failed in the middle of an answer; its log says why")
    return outputs["output_ids"].reshape(-1)[:length].tolist()
