"""CosyVoice2's flow over many streams. Each chunk renders its stream's window anew and keeps what is new.

Caches would take 2.3 MB per frame (56 transformer blocks, 10 Euler steps, guidance, float16), which bounds a stream to
a few seconds of context; computing the window again bounds the cost of a chunk and needs no memory per stream.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.constants import CONTEXT_TOKENS, EULER_STEPS, MAX_STREAM_TOKENS, TOKEN_MEL_RATIO
from common.flow.layers import valid_frames
from common.flow.unet import UNetEstimator
from common.flow.unet_flow import UNetFlow
from common.token2wav.encoder_window import Window, with_ahead
from common.token2wav.noise import NoiseTape
from common.token2wav.streaming import Chunk, FlowState, Job, StreamingFlow, Voice


@dataclass(kw_only=True)
class UNetState(FlowState):
    voice: Voice
    prompt: np.ndarray  # (P,) its tokens
    speaker: Tensor  # (1, mel): projected x-vector


@dataclass(frozen=True)
class UNetRow:
    """One stream of a batch: frames of its window, how many of them were forgotten behind the prompt."""

    state: UNetState
    frames: int
    forgotten: int


class UNetSolve(Protocol):
    def run(self, rows: list[UNetRow], mu: Tensor) -> Tensor:
        """Encoder output of the windows, mu (B, T, mel) -> their mel (B, T, mel), lasting until the next call."""
        ...


class UNetStreaming(StreamingFlow[UNetState]):
    """Where chunks end on 25-token boundaries counted from the prompt's start and nothing has been forgotten yet, the
    mel equals that of the finished utterance rendered at once under the training masks. `graphs`: solve as CUDA graphs
    on a GPU.
    """

    cumulative = True
    batch_tokens = 2500

    def __init__(
        self,
        network: UNetFlow,
        noise: NoiseTape,
        *,
        steps: int = EULER_STEPS,
        max_tokens: int = MAX_STREAM_TOKENS,
        context_tokens: int = CONTEXT_TOKENS,
        graphs: bool = True,
    ):
        super().__init__(network, noise, steps, max_tokens, graphs)
        self._network = network
        self._chunk = network.config.encoder.chunk_tokens
        self._context = context_tokens
        self._solve: UNetSolve = PlainUNetSolve(network, noise, steps)
        ours = isinstance(network.decoder.estimator, UNetEstimator)
        if graphs and ours and network.encoder_proj.weight.is_cuda:
            from common.token2wav.unet.graphs import GraphedUNetSolve  # its kernels need Triton

            self._solve = GraphedUNetSolve(network, noise, steps)

    @property
    def cache_bytes(self) -> int:
        return 0

    def tokens(self, state: UNetState, chunk: Chunk) -> int:
        return len(state.prompt) + state.rendered - self._forgotten(state) + self.new_tokens(state, chunk)

    def open(self, voice: Voice) -> UNetState:
        speaker = self._network.project_speaker(voice.embedding)
        return UNetState(voice=voice, prompt=voice.tokens[0].cpu().numpy(), speaker=speaker)

    def _render(self, jobs: list[Job[UNetState]]) -> list[Tensor]:
        windows = [self._window(job) for job in jobs]
        rows = [
            UNetRow(job.state, TOKEN_MEL_RATIO * len(window), TOKEN_MEL_RATIO * self._forgotten(job.state))
            for job, window in zip(jobs, windows, strict=True)
        ]
        mel = self._solve.run(rows, self._encoder.encode(windows))
        return [
            mel[index, row.frames - TOKEN_MEL_RATIO * job.new : row.frames].T  # (T, C) -> (C, T)
            for index, (row, job) in enumerate(zip(rows, jobs, strict=True))
        ]

    def _forgotten(self, state: UNetState) -> int:
        """Tokens between the prompt and the window: whole training chunks, so that their boundaries stay."""
        return max(0, -(-(state.rendered - self._context) // self._chunk)) * self._chunk

    def _window(self, job: Job[UNetState]) -> Window:
        tokens = np.concatenate([job.state.prompt, job.chunk.tokens[self._forgotten(job.state) :]])
        count = len(job.state.prompt) + job.state.rendered + job.new - self._forgotten(job.state)
        chunk = np.arange(count) // self._chunk
        return Window(with_ahead(tokens, count), np.minimum((chunk + 1) * self._chunk, count))


def noise_indices(rows: list[UNetRow], frames: int) -> Tensor:
    """Absolute index of each window's frames: (B, frames)."""
    index = torch.arange(frames).repeat(len(rows), 1)
    for position, row in zip(index, rows, strict=True):
        position[row.state.voice.mel.shape[1] :] += row.forgotten
    return index


class PlainUNetSolve:
    """The network's own solve over padded windows, on any device."""

    def __init__(self, network: UNetFlow, noise: NoiseTape, steps: int):
        self._network = network
        self._noise = noise
        self._steps = steps

    def run(self, rows: list[UNetRow], mu: Tensor) -> Tensor:
        T, device = mu.shape[1], mu.device
        valid = valid_frames(torch.tensor([row.frames for row in rows], device=device), T).repeat(2, 1, 1)
        prompts = [row.state.voice.mel[0].to(mu.dtype) for row in rows]
        condition = torch.stack([F.pad(prompt.T, (0, T - len(prompt))) for prompt in prompts])  # (B, mel, T)
        noise = self._noise.at(noise_indices(rows, T).to(device)).transpose(1, 2)  # (B, T, C) -> (B, C, T)
        speaker = torch.cat([row.state.speaker for row in rows])
        estimator = self._network.decoder.estimator
        mel = self._network.decoder.solve(
            lambda _, *inputs: estimator(*inputs, valid=valid, streaming=True),
            noise,
            mu.transpose(1, 2),
            speaker,
            condition,
            self._steps,
        )
        return mel.transpose(1, 2)  # (B, C, T) -> (B, T, C)
