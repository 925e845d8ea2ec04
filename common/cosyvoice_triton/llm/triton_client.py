"""The LLM as a model of the same Triton, with the tensors of TensorRT-LLM's backend, whichever backend serves it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

import numpy as np
from async_timeout import timeout

from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.llm.interface import LengthRatios, LLMPrompt, Sampling, Timeouts, TokenChunk, TokenStream
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.llm.triton_tensors import output_tokens, request_parameters, request_tensors
from cosyvoice_triton.monitoring import tracing

if TYPE_CHECKING:
    from cosyvoice_triton.triton_io.streams import Streams

CLOSE_SECONDS = 1.0  # from the end token to the end of the stream

logger = logging.getLogger(__name__)


class TritonLM:
    """Speech tokens from the `tensorrt_llm` model.

    bias (vocabulary,): only for the C++ backend, which adds it to the logits; minus infinity for all but speech and
    end tokens.
    """

    def __init__(
        self,
        streams: "Streams",
        tokenizer: LLMTokenizer,
        timeouts: Timeouts | None = None,
        ratios: LengthRatios | None = None,
        bias: np.ndarray | None = None,
    ) -> None:
        self._streams = streams
        self._tokenizer = tokenizer
        self._timeouts = timeouts or Timeouts()
        self._ratios = ratios or LengthRatios()
        self._bias = bias

    def generate(self, prompt: LLMPrompt, sampling: Sampling) -> TokenStream:
        return TokenStream(self._generate(prompt, sampling))

    async def aclose(self) -> None:
        """Close the connection."""
        await self._streams.aclose()

    async def _generate(self, prompt: LLMPrompt, sampling: Sampling) -> AsyncGenerator[TokenChunk, None]:
        sampling = self._ratios.bound(sampling, prompt, self._tokenizer.text_length(prompt.target_text))
        if self._bias is not None:
            sampling = sampling.seeded()
        input_ids = self._tokenizer.encode_prompt(prompt)
        inputs = request_tensors(input_ids, sampling, self._tokenizer.end_ids[0])
        parameters = request_parameters(prompt, sampling) | tracing.carried()
        if self._bias is not None:  # the C++ backend, which reads no parameters
            inputs["embedding_bias"] = self._bias[None]
            if sampling.ras_window:
                raise ValueError(f"ras_window {sampling.ras_window}: TensorRT-LLM has no repetition-aware sampling")
            parameters = {}
        wait = self._timeouts.first_token
        generated, ended = 0, False
        try:
            async with aclosing(self._streams.ask(inputs, parameters)) as responses:
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
                if ended:
                    await _read_end(responses)
            # TensorRT-LLM's tensors give no finish reason; the token count does.
            yield TokenChunk([], "length" if generated >= sampling.max_tokens and not ended else "stop")
        except asyncio.TimeoutError:
            raise UnavailableError(f"the LLM sent no token for {wait} s") from None
        except UnavailableError:
            raise
        except RuntimeError as error:
            raise UnavailableError(f"the LLM failed: {error}") from error


async def _read_end(responses: AsyncIterator[object]) -> None:
    """Read up to the last response, or a finished request would count as cancelled. The answer does not wait for it."""
    try:
        async with timeout(CLOSE_SECONDS):
            await anext(responses, None)
    except asyncio.TimeoutError:
        logger.warning("the LLM did not end its stream within %g s of its last token", CLOSE_SECONDS)
