"""The LLM on Triton's python backend, with the tensors of TensorRT-LLM's backend so that either can serve it.

Streaming answers carry new tokens only, as TensorRT-LLM's do with `exclude_input_in_output`; otherwise one answer
carries them all. The last token is the end token, unless `request_output_len` was reached before. A failure after the
first answer is an answer without tokens whose `sequence_length` is `FAILED`. A request with `stop` ends the live one of
the same id. Probabilities and beams are not offered.
"""

import asyncio
import logging
from contextlib import aclosing

import numpy as np

from common import triton_io
from common.config import TensorrtLLMConfig
from common.llm.base import Sampling
from common.llm.batching import GenerationRequest
from common.llm.genai import load_engine
from common.llm.triton_llm import FAILED
from common.speech_tokens import LLMTokenizer

logger = logging.getLogger(__name__)

NEUTRAL = {
    "beam_width": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "return_log_probs": False,
    "return_context_logits": False,
    "return_generation_logits": False,
}


class TritonPythonModel:
    def initialize(self, args):
        config = TensorrtLLMConfig.from_triton(args)
        tokenizer = LLMTokenizer.from_dir(config.tokenizer_dir or config.engine_dir)
        self._end_ids = tokenizer.end_ids
        self._decoupled = config.decoupled
        self._engine = load_engine(config.engine_dir, tokenizer, config.max_requests)
        # By request id, for `stop`; touched in the loop's thread only.
        self._live: dict[str, asyncio.Task] = {}
        self._stopped: set[str] = set()
        self._requests = triton_io.RequestLoop(self._serve, model="tensorrt_llm", decoupled=config.decoupled)

    def execute(self, requests):
        for request in requests:
            self._requests.submit(request)

    def finalize(self):
        self._requests.close()
        self._engine.close()

    async def _serve(self, request, responder):
        request_id = request.request_id()
        if triton_io.scalar(request, "stop"):
            self._stop(request_id)
            if not self._decoupled:
                responder.send(_outputs([]))
            return
        streaming = bool(triton_io.scalar(request, "streaming"))
        if streaming and not self._decoupled:
            raise ValueError("streaming is true, but tensorrt_llm was rendered without decoupled responses")
        if request_id and request_id in self._live:
            raise ValueError(f"request id {request_id!r} is in use")
        _refuse_unsupported(request)
        generation = _generation_request(request, self._end_ids)
        if request_id:
            self._live[request_id] = asyncio.current_task()
        try:
            await self._generate(generation, responder, streaming)
        except asyncio.CancelledError:
            # An error would be lost, see _generate. So what was stopped just ends.
            if not self._decoupled or request_id not in self._stopped:
                raise
        finally:
            self._live.pop(request_id, None)
            self._stopped.discard(request_id)

    async def _generate(self, generation, responder, streaming):
        tokens = []
        try:
            async with aclosing(self._engine.generate(generation)) as chunks:
                async for chunk in chunks:
                    if streaming:
                        responder.send(_outputs(chunk.tokens))
                    tokens += chunk.tokens
        except Exception:
            if not (streaming and tokens):
                raise
            # In a call between models Triton 2.51 loses an error that comes after other responses, and the end of the
            # answer with it: its reader would wait for ever.
            logger.exception("a request failed after %d tokens", len(tokens))
            responder.send(_outputs([], length=FAILED))
        if not streaming:
            responder.send(_outputs(tokens))

    def _stop(self, request_id):
        if not request_id:
            raise ValueError("stop needs the id of the request to end, but the request id is empty")
        # One that has just ended by itself is no mistake of the caller's.
        if task := self._live.get(request_id):
            self._stopped.add(request_id)
            task.cancel()


def _generation_request(request, end_ids):
    """The request's tensors; ValueError names the one that is missing or out of range."""
    input_ids = triton_io.require(request, "input_ids").reshape(-1)
    length = triton_io.scalar(request, "input_lengths")
    if length is not None and not 0 < length <= len(input_ids):
        raise ValueError(f"input_lengths {length} is outside 1..{len(input_ids)}, the size of input_ids")
    max_tokens = triton_io.scalar(request, "request_output_len")
    if max_tokens is None:
        raise ValueError("request_output_len is missing")
    given = {
        "max_tokens": max_tokens,
        "temperature": triton_io.scalar(request, "temperature"),
        "top_k": triton_io.scalar(request, "runtime_top_k"),
        "top_p": triton_io.scalar(request, "runtime_top_p"),
        "repetition_penalty": triton_io.scalar(request, "repetition_penalty"),
        "seed": triton_io.scalar(request, "random_seed"),
    }
    end_id = triton_io.scalar(request, "end_id")
    return GenerationRequest(
        input_ids[:length].tolist(),
        Sampling(**{name: value for name, value in given.items() if value is not None}),
        end_ids if end_id is None or end_id in end_ids else (*end_ids, end_id),
        triton_io.scalar(request, "min_length") or 0,
    )


def _refuse_unsupported(request):
    """What the C++ backend offers and this one does not is refused, unless it has the value that changes nothing."""
    for name in ("stop_words_list", "bad_words_list", "embedding_bias", "encoder_input_features"):
        if triton_io.read(request, name) is not None:
            raise ValueError(f"{name} is not supported by the python backend of tensorrt_llm")
    for name, neutral in NEUTRAL.items():
        if (value := triton_io.scalar(request, name)) not in (None, neutral):
            raise ValueError(f"{name} {value} is not supported by the python backend of tensorrt_llm, only {neutral}")


def _outputs(tokens, length=None):
    """(n,) ids -> `output_ids` (1, beam 1, n) and their number, or `length`, (1, 1)."""
    return {
        "output_ids": np.array([[tokens]], np.int32).reshape(1, 1, -1),
        "sequence_length": np.array([[len(tokens) if length is None else length]], np.int32),
    }
