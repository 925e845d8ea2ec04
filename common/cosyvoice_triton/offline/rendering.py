"""Speech tokens to audio for batches of utterances: whole, or in chunks as a streaming client gets them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cosyvoice_triton import stacks
from cosyvoice_triton.checkpoint import read_state
from cosyvoice_triton.config import ChunkStrategy, FlowRuntime, OrchestratorConfig
from cosyvoice_triton.constants import FLOW_CHUNK_TOKENS
from cosyvoice_triton.demo_checkpoint.make import weights_of
from cosyvoice_triton.orchestrator.chunking import HopRules, HopSchedule
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.engine import Token2Wav
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from cosyvoice_triton.token2wav.gpu.precision import Precision
from cosyvoice_triton.token2wav.stream import Chunk, Stream
from cosyvoice_triton.voice.prompt import Prompt

PromptedTokens = tuple[Prompt, np.ndarray]  # voice; speech tokens (n,) int64


@dataclass
class Streamed:
    """One streamed utterance. waveforms: (N,) float32 at 24 kHz, one per chunk."""

    waveforms: list[np.ndarray] = field(default_factory=list)
    first_chunk: float = 0.0  # seconds from the batch's start to the first audio


class OfflineToken2Wav:
    """token2wav of the stack that the checkpoint belongs to. calls: forward calls of the flow so far."""

    def __init__(self, engine: Token2Wav, stack: Stack, random_weights: bool) -> None:
        self.stack = stack
        self.name = f"{stack.name} token2wav{', RANDOM weights' if random_weights else ''}"
        self.calls = 0
        self._engine = engine

    @classmethod
    def load(cls, model_dir: Path, device: str, streams: int, enable_trt: bool = False) -> "OfflineToken2Wav":
        """Load a checkpoint's flow.pt and hift.pt. streams: concurrent streams; 0 for whole utterances only, which
        needs far less memory on a GPU. enable_trt: the flow's estimator from its TensorRT plans. Raise ValueError, and
        RuntimeError if a plan is missing.
        """
        path = model_dir / Stack.flow
        stack = stacks.of_flow(read_state(path, "meta"), path)
        runtime: FlowRuntime = "tensorrt" if enable_trt else "auto" if streams else "torch"  # without CUDA graphs
        limits = BatchLimits(
            max_streams=max(1, streams), first_hop_tokens=FLOW_CHUNK_TOKENS, chunk_boundary=stack.chunk_boundary
        )
        precision = Precision.named("auto", "auto", device, runtime)
        engine = Token2Wav.load(stack, model_dir, device=device, limits=limits, precision=precision, runtime=runtime)
        engine.warm_up()
        return cls(engine, stack, weights_of(model_dir) == "random")

    def rules(self, strategy: ChunkStrategy) -> HopRules:
        """Return hops of 25 tokens at first, as in upstream's streaming test, and the server's longest hop."""
        return HopRules(
            strategy=strategy,
            first_hop=FLOW_CHUNK_TOKENS,
            max_hop=OrchestratorConfig.max_hop_tokens,
            boundary=self.stack.chunk_boundary,
        )

    def whole(self, batch: Sequence[PromptedTokens]) -> list[np.ndarray | Exception]:
        """Return whole utterances, (N,) float32 at 24 kHz each. A batch that fails is rendered one by one, so that only
        the utterance that causes the error fails.
        """
        self.calls += 1
        try:
            return list(self._engine.whole_batch(batch))
        except Exception as error:
            if len(batch) == 1:
                return [error]
        return [self.whole([utterance])[0] for utterance in batch]

    def streamed(
        self, batch: Sequence[PromptedTokens], rules: HopRules, clock: Callable[[], float] = time.perf_counter
    ) -> list[Streamed | Exception]:
        """Return the same in chunks; each step renders one chunk of every utterance."""
        begun = clock()
        streams: list[_Stream | Exception] = []
        try:
            for prompt, tokens in batch:
                streams.append(self._open(prompt, tokens, rules))
            opened = [stream for stream in streams if isinstance(stream, _Stream)]
            while live := [stream for stream in opened if stream.live]:
                self._advance(live)
                for stream in live:
                    stream.result.first_chunk = stream.result.first_chunk or clock() - begun
        finally:
            for each in streams:
                if isinstance(each, _Stream):
                    self._engine.close(each.stream)
        return [each if isinstance(each, Exception) else each.error or each.result for each in streams]

    def _open(self, prompt: Prompt, tokens: np.ndarray, rules: HopRules) -> "_Stream | Exception":
        if len(tokens) == 0:
            return ValueError("there are no speech tokens")
        try:
            return _Stream(self._engine.open(prompt), tokens, rules.schedule(len(prompt.tokens)))
        except Exception as error:
            return error

    def _advance(self, live: Sequence["_Stream"]) -> None:
        chunks: list[tuple[_Stream, Chunk]] = []
        for each in live:
            try:
                chunks.append((each, self._next_chunk(each)))
            except ValueError as error:
                each.error = error
        parts: Sequence[np.ndarray | Exception]
        self.calls += 1
        try:
            parts = self._engine.step([chunk for _, chunk in chunks])
        except Exception as error:
            parts = [error] * len(chunks)
        for (each, chunk), part in zip(chunks, parts, strict=True):
            if isinstance(part, Exception):
                each.error = part
            else:
                each.result.waveforms.append(part)
            each.ended = chunk.final

    def _next_chunk(self, stream: "_Stream") -> Chunk:
        hop = stream.schedule.next_hop(len(stream.tokens), ended=True)
        assert hop is not None  # all tokens are available, and the final hop has not been rendered
        begin = 0 if self.stack.cumulative else hop.offset
        tokens = stream.tokens[begin : hop.end_of_context]
        return self._engine.chunk(stream.stream, tokens, final=hop.final, offset=hop.offset)


@dataclass
class _Stream:
    stream: Stream
    tokens: np.ndarray
    schedule: HopSchedule
    result: Streamed = field(default_factory=Streamed)
    error: Exception | None = None
    ended: bool = False

    @property
    def live(self) -> bool:
        return not self.ended and self.error is None
