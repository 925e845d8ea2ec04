"""The LLM as a model of the same Triton, with the tensors of TensorRT-LLM's backend, whichever backend serves it."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Protocol

import numpy as np
from async_timeout import timeout

from common.errors import UnavailableError
from common.llm.base import LengthRatios, LLMPrompt, Sampling, Timeouts, TokenChunk, TokenStream
from common.llm.tensors import Tensors, output_tokens, request_parameters, request_tensors
from common.speech_tokens import LLMTokenizer

logger = logging.getLogger(__name__)

# To tell a request's end, which is on its way at once; longer than that the error which ended it must not wait.
STOP_SECONDS = 0.3


class ResponseStream(Protocol):
    """Sends a request to the LLM model; yields the outputs of each of its responses. See `triton_io.stream`.

    Raises ValueError, UnavailableError or RuntimeError as the model's error says.
    """

    def __call__(
        self, inputs: Tensors, *, request_id: str, parameters: Mapping[str, str]
    ) -> AsyncGenerator[Tensors, None]: ...


class TritonLM:
    """Speech from the `tensorrt_llm` model, over an injected stream function.

    bias (vocabulary,): for the C++ backend, to be added to its logits: minus infinity for what is no speech.
    """

    def __init__(
        self,
        stream: ResponseStream,
        tokenizer: LLMTokenizer,
        timeouts: Timeouts | None = None,
        ratios: LengthRatios | None = None,
        bias: np.ndarray | None = None,
    ) -> None:
        self._stream = stream
        self._tokenizer = tokenizer
        self._timeouts = timeouts or Timeouts()
        self._ratios = ratios or LengthRatios()
        self._bias = bias

    def generate(self, prompt: LLMPrompt, sampling: Sampling) -> TokenStream:
        return TokenStream(self._generate(prompt, sampling))

    async def aclose(self) -> None:
        """Nothing is held between requests."""

    async def _generate(self, prompt: LLMPrompt, sampling: Sampling) -> AsyncGenerator[TokenChunk, None]:
        sampling = self._ratios.bound(sampling, self._tokenizer.text_length(prompt.target_text))
        input_ids = self._tokenizer.encode_prompt(prompt.prompt_text, prompt.target_text, prompt.prompt_tokens)
        inputs = request_tensors(input_ids, sampling, self._tokenizer.end_ids[0])
        parameters = request_parameters(sampling)
        if self._bias is not None:
            inputs["embedding_bias"] = self._bias[None]
            if parameters:
                raise ValueError(f"ras_window {sampling.ras_window}: TensorRT-LLM has no repetition-aware sampling")
        request_id = str(uuid.uuid4())
        wait = self._timeouts.first_token
        generated, ended, closed_by_llm = 0, False, False
        try:
            async with aclosing(self._stream(inputs, request_id=request_id, parameters=parameters)) as responses:
                while not ended:
                    async with timeout(wait):
                        outputs = await anext(responses, None)
                    if outputs is None:
                        break
                    llm_ids = output_tokens(outputs)
                    generated += len(llm_ids)
                    ended = any(token in self._tokenizer.end_ids for token in llm_ids)
                    wait = self._timeouts.token
                    yield TokenChunk(self._tokenizer.to_speech_ids(llm_ids))
                # Read to the final response, lest the LLM is told to stop what has ended by itself.
                async with timeout(wait):
                    closed_by_llm = outputs is None or await anext(responses, None) is None
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

        try:
            async with (
                timeout(STOP_SECONDS),
                aclosing(self._stream(stop, request_id=request_id, parameters={})) as responses,
            ):
                async for _ in responses:
                    pass
        except (asyncio.TimeoutError, RuntimeError, ValueError) as error:
            # The request may have ended meanwhile, or the LLM be down: nothing is left to free then.
            logger.info("could not stop LLM request %s: %s", request_id, error or type(error).__name__)
