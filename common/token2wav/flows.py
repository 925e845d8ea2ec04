"""The two flows as the engine drives them: a voice and a stream's chunks in, mel out. Mels are (80, T)."""

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from common.constants import DIT_TAIL_FRAMES, EULER_STEPS, LOOKAHEAD_TOKENS, MEL_BINS, TOKEN_MEL_RATIO
from common.flow.cache import DiTFlowCache
from common.flow.config import FlowConfig
from common.flow.dit_flow import DiTFlow
from common.flow.unet_flow import UNetFlow
from common.token2wav.noise import NoiseTape

MAX_STREAM_TOKENS = 3_000  # two minutes; the UNet flow renders the whole prefix anew, the DiT's encoder cache grows


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
    """A flow network driven chunk by chunk (`open`, `step`) or at once (`whole`). Holds no state of a stream."""

    cumulative: bool  # a chunk carries all tokens of its stream so far, not only the new ones

    def __init__(self, config: FlowConfig, noise: NoiseTape, steps: int, max_tokens: int):
        self.vocab_size = config.vocab
        self.speaker_dim = config.speaker_dim
        self._noise = noise
        self._steps = steps
        self._max_tokens = max_tokens

    @abstractmethod
    def open(self, voice: Voice) -> State:
        """A new stream in `voice`."""

    def step(self, state: State, chunk: Chunk) -> Tensor:
        """The mel (80, T) of the tokens that `chunk` adds. Raises ValueError if it does not continue the stream."""
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
        if new == 0:
            return torch.zeros(MEL_BINS, 0)
        mel = self._render(state, chunk, new)
        state.rendered = ready
        return mel

    def whole(self, voice: Voice, tokens: Tensor) -> Tensor:
        """The mel (80, 2N) of a whole utterance, tokens (1, N), under full attention."""
        self._check_length(tokens.shape[1])
        return self._render_whole(voice, tokens)

    @abstractmethod
    def _render(self, state: State, chunk: Chunk, new: int) -> Tensor: ...

    @abstractmethod
    def _render_whole(self, voice: Voice, tokens: Tensor) -> Tensor: ...

    def _noise_of(self, start: int, frames: int) -> Tensor:
        return self._noise.read(start, frames).T[None]  # (T, C) -> (1, C, T)

    def _check_length(self, tokens: int) -> None:
        if tokens > self._max_tokens:
            raise ValueError(f"the stream has {tokens} speech tokens; the limit is {self._max_tokens}")


@dataclass(kw_only=True)
class UNetState(FlowState):
    voice: Voice


class UNetStreaming(StreamingFlow[UNetState]):
    """CosyVoice2's flow. Each step renders the whole prefix under the training masks and keeps what is new.

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

    def _render(self, state: UNetState, chunk: Chunk, new: int) -> Tensor:
        tokens = torch.from_numpy(chunk.tokens).to(state.voice.tokens)[None]
        mel = self._inference(state.voice, tokens, streaming=True, finalize=chunk.last)
        return mel[:, -TOKEN_MEL_RATIO * new :]

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


class VoiceCache:
    """The DiT's prompt caches of recently used voices: bounded in bytes, least recently used out first."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, DiTFlowCache] = OrderedDict()
        self.nbytes = 0

    def get(self, key: bytes) -> DiTFlowCache | None:
        cache = self._entries.get(key)
        if cache is not None:
            self._entries.move_to_end(key)
        return cache

    def put(self, key: bytes, cache: DiTFlowCache) -> None:
        """Keep `cache`, unless it alone is over the bound."""
        if cache.nbytes > self._max_bytes:
            return
        self._entries[key] = cache
        self.nbytes += cache.nbytes
        while self.nbytes > self._max_bytes:
            self.nbytes -= self._entries.popitem(last=False)[1].nbytes

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(kw_only=True)
class DiTState(FlowState):
    cache: DiTFlowCache


class DiTStreaming(StreamingFlow[DiTState]):
    """Step-Audio2's flow. A stream attends to its whole prompt and its most recent frames, in time order."""

    cumulative = False

    def __init__(
        self,
        network: DiTFlow,
        noise: NoiseTape,
        voices: VoiceCache,
        *,
        steps: int = EULER_STEPS,
        max_tokens: int = MAX_STREAM_TOKENS,
    ):
        super().__init__(network.config, noise, steps, max_tokens)
        self._network = network
        self._voices = voices

    def open(self, voice: Voice) -> DiTState:
        key = _digest(voice)
        cache = self._voices.get(key)
        if cache is None:
            noise = self._noise_of(0, voice.mel.shape[1])
            cache = self._network.setup_cache(voice.tokens, voice.mel, voice.embedding, noise=noise, steps=self._steps)
            self._voices.put(key, cache)
        return DiTState(cache=cache)

    def _render(self, state: DiTState, chunk: Chunk, new: int) -> Tensor:
        tokens = torch.from_numpy(chunk.tokens).to(state.cache.speaker.device, torch.int64)[None]
        noise = self._noise_of(state.cache.frames, TOKEN_MEL_RATIO * new)
        mel, cache = self._network.inference_chunk(tokens, state.cache, last=chunk.last, noise=noise)
        state.cache = cache.trimmed(DIT_TAIL_FRAMES)
        return mel[0]

    def _render_whole(self, voice: Voice, tokens: Tensor) -> Tensor:
        tokens = torch.cat([voice.tokens, tokens], dim=1)
        frames = voice.mel.shape[1]
        mel = self._network.inference(
            tokens,
            tokens.new_tensor([tokens.shape[1]]),
            voice.mel,
            tokens.new_tensor([frames]),
            voice.embedding,
            noise=self._noise_of(0, TOKEN_MEL_RATIO * tokens.shape[1]),
            steps=self._steps,
        )
        return mel[0, :, frames:]


def _digest(voice: Voice) -> bytes:
    digest = hashlib.sha256()
    for tensor in (voice.tokens, voice.mel, voice.embedding):
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.digest()
