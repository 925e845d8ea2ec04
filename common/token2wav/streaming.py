"""The flows as the engine drives them: voices and chunks of streams in, mels (80, T) out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common.accel.estimators import OnRuntime
from common.constants import LOOKAHEAD_TOKENS, MEL_BINS, TOKEN_MEL_RATIO
from common.flow.dit_flow import DiTFlow
from common.flow.layers import valid_frames
from common.flow.unet_flow import UNetFlow
from common.token2wav.encoder_window import Window, WindowEncoder, with_ahead
from common.token2wav.noise import NoiseTape


@dataclass(frozen=True)
class Chunk:
    """Tokens that continue a stream, ids 0..6560.

    tokens: for the UNet flow all of the stream so far, for the DiT flow the new ones. A chunk that is not the `last`
        ends with `LOOKAHEAD_TOKENS` tokens of context, which the next chunk sends again as tokens of its own.
    offset: how many tokens of the stream are rendered already, by the sender's count; None if it does not count.
    """

    tokens: np.ndarray
    last: bool
    offset: int | None = None


@dataclass(frozen=True)
class Voice:
    """A prompt on the device, in the shape that the networks take."""

    tokens: Tensor  # (1, P) int64
    mel: Tensor  # (1, 2P, 80)
    embedding: Tensor  # (1, 192)


@dataclass(kw_only=True)
class FlowState:
    """What a flow keeps of one stream; `rendered` counts its tokens that have become mel."""

    rendered: int = 0


State = TypeVar("State", bound=FlowState)


class StreamingFlow(ABC, Generic[State]):
    """A flow network driven chunk by chunk (`open`, `render`, `close`) or at once (`whole`)."""

    cumulative: bool  # a chunk carries all tokens of its stream so far, not only the new ones
    batch_tokens: int  # of a batch, counted as `tokens` does: some 80 ms on an H200

    def __init__(self, network: DiTFlow | UNetFlow, noise: NoiseTape, steps: int, max_tokens: int, graphs: bool):
        self._solve_whole = network.solve
        estimator = network.decoder.estimator
        self._networks = estimator.networks if isinstance(estimator, OnRuntime) else ()
        self.vocab_size = network.config.vocab
        self.speaker_dim = network.config.speaker_dim
        self._encoder = WindowEncoder(network, graphs)
        self._noise = noise
        self._steps = steps
        self._max_tokens = max_tokens

    @property
    def contexts(self) -> tuple[int, float]:
        """Contexts of the estimator's runtime, and how many seconds were waited for one."""
        of_each = [network.contexts() for network in set(self._networks)]
        return sum(count for count, _ in of_each), sum(waited for _, waited in of_each)

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Memory reserved for streams and taken by voices."""

    @abstractmethod
    def open(self, voice: Voice) -> State:
        """A new stream in `voice`. Raises UnavailableError when there is no room for one."""

    def close(self, state: State) -> None:
        """Give back what the stream holds beside its state."""

    def new_tokens(self, state: State, chunk: Chunk) -> int:
        """How many tokens `chunk` adds to its stream. Raises ValueError if it does not continue it."""
        if chunk.offset not in (None, state.rendered):
            raise ValueError(f"token_offset is {chunk.offset}, but {state.rendered} tokens of the stream are rendered")
        ready = len(chunk.tokens) - (0 if chunk.last else LOOKAHEAD_TOKENS) + (0 if self.cumulative else state.rendered)
        new = ready - state.rendered
        if new < (0 if chunk.last else 1):
            raise ValueError(
                f"{len(chunk.tokens)} speech tokens add {new} to the {state.rendered} that are rendered; a chunk that "
                f"is not the last adds 1 or more, and {LOOKAHEAD_TOKENS} of look-ahead"
            )
        self._check_length(ready)
        return new

    @abstractmethod
    def tokens(self, state: State, chunk: Chunk) -> int:
        """How many tokens are computed to render `chunk`. Raises ValueError as `new_tokens` does."""

    def render(self, batch: Sequence[tuple[State, Chunk]]) -> list[Tensor]:
        """The mels (80, T) that chunks of different streams add. Each has passed `new_tokens`."""
        jobs = [Job(state, chunk, self.new_tokens(state, chunk)) for state, chunk in batch]
        speaking = [job for job in jobs if job.new]
        mels = iter(self._render(speaking) if speaking else [])
        rendered = [next(mels) if job.new else torch.zeros(MEL_BINS, 0) for job in jobs]
        for job in jobs:
            job.state.rendered += job.new
        return rendered

    def whole(self, utterances: Sequence[tuple[Voice, np.ndarray]]) -> list[Tensor]:
        """The mels (80, 2N) of whole utterances of N tokens each, together, under full attention."""
        for _, tokens in utterances:
            self._check_length(len(tokens))
        spoken = [np.concatenate([voice.tokens[0].cpu().numpy(), tokens]) for voice, tokens in utterances]
        windows = [Window(with_ahead(ids, len(ids)), np.full(len(ids), len(ids))) for ids in spoken]
        mu = self._encoder.encode(windows)[:, : TOKEN_MEL_RATIO * max(map(len, spoken))].transpose(1, 2)
        frames = torch.tensor([TOKEN_MEL_RATIO * len(ids) for ids in spoken], device=mu.device)
        mel = self._solve_whole(
            mu,  # (B, T, C) -> (B, C, T)
            valid_frames(frames, mu.shape[2]),
            pad_sequence([voice.mel[0] for voice, _ in utterances], batch_first=True),
            torch.cat([voice.embedding for voice, _ in utterances]),
            noise=self._noise_of(0, mu.shape[2]),
            steps=self._steps,
        )
        return [
            row[:, voice.mel.shape[1] : TOKEN_MEL_RATIO * len(ids)]
            for row, (voice, _), ids in zip(mel, utterances, spoken, strict=True)
        ]

    @abstractmethod
    def _render(self, jobs: list["Job[State]"]) -> list[Tensor]: ...

    def _noise_of(self, start: int, frames: int) -> Tensor:
        return self._noise.read(start, frames).T[None]  # (T, C) -> (1, C, T)

    def _check_length(self, tokens: int) -> None:
        if tokens > self._max_tokens:
            raise ValueError(f"the stream has {tokens} speech tokens; the limit is {self._max_tokens}")


@dataclass(frozen=True)
class Job(Generic[State]):
    """A chunk to render: the `new` last tokens of it, look-ahead aside."""

    state: State
    chunk: Chunk
    new: int
