"""The flows as the engine drives them: voices and chunks of streams in, mels (80, T) out. Here the UNet flow."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from common.constants import EULER_STEPS, LOOKAHEAD_TOKENS, MAX_STREAM_TOKENS, MEL_BINS, TOKEN_MEL_RATIO
from common.flow.config import FlowConfig
from common.flow.unet_flow import UNetFlow
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

    def __init__(self, config: FlowConfig, noise: NoiseTape, steps: int, max_tokens: int):
        self.vocab_size = config.vocab
        self.speaker_dim = config.speaker_dim
        self._noise = noise
        self._steps = steps
        self._max_tokens = max_tokens

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

    def render(self, batch: Sequence[tuple[State, Chunk]]) -> list[Tensor]:
        """The mels (80, T) that chunks of different streams add. Each has passed `new_tokens`."""
        jobs = [Job(state, chunk, self.new_tokens(state, chunk)) for state, chunk in batch]
        mels = iter(self._render([job for job in jobs if job.new]))
        rendered = [next(mels) if job.new else torch.zeros(MEL_BINS, 0) for job in jobs]
        for job in jobs:
            job.state.rendered += job.new
        return rendered

    def whole(self, voice: Voice, tokens: Tensor) -> Tensor:
        """The mel (80, 2N) of a whole utterance, tokens (1, N), under full attention."""
        self._check_length(tokens.shape[1])
        return self._render_whole(voice, tokens)

    @abstractmethod
    def _render(self, jobs: list["Job[State]"]) -> list[Tensor]: ...

    @abstractmethod
    def _render_whole(self, voice: Voice, tokens: Tensor) -> Tensor: ...

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


@dataclass(kw_only=True)
class UNetState(FlowState):
    voice: Voice


class UNetStreaming(StreamingFlow[UNetState]):
    """CosyVoice2's flow. Each chunk renders the whole prefix under the training masks and keeps what is new.

    Where chunks end on 25-token boundaries counted from the prompt's start, the mel equals that of the finished
    utterance rendered at once under the same masks.
    """

    cumulative = True

    def __init__(
        self, network: UNetFlow, noise: NoiseTape, *, steps: int = EULER_STEPS, max_tokens: int = MAX_STREAM_TOKENS
    ):
        super().__init__(network.config, noise, steps, max_tokens)
        self._network = network

    def open(self, voice: Voice) -> UNetState:
        return UNetState(voice=voice)

    def _render(self, jobs: list[Job[UNetState]]) -> list[Tensor]:
        mels = []
        for job in jobs:
            tokens = torch.from_numpy(job.chunk.tokens).to(job.state.voice.tokens)[None]
            mel = self._inference(job.state.voice, tokens, streaming=True, finalize=job.chunk.last)
            mels.append(mel[:, -TOKEN_MEL_RATIO * job.new :])
        return mels

    def _render_whole(self, voice: Voice, tokens: Tensor) -> Tensor:
        return self._inference(voice, tokens, streaming=False, finalize=True)

    def _inference(self, voice: Voice, tokens: Tensor, *, streaming: bool, finalize: bool) -> Tensor:
        noise = self._noise_of(0, TOKEN_MEL_RATIO * (voice.tokens.shape[1] + tokens.shape[1]))
        mel = self._network.inference(
            tokens,
            voice.tokens,
            voice.mel,
            voice.embedding,
            noise=noise,
            streaming=streaming,
            finalize=finalize,
            steps=self._steps,
        )
        return mel[0]
