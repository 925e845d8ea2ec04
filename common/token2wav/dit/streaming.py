"""Step-Audio2's flow over many streams: one batched solve for their chunks, whatever their sizes and histories."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.constants import CONTEXT_TOKENS, EULER_STEPS, MAX_STREAM_TOKENS, TOKEN_MEL_RATIO
from common.errors import UnavailableError
from common.flow.dit import DiTEstimator
from common.flow.dit_flow import DiTFlow
from common.token2wav.dit.memory import ChunkwiseSolve, DiTVoice, GatheredSolve, Row, Solve, Tail, TailPool
from common.token2wav.dit.solver import DiTSolver
from common.token2wav.encoder_window import Window, with_ahead
from common.token2wav.noise import NoiseTape
from common.token2wav.streaming import Chunk, FlowState, Job, StreamingFlow, Voice


@dataclass
class _Entry:
    voice: DiTVoice
    streams: int = 0


class VoiceCache:
    """Prompt caches of voices, bounded in bytes. Those that nobody speaks in make room, least recently used first."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.nbytes = 0

    def acquire(self, key: bytes, nbytes: int, make: Callable[[], DiTVoice]) -> DiTVoice:
        """The voice for one more stream, made if it is not there; UnavailableError if there is no room for it."""
        entry = self._entries.get(key)
        if entry is None:
            self._make_room(nbytes)
            entry = self._entries[key] = _Entry(make())
            self.nbytes += entry.voice.nbytes
        self._entries.move_to_end(key)
        entry.streams += 1
        return entry.voice

    def release(self, key: bytes) -> None:
        """One of its streams has ended."""
        self._entries[key].streams -= 1

    def __len__(self) -> int:
        return len(self._entries)

    def _make_room(self, nbytes: int) -> None:
        for key in [key for key, entry in self._entries.items() if entry.streams == 0]:
            if self.nbytes + nbytes > self._max_bytes:
                self.nbytes -= self._entries.pop(key).voice.nbytes
        if self.nbytes + nbytes > self._max_bytes:
            raise UnavailableError(
                f"no room for another voice: it takes {nbytes / 2**20:.1f} MiB, the {len(self)} voices that are spoken "
                f"in take {self.nbytes / 2**20:.1f} of {self._max_bytes / 2**20:.1f} MiB (voice_cache_mb)"
            )


@dataclass(kw_only=True)
class DiTState(FlowState):
    voice: DiTVoice
    voice_key: bytes
    tail: Tail
    tokens: np.ndarray  # those it remembers, look-ahead excluded
    cuts: list[int]  # how many tokens were rendered after each of its chunks

    @property
    def complete(self) -> bool:
        """Whether no frame has been forgotten yet."""
        return self.tail.frames == TOKEN_MEL_RATIO * self.rendered


class DiTStreaming(StreamingFlow[DiTState]):
    """A stream attends to its whole prompt and its most recent frames. `graphs`: solve as CUDA graphs on a GPU."""

    cumulative = False
    batch_tokens = 1600

    def __init__(
        self,
        network: DiTFlow,
        noise: NoiseTape,
        voices: VoiceCache,
        *,
        max_streams: int,
        steps: int = EULER_STEPS,
        max_tokens: int = MAX_STREAM_TOKENS,
        graphs: bool = True,
    ):
        super().__init__(network, noise, steps, max_tokens, graphs)
        self._network = network
        self._voices = voices
        weight = network.encoder_proj.weight
        self._pool = TailPool(network.decoder.estimator.config, weight, steps, max_streams)
        self._solve: Solve
        if not isinstance(network.decoder.estimator, DiTEstimator):
            self._solve = ChunkwiseSolve(network, self._pool, noise)
        elif graphs and weight.is_cuda:
            from common.token2wav.dit.graphs import GraphedSolve  # its kernels need Triton

            self._solve = GraphedSolve(network, self._pool, noise, steps)
        else:
            self._solve = GatheredSolve(DiTSolver(network, steps), self._pool, noise)

    @property
    def cache_bytes(self) -> int:
        return self._pool.nbytes + self._voices.nbytes

    def open(self, voice: Voice) -> DiTState:
        key = _digest(voice)
        shared = self._voices.acquire(key, self._pool.voice_bytes(voice.mel.shape[1]), lambda: self._listen(voice))
        try:
            tail = self._pool.acquire(shared)
        except UnavailableError:
            self._voices.release(key)
            raise
        return DiTState(voice=shared, voice_key=key, tail=tail, tokens=np.zeros(0, np.int64), cuts=[])

    def close(self, state: DiTState) -> None:
        self._pool.release(state.tail)
        self._voices.release(state.voice_key)

    def tokens(self, state: DiTState, chunk: Chunk) -> int:
        return self.new_tokens(state, chunk)

    def _listen(self, voice: Voice) -> DiTVoice:
        tokens = voice.tokens[0].cpu().numpy()
        count = len(tokens)  # whose look-ahead at the end are its own first ones
        window = Window(with_ahead(np.concatenate([tokens, tokens]), count), np.full(count, count))
        mu = self._encoder.encode([window])[:, : TOKEN_MEL_RATIO * count]
        speaker = self._network.project_speaker(voice.embedding)
        heard = self._solve.listen(mu, speaker, voice.mel.to(mu.dtype))
        return DiTVoice(tokens=tokens, attention=heard.attention, history=heard.history, speaker=speaker)

    def _render(self, jobs: list[Job[DiTState]]) -> list[Tensor]:
        rows = [_row(job) for job in jobs]
        mel = self._solve.run(rows, self._encode(jobs))
        for job in jobs:
            job.state.tokens = np.concatenate([job.state.tokens, job.chunk.tokens[: job.new]])[-CONTEXT_TOKENS:]
            job.state.cuts.append(job.state.rendered + job.new)
        return [mel[index, : row.frames].T for index, row in enumerate(rows)]  # (T, C) -> (C, T)

    def _encode(self, jobs: list[Job[DiTState]]) -> Tensor:
        """Encoder output of the chunks, (B, 2 * longest, mel), padded behind."""
        windows = [_window(job) for job in jobs]
        mu = self._encoder.encode(windows)  # of the whole windows
        starts = torch.tensor([TOKEN_MEL_RATIO * (len(w) - job.new) for w, job in zip(windows, jobs, strict=True)])
        frames = starts[:, None] + torch.arange(TOKEN_MEL_RATIO * max(job.new for job in jobs))
        frames = frames.clamp(max=mu.shape[1] - 1).to(mu.device)
        return mu.gather(1, frames[:, :, None].expand(-1, -1, mu.shape[2]))


def _row(job: Job[DiTState]) -> Row:
    state = job.state
    start = state.voice.frames + TOKEN_MEL_RATIO * state.rendered
    return Row(state.voice, state.tail, TOKEN_MEL_RATIO * job.new, start)


def _window(job: Job[DiTState]) -> Window:
    """A chunk sees itself and all before it. The prompt's last tokens have its first ones ahead of them."""
    state, prompt = job.state, job.state.voice.tokens
    tokens = np.concatenate([state.tokens, job.chunk.tokens])
    count = len(state.tokens) + job.new
    forgotten = state.rendered - len(state.tokens)
    ends = np.array([*state.cuts, state.rendered + job.new])
    ends = ends[np.searchsorted(ends, forgotten + np.arange(count), side="right")]  # of each token's chunk
    return Window(
        tokens=np.concatenate([with_ahead(np.concatenate([prompt, prompt]), len(prompt)), with_ahead(tokens, count)]),
        visible=len(prompt) + np.concatenate([np.zeros_like(prompt), ends - forgotten]),
    )


def _digest(voice: Voice) -> bytes:
    digest = hashlib.sha256()
    for tensor in (voice.tokens, voice.mel, voice.embedding):
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.digest()
