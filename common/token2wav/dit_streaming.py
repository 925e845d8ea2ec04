"""Step-Audio2's flow over many streams: one batched solve for their chunks, whatever their sizes and histories."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.constants import EULER_STEPS, LOOKAHEAD_TOKENS, MAX_STREAM_TOKENS, TOKEN_MEL_RATIO
from common.flow.cache import DiTFlowCache, EncoderCache
from common.flow.dit_flow import DiTFlow
from common.token2wav.dit_memory import GatheredSolve, Row, Solve, Tail, TailPool
from common.token2wav.dit_solver import DiTSolver
from common.token2wav.flows import FlowState, Job, StreamingFlow, Voice
from common.token2wav.noise import NoiseTape


class VoiceCache:
    """Prompt caches of recently used voices: bounded in bytes, least recently used out first.

    A voice that streams still speak in lives on with them after it has been forgotten here.
    """

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
    voice: DiTFlowCache  # shared by all streams of the voice, never changed
    encoder: EncoderCache
    tail: Tail
    frames: int  # mel frames so far, prompt included: where the next chunk's noise starts

    @property
    def complete(self) -> bool:
        """Whether no frame has been forgotten yet."""
        return self.tail.frames == self.frames - self.voice.prompt_frames


class DiTStreaming(StreamingFlow[DiTState]):
    """A stream attends to its whole prompt and its most recent frames."""

    cumulative = False

    def __init__(
        self,
        network: DiTFlow,
        noise: NoiseTape,
        voices: VoiceCache,
        *,
        max_streams: int,
        steps: int = EULER_STEPS,
        max_tokens: int = MAX_STREAM_TOKENS,
    ):
        super().__init__(network.config, noise, steps, max_tokens)
        self._network = network
        self._voices = voices
        on_gpu = network.input_embedding.weight.is_cuda
        # It plans every new shape for tens of milliseconds, and the encoder's context is never twice of one length.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._solver = DiTSolver(network, steps, compiled=on_gpu)
        self._pool = TailPool(self._solver, max_streams)
        self._solve = _graphed_solve(self._solver, self._pool) if on_gpu else GatheredSolve(self._solver, self._pool)

    def open(self, voice: Voice) -> DiTState:
        key = _digest(voice)
        cache = self._voices.get(key)
        if cache is None:
            noise = self._noise_of(0, voice.mel.shape[1])
            cache = self._network.setup_cache(voice.tokens, voice.mel, voice.embedding, noise=noise, steps=self._steps)
            self._voices.put(key, cache)
        return DiTState(voice=cache, encoder=cache.encoder, tail=self._pool.acquire(cache), frames=cache.frames)

    def close(self, state: DiTState) -> None:
        self._pool.release(state.tail)

    def _render(self, jobs: list[Job[DiTState]]) -> list[Tensor]:
        if not jobs:
            return []
        states = [job.state for job in jobs]
        lengths = [job.new for job in jobs]
        longest = max(lengths)
        T = TOKEN_MEL_RATIO * longest
        mu, encoders = self._encode(jobs, longest)
        conditions = self._solver.conditions(mu, torch.cat([state.voice.speaker for state in states]))
        noise = torch.stack([self._noise.read(state.frames, T) for state in states])
        rows = [Row(state.voice, state.tail, TOKEN_MEL_RATIO * new) for state, new in zip(states, lengths, strict=True)]
        mel, scratch = self._solve.run(rows, noise, conditions)
        for index, (job, row, encoder) in enumerate(zip(jobs, rows, encoders, strict=True)):
            if not job.chunk.last:
                self._pool.commit(row.tail, scratch, index, row.frames)
                job.state.encoder = encoder
                job.state.frames += row.frames
        return [mel[index, : row.frames].T for index, row in enumerate(rows)]  # (T, C) -> (C, T)

    def _encode(self, jobs: list[Job[DiTState]], longest: int) -> tuple[Tensor, list[EncoderCache]]:
        """Encoder output (B, 2 * longest, 80) of the chunks, padded, and the streams' next encoder caches."""
        device = jobs[0].state.voice.speaker.device
        width = longest + LOOKAHEAD_TOKENS
        padded = [F.pad(torch.from_numpy(job.chunk.tokens), (0, width - len(job.chunk.tokens))) for job in jobs]
        h, caches = self._network.encoder.forward_chunks(
            self._network.input_embedding(torch.stack(padded).to(device)),
            [job.new for job in jobs],
            [job.chunk.last for job in jobs],
            [job.state.encoder for job in jobs],
        )
        return self._network.encoder_proj(h), caches

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


def _graphed_solve(solver: DiTSolver, pool: TailPool) -> Solve:
    from common.token2wav.dit_graphs import GraphedSolve  # its kernels need Triton, which CPU builds of torch lack

    return GraphedSolve(solver, pool)


def _digest(voice: Voice) -> bytes:
    digest = hashlib.sha256()
    for tensor in (voice.tokens, voice.mel, voice.embedding):
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.digest()
