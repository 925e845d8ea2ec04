"""A flow over many streams that keeps keys and values: one batched solve for their chunks, whatever their lengths and
histories."""

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import Self

from cosyvoice_triton.config import KvCacheDtype
from cosyvoice_triton.constants import STREAM_CACHE_FRAMES, TOKEN_MEL_RATIO
from cosyvoice_triton.device import on_device
from cosyvoice_triton.monitoring import faults
from cosyvoice_triton.networks.flow.cache import KeyValues
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.token2wav.flow.base import StreamingFlow
from cosyvoice_triton.token2wav.flow.cached_solver import CachedSolver, Operations, PlainOperations
from cosyvoice_triton.token2wav.flow.encoder_window import Window
from cosyvoice_triton.token2wav.flow.kv_cache import CachedStream, PromptCache, PromptCaches, Row, StreamCachePool
from cosyvoice_triton.token2wav.flow.solve import GatheredSolve, Solve
from cosyvoice_triton.token2wav.gpu.limits import padding
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape
from cosyvoice_triton.token2wav.stream import Chunk, NotFiniteError, VocoderState
from cosyvoice_triton.voice.prompt import Prompt

logger = logging.getLogger(__name__)

CachedStreamT = TypeVar("CachedStreamT", bound=CachedStream)


class CachedStreaming(StreamingFlow[CachedStreamT], Generic[CachedStreamT]):
    """Every stream attends to its whole prompt and its most recent frames.

    cache_frames: so many recent frames of a stream are kept, in the format `kv_cache_dtype`.
    """

    graph_frames: int  # the most frames of a batch in a graph, padding included

    def __init__(
        self,
        network: CosyVoice3Flow | DiTFlow,
        noise: NoiseTape,
        prompts: PromptCaches,
        *,
        cache_frames: int = STREAM_CACHE_FRAMES,
        kv_cache_dtype: KvCacheDtype = "auto",
        **options: Any,
    ):
        super().__init__(network, noise, **options)
        self._prompts = prompts
        weight = network.spk_embed_affine_layer.weight
        sizes = (
            network.config.estimator,
            weight,
            self._steps,
            self.limits.max_streams,
            cache_frames,
            network.decoder.rows,
        )
        self._pool = StreamCachePool(*sizes, kv_cache_dtype)
        self._solve: Solve
        if self._graphed:
            from cosyvoice_triton import kernels  # they need Triton

            self._fused = self._solver(kernels)
            self._capture()
        else:
            self._solve = self._plain_solve()

    @abstractmethod
    def _solver(self, operations: Operations) -> CachedSolver:
        """Make the solver of the network's estimator, over these operations."""

    def _plain_solve(self) -> Solve:
        """Make the solve without CUDA graphs."""
        return GatheredSolve(self._solver(PlainOperations), self._pool, self._noise)

    def _capture(self) -> None:
        from cosyvoice_triton.token2wav.flow.cached_graphs import GraphedSolve  # its kernels need Triton

        self._solve = made = GraphedSolve(self._fused, self._pool, self._noise, self.limits, self.graph_frames)
        self.padded = padding(made.sizes)

    @property
    def cache_bytes(self) -> int:
        return self._pool.nbytes + self._prompts.nbytes

    @property
    def evicted(self) -> int:
        return self._prompts.evicted

    def reserve_prompts(self, nbytes: int) -> None:
        self._prompts.max_bytes = nbytes

    def _evict_idle(self) -> None:
        self._prompts.evict_idle()

    def _prompt_frames(self, prompt: Prompt) -> int:
        """Return how many frames of a voice are in its prompt cache."""
        return len(prompt.mel)

    def _prompt_bytes(self, prompt: Prompt) -> int:
        return self._pool.prompt_bytes(self._prompt_frames(prompt))

    def prefill_frames(self, prompt: Prompt) -> int:
        return 0 if prompt.digest in self._prompts else self._prompt_frames(prompt)

    def fitting(self, prompts: Sequence[Prompt]) -> list[bool]:
        return self._prompts.fitting([(prompt.digest, self._prompt_bytes(prompt)) for prompt in prompts])

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        if not self._prompts.make_room(sum(map(self._prompt_bytes, prompts))):
            return  # each is prefilled when a stream is opened in it
        for prompt, cache in zip(prompts, self._made(prompts), strict=True):
            self._prompts.add(prompt.digest, cache)

    def open(self, prompt: Prompt, vocoder: VocoderState) -> CachedStreamT:
        key = prompt.digest
        cache = self._prompts.acquire(key, self._prompt_bytes(prompt), lambda: self._made([prompt])[0])
        try:
            stream_cache = self._pool.acquire(cache)
        except BaseException:
            self._prompts.release(key)
            raise
        return self._stream(vocoder=vocoder, prompt=cache, prompt_key=key, cache=stream_cache)

    @abstractmethod
    def _stream(self, **parts: Any) -> CachedStreamT:
        """Make a stream, given the parts of a `CachedStream`."""

    def close(self, stream: CachedStreamT) -> None:
        self._pool.release(stream.cache)
        self._prompts.release(stream.prompt_key)
        del stream.prompt  # whoever still refers to the stream must not keep a voice that is evicted

    @abstractmethod
    def _prompt_window(self, prompt: Prompt) -> Window:
        """Return the encoder's input for the frames in a voice's prompt cache, at least those of one token."""

    def _prefill(self, prompts: Sequence[Prompt]) -> list[PromptCache]:
        """Make the prompt caches of different voices, by one solve."""
        speakers = [self._project_speaker(prompt) for prompt in prompts]
        frames = [self._prompt_frames(prompt) for prompt in prompts]
        attended = [index for index, count in enumerate(frames) if count]
        # The streams of a voice without such frames, as of an x-vector alone, begin with empty caches.
        left = dict.fromkeys(range(len(prompts)), self._pool.empty_prompt())
        if attended:
            mu = self._encoder.encode([self._prompt_window(prompts[index]) for index in attended])
            mels = [torch.from_numpy(prompts[index].mel[: frames[index]]) for index in attended]
            mel = pad_sequence(mels, batch_first=True)  # (B, T, mel)
            mu = mu[:, : mel.shape[1]]
            speaker = torch.cat([speakers[index] for index in attended])
            made = self._solve.prefill(mu, speaker, mel.to(mu), [frames[index] for index in attended])
            left |= zip(attended, made, strict=True)
        return [
            PromptCache(
                voice=prompt,
                attention=left[index].attention,
                history=left[index].history,
                rest=torch.from_numpy(prompt.mel[frames[index] :]).to(speakers[index]),
                speaker=speakers[index],
            )
            for index, prompt in enumerate(prompts)
        ]

    def _made(self, prompts: Sequence[Prompt]) -> list[PromptCache]:
        """Make prompt caches for which there is room. If the free memory is in too small pieces, idle ones are
        evicted."""
        try:
            return self._finite(self._prefill(prompts))
        except torch.OutOfMemoryError:
            logger.warning("the free memory is in too small pieces for a voice: idle voices are evicted")
        self._prompts.evict_idle()  # after the handler, so that the tensors in the error's frames are freed
        return self._finite(self._prefill(prompts))

    def _finite(self, caches: list[PromptCache]) -> list[PromptCache]:
        """Check prompt caches, and make those that are not finite again in float32. NotFiniteError if that does not
        help."""
        checked = []
        for cache, good in zip(caches, self._are_finite(caches), strict=True):
            if not good:
                logger.warning("a prompt cache is not finite: it is made again in float32")
                (exact,) = self.exact()._prefill([cache.voice])
                cache = self._converted(exact)
                if not self._are_finite([cache])[0]:
                    raise NotFiniteError("the prompt cache of the voice is not finite")
            checked.append(cache)
        return checked

    @abstractmethod
    def _window(self, chunk: Chunk[CachedStreamT], row: Row) -> Window:
        """Return the encoder's input for a chunk, whose last tokens are the row's."""

    def _known(self, streams: list[CachedStreamT], rows: list[Row], mu: Tensor) -> Tensor | None:
        """Return the known mel of the rows for `Solve.run`, of the type of mu."""
        return None

    def _render(self, chunks: list[Chunk[CachedStreamT]]) -> list[Tensor]:
        streams, rows = [], []
        for chunk in chunks:
            row = self._pool.row(chunk.stream, chunk.offset + chunk.new)
            if row.frames < chunk.frames:  # a part of its batch failed after its own
                raise RuntimeError("the stream's memory is ahead of its audio")
            streams.append(chunk.stream)
            rows.append(row)
        if faults.take("nan_voice"):
            chunks[0].stream.prompt.attention.keys.view(torch.float32).fill_(torch.nan)  # so is a scale
        mu = self._encode(chunks, rows)
        mel = self._solve.run(streams, rows, mu, self._known(streams, rows, mu))
        return [
            own[row.frames - chunk.frames : row.frames].T  # (T, C) -> (C, T)
            for own, chunk, row in zip(mel, chunks, rows, strict=True)
        ]

    def _encode(self, chunks: list[Chunk[CachedStreamT]], rows: list[Row]) -> Tensor:
        """Compute the encoder output of the rows, (B, T, mel), where T is that of the longest one."""
        windows, starts, longest = [], [], 0
        for chunk, row in zip(chunks, rows, strict=True):
            window = self._window(chunk, row)
            windows.append(window)
            starts.append(TOKEN_MEL_RATIO * len(window.tokens) - row.frames)
            longest = max(longest, row.frames)
        mu = self._encoder.encode(windows)
        frames = torch.tensor(starts)[:, None] + torch.arange(longest)
        frames = on_device(frames.clamp(max=mu.shape[1] - 1), mu.device)
        return mu.gather(1, frames[:, :, None].expand(-1, -1, mu.shape[2]))

    def _replace(self, stream: CachedStreamT, exact: Self, anew: CachedStreamT) -> None:
        """Replace what the stream keeps, and its voice's prompt cache for new streams, by those of a stream of
        `exact`."""
        self._pool.replace(stream.cache, exact._pool, anew.cache)
        stream.prompt = self._prompts.replace(stream.prompt_key, stream.prompt, self._converted(anew.prompt))

    def _converted(self, exact: PromptCache) -> PromptCache:
        """Return a prompt cache of `exact` in the formats of this flow."""
        dtype, stored = self._pool.history.dtype, self._pool.stored
        return replace(
            exact,
            attention=KeyValues(*(stored(x.to(dtype)) for x in (exact.attention.keys, exact.attention.values))),
            history=exact.history.to(dtype),
            rest=exact.rest.to(dtype),
            speaker=exact.speaker.to(dtype),
        )

    def _are_finite(self, caches: list[PromptCache]) -> list[bool]:
        """Return which prompt caches are finite. Histories and last values suffice: all others come before them."""
        last = [(cache.history, self._pool.loaded(cache.attention.values[-1, -1])) for cache in caches]
        return torch.stack([history.isfinite().all() & values.isfinite().all() for history, values in last]).tolist()

    def _plain(self, network: Any, *shared: Any, **options: Any) -> Self:
        return super()._plain(network, PromptCaches(0), *shared, cache_frames=self._pool.frames, **options)
