"""The LLM as a Triton model, with the tensors of the C++ TensorRT-LLM backend, so that either can be used."""

import asyncio
from contextlib import aclosing
from typing import Any

from cosyvoice_triton import triton_io
from cosyvoice_triton.batches import scalar
from cosyvoice_triton.config import TensorrtLLMConfig
from cosyvoice_triton.llm.engines.interface import GenerationRequest, speak_once, warm_up
from cosyvoice_triton.llm.engines.loading import engine_of
from cosyvoice_triton.llm.speech_tokens import LLMTokenizer
from cosyvoice_triton.llm.triton_client import ALL_INPUTS, generation_request, output_tensors
from cosyvoice_triton.monitoring import tracing
from cosyvoice_triton.monitoring.health import ModelMonitor
from cosyvoice_triton.monitoring.logs import timed
from cosyvoice_triton.profiles import LLMNumbers

# Most engines report single tokens; a response has as many as the smallest report of the engine `cuda`.
MIN_TOKENS = LLMNumbers.first_report_tokens


class TensorrtLLMModel:
    """Base class of `tensorrt_llm`'s `TritonPythonModel`: each request is a task of one asyncio loop.

    Streaming responses carry only new tokens, a few at a time, as TensorRT-LLM's do with `exclude_input_in_output`;
    otherwise one response carries all tokens. The last token is the end token unless `request_output_len` was reached.
    A request with `stop` ends the running one of the same id. Probabilities and beam search are not supported.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine and warm it up."""
        config = TensorrtLLMConfig.from_triton(args)
        tokenizer = LLMTokenizer.from_dir(config.tokenizer_dir or config.engine_dir)
        self._end_ids = tokenizer.end_ids
        self._decoupled = config.decoupled
        with timed("LLM"):
            self.engine = engine_of(config, tokenizer)
        # By request id, for `stop`; only used in the loop's thread.
        self._live: dict[str, asyncio.Task[Any] | None] = {}
        self._stopped: set[str] = set()
        self._requests = triton_io.RequestLoop(self._serve, model="tensorrt_llm", decoupled=config.decoupled)
        with timed("first requests"):
            self._requests.run(warm_up(self.engine, tokenizer, config.max_requests))
        self._monitor = ModelMonitor(args, test=lambda: self._requests.run(speak_once(self.engine, tokenizer)))

    def execute(self, requests: list[Any]) -> None:
        """Begin to answer requests."""
        for request in requests:
            self._requests.submit(request)

    def finalize(self) -> None:
        """End all requests and the engine."""
        self._monitor.close()
        self._requests.close()
        self.engine.close()

    async def _serve(self, request: Any, responder: triton_io.Responder) -> None:
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
        parameters = triton_io.parameters(request)
        generation = generation_request(tensors, parameters, self._end_ids)
        if request_id:
            self._live[request_id] = asyncio.current_task()
        try:
            with tracing.child("tensorrt_llm", parameters):
                await self._generate(generation, responder, streaming)
        except asyncio.CancelledError:
            # A request that was stopped ends without an error.
            if not self._decoupled or request_id not in self._stopped:
                raise
        finally:
            self._live.pop(request_id, None)
            self._stopped.discard(request_id)

    async def _generate(self, generation: GenerationRequest, responder: triton_io.Responder, streaming: bool) -> None:
        tokens: list[int] = []
        async with aclosing(self.engine.generate(generation)) as chunks:
            async for chunk in chunks:
                tokens += chunk.tokens
                if streaming and len(tokens) >= MIN_TOKENS:
                    responder.send(output_tensors(tokens))
                    tokens = []
        if tokens or not streaming:
            responder.send(output_tensors(tokens))

    def _stop(self, request_id: str) -> None:
        if not request_id:
            raise ValueError("stop needs the id of the request to end, but the request id is empty")
        # No such request: it may have just ended, which is not an error.
        if task := self._live.get(request_id):
            self._stopped.add(request_id)
            task.cancel()
