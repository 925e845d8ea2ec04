"""Step-Audio2's flow over many streams: one batched solve for their chunks, whatever their lengths and histories."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common.constants import (
    CONTEXT_TOKENS,
    DIT_TAIL_FRAMES,
    EULER_STEPS,
    LOOKAHEAD_TOKENS,
    MAX_STREAM_TOKENS,
    TOKEN_MEL_RATIO,
)
from common.device import on_device
from common.flow.cache import KeyValues
from common.flow.checkpoint import load_dit_flow
from common.flow.dit import DiTEstimator, DiTFlow
from common.process import faults
from common.token2wav.dit.memory import (
    ChunkwiseSolve,
    DiTChunk,
    DiTStream,
    GatheredSolve,
    PromptCache,
    PromptCaches,
    Solve,
    TailPool,
)
from common.token2wav.dit.solver import DiTSolver
from common.token2wav.encoder_window import Window, with_ahead
from common.token2wav.limits import DIT_BATCH_TOKENS, BatchLimits, padding
from common.token2wav.noise import NoiseTape, flow_noise
from common.token2wav.stream import NotFiniteError, VocoderState
from common.token2wav.streaming import FlowOptions, StreamingFlow
from common.voice.prompt import Prompt

logger = logging.getLogger(__name__)


def load(path: Path, options: FlowOptions) -> "DiTStreaming":
    """Load the flow of a `flow.pt`, and the runtime's files next to it. ValueError names what does not fit."""
    network, shared = options.load(load_dit_flow, path)
    return DiTStreaming(network, flow_noise(options.device), PromptCaches(options.prompt_cache_bytes), **shared)


class DiTStreaming(StreamingFlow[DiTStream]):
    """Every stream attends to its whole prompt and its most recent frames.

    tail_frames: of a stream, kept for the estimator. context_tokens: of a stream, kept for the encoder. graphs: CUDA
    graphs on a GPU.
    """

    cumulative = False

    def __init__(
        self,
        network: DiTFlow,
        noise: NoiseTape,
        prompts: PromptCaches,
        *,
        limits: BatchLimits,
        steps: int = EULER_STEPS,
        max_tokens: int = MAX_STREAM_TOKENS,
        tail_frames: int = DIT_TAIL_FRAMES,
        context_tokens: int = CONTEXT_TOKENS,
        graphs: bool = True,
        load_exact: Callable[[], DiTFlow] | None = None,
    ):
        super().__init__(
            network, noise, limits=limits, steps=steps, max_tokens=max_tokens, graphs=graphs, load_exact=load_exact
        )
        self.batch_tokens = DIT_BATCH_TOKENS
        self._context = context_tokens
        self._prompts = prompts
        weight = network.spk_embed_affine_layer.weight
        self._pool = TailPool(network.decoder.estimator.config, weight, steps, limits.max_streams, tail_frames)
        self._solve: Solve
        if not isinstance(network.decoder.estimator, DiTEstimator):
            self._solve = ChunkwiseSolve(network, self._pool, noise)
        elif self._graphed:
            from common.token2wav.dit.graphs import FusedDiTSolver  # its kernels need Triton

            self._fused = FusedDiTSolver(network, steps)
            self._capture()
        else:
            self._solve = GatheredSolve(DiTSolver(network, steps), self._pool, noise)

    def _capture(self) -> None:
        from common.token2wav.dit.graphs import GraphedSolve

        self._solve = graphed = GraphedSolve(self._fused, self._pool, self._noise, self.limits)
        self.padded = padding(graphed.sizes)

    @property
    def cache_bytes(self) -> int:
        return self._pool.nbytes + self._prompts.nbytes

    @property
    def evicted(self) -> int:
        return self._prompts.evicted

    def _evict_idle(self) -> None:
        self._prompts.evict_idle()

    def prefill_frames(self, prompt: Prompt) -> int:
        return 0 if prompt.digest in self._prompts else len(prompt.mel)

    def fitting(self, prompts: Sequence[Prompt]) -> list[bool]:
        return self._prompts.fitting([(prompt.digest, self._pool.prompt_bytes(len(prompt.mel))) for prompt in prompts])

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        if not self._prompts.make_room(sum(self._pool.prompt_bytes(len(prompt.mel)) for prompt in prompts)):
            return  # each is prefilled when a stream is opened in it
        for prompt, cache in zip(prompts, self._made(prompts), strict=True):
            self._prompts.add(prompt.digest, cache)

    def open(self, prompt: Prompt, vocoder: VocoderState) -> DiTStream:
        key = prompt.digest
        size = self._pool.prompt_bytes(len(prompt.mel))
        cache = self._prompts.acquire(key, size, lambda: self._made([prompt])[0])
        try:
            tail = self._pool.acquire(cache)
        except BaseException:
            self._prompts.release(key)
            raise
        context = np.zeros(0, np.int64)
        return DiTStream(vocoder=vocoder, prompt=cache, prompt_key=key, tail=tail, context=context, chunk_ends=[])

    def close(self, stream: DiTStream) -> None:
        self._pool.release(stream.tail)
        self._prompts.release(stream.prompt_key)
        del stream.prompt  # whoever still refers to the stream must not keep a voice that is evicted

    def _computed(self, stream: DiTStream, new: int) -> int:
        return new

    def _prefill(self, prompts: Sequence[Prompt]) -> list[PromptCache]:
        """The prompt caches of different voices, by one solve."""
        speakers = [self._project_speaker(prompt) for prompt in prompts]
        attended = [index for index, prompt in enumerate(prompts) if len(prompt.tokens)]
        # The streams of a voice of an x-vector alone begin with empty caches.
        left = dict.fromkeys(range(len(prompts)), self._pool.empty_prompt())
        if attended:
            voices = [prompts[index] for index in attended]
            mu = self._encoder.encode([_prompt_window(prompt.tokens) for prompt in voices])
            mel = pad_sequence([torch.from_numpy(prompt.mel) for prompt in voices], batch_first=True)  # (B, T, mel)
            mu = mu[:, : mel.shape[1]]
            frames = [len(prompt.mel) for prompt in voices]
            speaker = torch.cat([speakers[index] for index in attended])
            left |= zip(attended, self._solve.prefill(mu, speaker, mel.to(mu), frames), strict=True)
        return [
            PromptCache(voice=prompt, attention=left[index][0], history=left[index][1], speaker=speakers[index])
            for index, prompt in enumerate(prompts)
        ]

    def _made(self, prompts: Sequence[Prompt]) -> list[PromptCache]:
        """Prompt caches for which there is room. If the free memory is in too small pieces, idle ones are evicted."""
        try:
            return self._finite(self._prefill(prompts))
        except torch.OutOfMemoryError:
            logger.warning("the free memory is in too small pieces for a voice: idle voices are evicted")
        self._prompts.evict_idle()  # after the handler, so that the tensors in the error's frames are freed
        return self._finite(self._prefill(prompts))

    def _finite(self, caches: list[PromptCache]) -> list[PromptCache]:
        """Prompt caches as they were made, or made again in float32 where they are not finite. NotFiniteError if that
        does not help."""
        checked = []
        for cache, good in zip(caches, _are_finite(caches), strict=True):
            if not good:
                logger.warning("a prompt cache is not finite: it is made again in float32")
                (exact,) = self.exact()._prefill([cache.voice])
                cache = _converted(exact, cache.history.dtype)
                if not _are_finite([cache])[0]:
                    raise NotFiniteError("the prompt cache of the voice is not finite")
            checked.append(cache)
        return checked

    def _render(self, chunks: list[DiTChunk]) -> list[Tensor]:
        for chunk in chunks:
            if chunk.stream.tail.total != TOKEN_MEL_RATIO * chunk.offset:  # a part of its batch failed after its own
                raise RuntimeError("the stream's memory is ahead of its audio")
        if faults.take("nan_voice"):
            chunks[0].stream.prompt.attention.keys.fill_(torch.nan)
        mel = self._solve.run(chunks, self._encode(chunks))
        for chunk in chunks:
            stream = chunk.stream
            stream.context = np.concatenate([stream.context, chunk.tokens[: chunk.new]])[-self._context :]
            stream.chunk_ends.append(chunk.offset + chunk.new)
        return [mel[index, : chunk.frames].T for index, chunk in enumerate(chunks)]  # (T, C) -> (C, T)

    def _again(self, chunk: DiTChunk) -> Tensor:
        """All chunks that the stream's context still holds are rendered, the given one last."""
        exact, stream = self.exact(), chunk.stream
        (prompt,) = exact._prefill([stream.prompt.voice])
        before = stream.context[: max(0, len(stream.context) - chunk.new)]
        begin = chunk.offset - len(before)
        tail = exact._pool.acquire(prompt)
        tail.total = TOKEN_MEL_RATIO * begin
        anew = replace(stream, prompt=prompt, tail=tail, context=np.zeros(0, np.int64), chunk_ends=[], rendered=begin)
        tokens = np.concatenate([before, chunk.tokens])
        for end in [end for end in stream.chunk_ends if end > begin]:
            offset = anew.rendered
            ahead = tokens[offset - begin : end - begin + LOOKAHEAD_TOKENS]
            new = end - offset
            (mel,) = exact.render([replace(chunk, stream=anew, tokens=ahead, offset=offset, new=new, computed=new)])
        self._pool.replace(stream.tail, exact._pool, tail)
        dtype = stream.prompt.speaker.dtype
        stream.prompt = self._prompts.replace(stream.prompt_key, stream.prompt, _converted(prompt, dtype))
        return mel

    def _plain(self, network: DiTFlow) -> "DiTStreaming":
        return DiTStreaming(
            network,
            self._noise,
            PromptCaches(0),
            limits=replace(self.limits, max_streams=1),
            steps=self._steps,
            max_tokens=self._max_tokens,
            tail_frames=self._pool.frames,
            context_tokens=self._context,
            graphs=False,
        )

    def _encode(self, chunks: list[DiTChunk]) -> Tensor:
        """Encoder output of the new frames, (B, T, mel), T those of the longest chunk."""
        windows = [_window(chunk) for chunk in chunks]
        mu = self._encoder.encode(windows)
        starts = torch.tensor(
            [TOKEN_MEL_RATIO * (len(window) - chunk.new) for window, chunk in zip(windows, chunks, strict=True)]
        )
        frames = starts[:, None] + torch.arange(max(chunk.frames for chunk in chunks))
        frames = on_device(frames.clamp(max=mu.shape[1] - 1), mu.device)
        return mu.gather(1, frames[:, :, None].expand(-1, -1, mu.shape[2]))


def _converted(cache: PromptCache, dtype: torch.dtype) -> PromptCache:
    attention = KeyValues(cache.attention.keys.to(dtype), cache.attention.values.to(dtype))
    return PromptCache(cache.voice, attention, cache.history.to(dtype), cache.speaker.to(dtype))


def _are_finite(caches: list[PromptCache]) -> list[bool]:
    """Of the convolutions' histories alone, 1.3 MB each: they follow from all keys and values."""
    return torch.stack([cache.history.isfinite().all() for cache in caches]).tolist()


def _prompt_window(tokens: np.ndarray) -> Window:
    """As in upstream's setup_cache, the look-ahead after the prompt's last tokens is its own first ones."""
    count = len(tokens)
    return Window(with_ahead(np.concatenate([tokens, tokens]), count), np.full(count, count))


def _window(chunk: DiTChunk) -> Window:
    """A chunk attends to itself and to all before it. The look-ahead after the prompt is as in `_prompt_window`."""
    stream, prompt = chunk.stream, chunk.stream.prompt.voice.tokens
    tokens = np.concatenate([stream.context, chunk.tokens])
    count = len(stream.context) + chunk.new
    forgotten = chunk.offset - len(stream.context)
    ends = np.array([*stream.chunk_ends, chunk.offset + chunk.new])
    ends = ends[np.searchsorted(ends, forgotten + np.arange(count), side="right")]  # the end of each token's chunk
    return Window(
        tokens=np.concatenate([_prompt_window(prompt).tokens, with_ahead(tokens, count)]),
        visible=len(prompt) + np.concatenate([np.zeros_like(prompt), ends - forgotten]),
    )
