"""The interface of a flow as the engine drives it: chunks of streams -> mels (80, T)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import Self

from cosyvoice_triton.config import FlowRuntime, KvCacheDtype
from cosyvoice_triton.constants import EULER_STEPS, LOOKAHEAD_TOKENS, MAX_STREAM_TOKENS, MEL_BINS, TOKEN_MEL_RATIO
from cosyvoice_triton.networks.flow.cosyvoice3 import CosyVoice3Flow
from cosyvoice_triton.networks.flow.dit import DiTFlow
from cosyvoice_triton.networks.flow.layers import valid_frames
from cosyvoice_triton.networks.flow.unet import UNetFlow
from cosyvoice_triton.runtimes.loading import OnRuntime, check_heads, use_runtime
from cosyvoice_triton.stacks import Stack
from cosyvoice_triton.token2wav.flow.encoder_window import Window, WindowEncoder, with_ahead
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits, padding
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape
from cosyvoice_triton.token2wav.stream import Chunk, StreamT, VocoderState
from cosyvoice_triton.voice.prompt import Prompt

FlowT = TypeVar("FlowT", CosyVoice3Flow, DiTFlow, UNetFlow)


@dataclass(frozen=True, kw_only=True)
class FlowOptions:
    """How a stack's `loader` is to load its flow.

    runtime: of the flow's estimator (docs/gpu.md), already resolved. prompt_cache_bytes: for prompt caches of
    voices, if the flow has them. kv_cache_dtype: of its keys and values, as the setting names it. retries: whether what
    is not finite is computed again in float32.
    """

    stack: Stack
    device: str
    dtype: torch.dtype
    runtime: FlowRuntime
    steps: int
    limits: BatchLimits
    prompt_cache_bytes: int
    kv_cache_dtype: KvCacheDtype = "auto"
    retries: bool = True

    @property
    def graphs(self) -> bool:
        """Return whether to capture CUDA graphs, on a GPU."""
        return self.runtime != "torch"

    @property
    def exact(self) -> bool:
        """Return whether the network that is served is the checkpoint's own in float32."""
        return self.dtype == torch.float32 and self.runtime in ("torch", "cuda_graph")

    def load(self, load_network: Callable[..., FlowT], path: Path) -> tuple[FlowT, dict[str, Any]]:
        """Load the network of a `flow.pt`; return it with the arguments that every `StreamingFlow` takes. Unless torch
        runs it, the network's estimator is replaced by the runtime's files next to it. ValueError names what does not
        fit."""
        network = load_network(path, self.device, self.dtype)
        if self.runtime == "cuda_graph":
            check_heads(network)
        use_runtime(
            network,
            self.stack,
            self.runtime,
            path.parent,
            device=self.device,
            max_hop_tokens=self.limits.max_hop_tokens,
        )
        load_exact = partial(load_network, path, self.device) if self.retries and not self.exact else None
        options = {"limits": self.limits, "steps": self.steps, "graphs": self.graphs, "load_exact": load_exact}
        return network, options


class StreamingFlow(ABC, Generic[StreamT]):
    """A flow network driven chunk by chunk (`open`, `chunk`, `render`, `close`) or on whole utterances (`whole`)."""

    cumulative: bool  # a chunk carries all tokens of its stream so far, not only the new ones
    padded: Callable[[int, int], int]  # see `limits.padding`

    def __init__(
        self,
        network: CosyVoice3Flow | DiTFlow | UNetFlow,
        noise: NoiseTape,
        *,
        limits: BatchLimits,
        steps: int = EULER_STEPS,
        max_tokens: int = MAX_STREAM_TOKENS,
        graphs: bool = True,
        load_exact: Callable[[], Any] | None = None,
    ):
        """Make the flow of a network. graphs: whether to capture CUDA graphs, on a GPU. load_exact: loads the network
        in float32; without it, `network` is in float32."""
        self.limits = limits
        self._network = network
        estimator = network.decoder.estimator
        self.vocab_size = network.config.vocab
        self.speaker_dim = network.config.speaker_dim
        self._device = network.spk_embed_affine_layer.weight.device
        self._encoder = WindowEncoder(network, limits, graphs)
        self.padded = padding(())
        self._graphed = graphs and self._device.type == "cuda" and not isinstance(estimator, OnRuntime)
        self._noise = noise
        self._steps = steps
        self._max_tokens = max_tokens
        self._load_exact = load_exact

    @property
    @abstractmethod
    def batch_tokens(self) -> int:
        """Return how much a batch has at most, counted as `Chunk.computed`."""

    def exact(self) -> Self:
        """Load the same flow in float32, by plain operations, with room for one stream, for a single use: it is needed
        rarely and the GPU's memory has no place for it. Idle prompt caches make way for it."""
        if self._load_exact is None:
            return self._plain(self._network)
        self._evict_idle()
        return self._plain(self._load_exact())

    def for_worker(self, worker: int) -> Self | None:
        """Make a form of this flow over the same streams and prompt caches, with CUDA graphs of its own: it computes a
        batch while this one computes another one. None without graphs."""
        if not self._graphed:
            return None
        flow = copy(self)
        flow.limits = self.limits.of_worker(worker)
        flow._encoder = self._encoder.for_worker(flow.limits)
        flow._capture()
        return flow

    @abstractmethod
    def _capture(self) -> None:
        """Make the CUDA graphs of the solve, for the sizes of `limits`."""

    def reserve_prompts(self, nbytes: int) -> None:
        """Let prompt caches take that many bytes, of all workers together."""

    def _evict_idle(self) -> None:
        """Free the prompt caches that no stream uses."""

    @property
    def evicted(self) -> int:
        """Return how many prompt caches were evicted since the start."""
        return 0

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Return the memory in bytes that is reserved for streams and taken by prompt caches."""

    def prefill_frames(self, prompt: Prompt) -> int:
        """Return the mel frames that `open` has to prefill for a stream in that voice."""
        return 0

    def fitting(self, prompts: Sequence[Prompt]) -> list[bool]:
        """Return which streams in those voices could be opened now, together, as far as prompt caches are concerned."""
        return [True] * len(prompts)

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        """Build what `open` would build for different voices, in one batch, if there is room for all."""

    @abstractmethod
    def open(self, prompt: Prompt, vocoder: VocoderState) -> StreamT:
        """Begin a stream in the voice of `prompt`. Raises UnavailableError when there is no room for one."""

    def close(self, stream: StreamT) -> None:
        """Give back what the stream holds outside of itself."""

    def chunk(self, stream: StreamT, tokens: np.ndarray, *, final: bool, offset: int | None = None) -> Chunk[StreamT]:
        """Make the next chunk of `stream` of `tokens`, shaped as in `Chunk`.

        offset: how many tokens the sender counts as rendered. Raises ValueError if they do not continue the stream.
        """
        self.check_ids(tokens)
        if offset not in (None, stream.rendered):
            raise ValueError(f"token_offset is {offset}, but {stream.rendered} tokens of the stream are rendered")
        ready = len(tokens) - (0 if final else LOOKAHEAD_TOKENS) + (0 if self.cumulative else stream.rendered)
        new = ready - stream.rendered
        if new < (0 if final else 1):
            raise ValueError(
                f"{len(tokens)} speech tokens add {new} to the {stream.rendered} that are rendered; a chunk that is "
                f"not final adds 1 or more, and {LOOKAHEAD_TOKENS} of look-ahead"
            )
        self._check_length(ready)
        return Chunk(stream, tokens, final, stream.rendered, new, self._computed(stream, new))

    def check_ids(self, tokens: np.ndarray) -> None:
        """Raise ValueError, naming it, for a token outside the vocabulary."""
        bad = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if len(bad):
            raise ValueError(f"speech token {bad[0]} is outside 0..{self.vocab_size - 1}")

    def render(self, chunks: Sequence[Chunk[StreamT]]) -> list[Tensor]:
        """Return the mels (80, T) that chunks of different streams add."""
        adding = []
        for chunk in chunks:
            assert chunk.offset == chunk.stream.rendered
            if chunk.new:
                adding.append(chunk)
        mels = self._render(adding) if adding else []
        for index, chunk in enumerate(chunks):
            if not chunk.new:
                mels.insert(index, torch.zeros(MEL_BINS, 0, device=self._device))
            chunk.stream.rendered += chunk.new
        return mels

    def again(self, chunk: Chunk[StreamT]) -> Tensor:
        """Render a chunk whose mel was not finite again -> (80, T): in float32, from its stream's prompt and
        tokens. It replaces what the stream keeps and, for new streams, the prompt cache of its voice."""
        return self._again(chunk) if chunk.new else torch.zeros(MEL_BINS, 0, device=self._device)

    def whole(
        self, utterances: Sequence[tuple[Prompt, np.ndarray]], before_step: Callable[[], object] = lambda: None
    ) -> list[Tensor]:
        """Render the mels (80, 2N) of whole utterances of N tokens each, in one batch, under full attention. An
        exception of `before_step` ends the solve."""
        for _, tokens in utterances:
            self._check_length(len(tokens))
        ids = [np.concatenate([prompt.tokens, tokens]) for prompt, tokens in utterances]
        windows = [Window(with_ahead(row, len(row)), np.full(len(row), len(row))) for row in ids]
        mu = self._encoder.encode(windows, warn=False)[:, : TOKEN_MEL_RATIO * max(map(len, ids))].transpose(1, 2)
        frames = torch.tensor([TOKEN_MEL_RATIO * len(row) for row in ids], device=mu.device)
        mel = self._network.solve(
            mu,  # (B, T, C) -> (B, C, T)
            valid_frames(frames, mu.shape[2]),
            pad_sequence([torch.from_numpy(prompt.mel) for prompt, _ in utterances], batch_first=True).to(mu.device),
            torch.stack([torch.from_numpy(prompt.embedding) for prompt, _ in utterances]).to(mu.device),
            noise=self._noise.read(0, mu.shape[2]).T[None],  # (T, C) -> (1, C, T)
            steps=self._steps,
            before_step=before_step,
        )
        return [
            row[:, len(prompt.mel) : TOKEN_MEL_RATIO * len(tokens)]
            for row, (prompt, _), tokens in zip(mel, utterances, ids, strict=True)
        ]

    @abstractmethod
    def _computed(self, stream: StreamT, new: int) -> int:
        """Return how many tokens are computed to render `new` ones."""

    @abstractmethod
    def _render(self, chunks: list[Chunk[StreamT]]) -> list[Tensor]: ...

    @abstractmethod
    def _again(self, chunk: Chunk[StreamT]) -> Tensor: ...

    def _plain(self, network: Any, *shared: Any, **options: Any) -> Self:
        """Make a form of this flow with that network, without graphs, for one stream."""
        limits = replace(self.limits, max_streams=1)
        options |= {"limits": limits, "steps": self._steps, "max_tokens": self._max_tokens, "graphs": False}
        return type(self)(network, self._noise, *shared, **options)

    def _project_speaker(self, prompt: Prompt) -> Tensor:
        """Return the prompt's x-vector as the estimator takes it, (1, mel)."""
        return self._network.project_speaker(torch.from_numpy(prompt.embedding)[None].to(self._device))

    def _mel_of(self, prompt: Prompt) -> Tensor:
        """Return the prompt's mel on the device, (1, 2P, 80)."""
        return torch.from_numpy(prompt.mel)[None].to(self._device)

    def _check_length(self, tokens: int) -> None:
        if tokens > self._max_tokens:
            raise ValueError(f"the stream has {tokens} speech tokens; the limit is {self._max_tokens}")
