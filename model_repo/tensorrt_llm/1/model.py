"""The LLM on Triton's python backend, with the tensors of TensorRT-LLM's backend so that either can serve it.

Streaming answers carry new tokens only, as TensorRT-LLM's do with `exclude_input_in_output`; otherwise one answer
carries them all. The last token is the end token, unless `request_output_len` was reached before. A failure after the
first answer is an answer without tokens whose `sequence_length` is `FAILED`. A request with `stop` ends the live one of
the same id. Probabilities and beams are not offered.
"""

import asyncio
import logging
from contextlib import aclosing

from common import triton_io
from common.config import TensorrtLLMConfig
from common.llm.engine import warm_up
from common.llm.loading import load_engine
from common.llm.tensors import ALL_INPUTS, FAILED, generation_request, output_tensors, scalar
from common.speech_tokens import LLMTokenizer

logger = logging.getLogger(__name__)


class TritonPythonModel:
    def initialize(self, args):
        config = TensorrtLLMConfig.from_triton(args)
        tokenizer = LLMTokenizer.from_dir(config.tokenizer_dir or config.engine_dir)
        self._end_ids = tokenizer.end_ids
        self._decoupled = config.decoupled
        self._engine = load_engine(config.engine, config.engine_dir, tokenizer, config.max_requests, config.gpu_share)
        # By request id, for `stop`; touched in the loop's thread only.
        self._live: dict[str, asyncio.Task] = {}
        self._stopped: set[str] = set()
        self._requests = triton_io.RequestLoop(self._serve, model="tensorrt_llm", decoupled=config.decoupled)
        self._requests.run(warm_up(self._engine, tokenizer, config.max_requests))

    def execute(self, requests):
        for request in requests:
            self._requests.submit(request)

    def finalize(self):
        self._requests.close()
        self._engine.close()

    async def _serve(self, request, responder):
        request_id = request.request_id()
        tensors = triton_io.read_all(request, ALL_INPUTS)
        if scalar(tensors, "stop", False):
            self._stop(request_id)
            if not self._decoupled:
                responder.send(output_tensors([]))
            return
        streaming = scalar(tensors, "streaming", False)
        if streaming and not self._decoupled:
            raise ValueError("streaming is true, but tensorrt_llm was rendered without decoupled responses")
        if request_id and request_id in self._live:
            raise ValueError(f"request id {request_id!r} is in use")
        generation = generation_request(tensors, triton_io.parameters(request), self._end_ids)
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
                        responder.send(output_tensors(chunk.tokens))
                    tokens += chunk.tokens
        except Exception:
            if not (streaming and tokens):
                raise
            # In a call between models Triton 2.51 loses an error that comes after other responses, and the end of the
            # answer with it: its reader would wait for ever.
            logger.exception("a request failed after %d tokens", len(tokens))
            responder.send(output_tensors([], length=FAILED))
        if not streaming:
            responder.send(output_tensors(tokens))

    def _stop(self, request_id):
        if not request_id:
            raise ValueError("stop needs the id of the request to end, but the request id is empty")
        # One that has just ended by itself is no mistake of the caller's.
        if task := self._live.get(request_id):
            self._stopped.add(request_id)
            task.cancel()
