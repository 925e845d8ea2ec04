"""CosyVoice2's flow over many streams, without caches: each chunk computes the window of its stream again and keeps
what is new. That bounds the cost of a chunk and needs no memory per stream. Keys and values would take 2.3 MB per frame
(56 transformer blocks, 10 Euler steps, guidance, float16), which would limit streams to a few seconds of context.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton.constants import CONTEXT_TOKENS, TOKEN_MEL_RATIO
from cosyvoice_triton.device import pinned
from cosyvoice_triton.networks.flow.checkpoint import load_unet_flow
from cosyvoice_triton.networks.flow.layers import valid_frames
from cosyvoice_triton.networks.flow.unet import UNetFlow
from cosyvoice_triton.token2wav.flow.base import FlowOptions, StreamingFlow
from cosyvoice_triton.token2wav.flow.encoder_window import Window, with_ahead
from cosyvoice_triton.token2wav.gpu.graphs import TRIED, Graphs
from cosyvoice_triton.token2wav.gpu.limits import UNET_FRAMES, Size, padding
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape, flow_noise
from cosyvoice_triton.token2wav.stream import Chunk, Stream, VocoderState
from cosyvoice_triton.voice.prompt import Prompt


@dataclass(kw_only=True)
class WindowStream(Stream):
    prompt: Prompt
    mel: Tensor  # (1, 2P, mel): the prompt's, on the device
    speaker: Tensor  # (1, mel): projected x-vector


WindowChunk = Chunk[WindowStream]


def forgotten_tokens(chunk: WindowChunk) -> int:
    """Return how many tokens of the stream are older than the chunk's window."""
    return len(chunk.stream.prompt.tokens) + chunk.offset + chunk.new - chunk.computed


def noise_indices(chunks: list[WindowChunk], frames: int) -> Tensor:
    """Return the absolute index of each window's frames: (B, frames)."""
    index = torch.arange(frames).repeat(len(chunks), 1)
    for position, chunk in zip(index, chunks, strict=True):
        position[chunk.stream.mel.shape[1] :] += TOKEN_MEL_RATIO * forgotten_tokens(chunk)
    return index


if TYPE_CHECKING:  # its kernels need Triton
    from cosyvoice_triton.token2wav.flow.unet_fused import FusedUNet


class GraphedWindowSolve:
    """The solve on a GPU. One batch at a time: the graphs of all sizes share their memory."""

    def __init__(
        self,
        network: UNetFlow,
        estimator: "FusedUNet",
        noise: NoiseTape,
        sizes: Sequence[Size],
        steps: int,
        *,
        worker: int,
        make: Callable[..., Graphs] = Graphs,
    ):
        """Make the graphs. estimator: of the network, for the times of `steps` steps. sizes: batch and window length,
        mel frames. worker: see `Graphs`. make: makes the graphs."""
        _, self._widths = network.decoder.schedule(steps)
        self._estimator = estimator
        self._decoder = network.decoder
        self._noise = noise
        weight = network.spk_embed_affine_layer.weight
        self._mel_bins, self._device, self._dtype = weight.shape[0], weight.device, weight.dtype
        trial = partial(self._solve, steps=TRIED)
        self._graphs = make(self._solve, self._inputs, sizes, "the flow", worker=worker, trial=trial)

    def run(self, chunks: list[WindowChunk], mu: Tensor) -> Tensor:
        frames = max(TOKEN_MEL_RATIO * chunk.computed for chunk in chunks)
        return self._graphs.run_rows(
            len(chunks), frames, lambda part, size: self._run(chunks[part], mu[part], frames, size)
        )  # fmt: skip

    def _run(self, chunks: list[WindowChunk], mu: Tensor, frames: int, size: Size | None) -> Tensor:
        """Compute their mel (B, >= frames, mel)."""
        B, T = size or (1, frames)
        inputs = self._graphs.inputs(size) if size else self._inputs(B, T)
        condition = inputs[2]
        for index, chunk in enumerate(chunks):
            prompt = chunk.stream.mel[0]
            condition[index, : len(prompt)] = prompt
            condition[index, len(prompt) :] = 0
        inputs[1][: len(chunks)] = torch.cat([chunk.stream.speaker for chunk in chunks])
        lengths = torch.tensor([TOKEN_MEL_RATIO * chunk.computed for chunk in chunks])
        indices = noise_indices(chunks, T)
        inputs[3][: len(chunks)].copy_(pinned(lengths, mu.device), non_blocking=True)
        inputs[4][: len(chunks)].copy_(pinned(indices, mu.device), non_blocking=True)
        inputs[0][: len(chunks), : mu.shape[1]] = mu[:, :T]
        return (self._graphs.run(size) if size else self._solve(*inputs))[: len(chunks)]

    def _solve(
        self, mu: Tensor, speaker: Tensor, condition: Tensor, frames: Tensor, noise: Tensor, *, steps: int | None = None
    ) -> Tensor:
        """Solve, or do the first `steps` of it: mu, condition (B, T, mel), speaker (B, mel), frames (B,), noise (B, T)
        indices -> mel (B, T, mel)."""
        B, T, C = mu.shape
        x = self._noise.at(noise)
        rows = mu.new_zeros(self._decoder.rows, B, T, 4, C)
        rows[0, :, :, 1], rows[0, :, :, 2], rows[0, :, :, 3] = mu, speaker[:, None], condition
        for step, width in enumerate(self._widths[:steps]):
            rows[:, :, :, 0] = x
            velocity = self._estimator.velocity(step, rows.flatten(3).flatten(0, 1), frames)
            x = x + width * self._decoder.guided(velocity.float())
        return x

    def _inputs(self, B: int, T: int) -> tuple[Tensor, ...]:
        mu = torch.zeros(B, T, self._mel_bins, device=self._device, dtype=self._dtype)
        frames = torch.ones(B, dtype=torch.int64, device=self._device)
        return mu, torch.zeros_like(mu[:, 0]), torch.zeros_like(mu), frames, torch.zeros_like(mu[..., 0]).long()


def load(path: Path, options: FlowOptions) -> "UNetStreaming":
    """Load the flow of a `flow.pt`, and the runtime's files next to it. ValueError names what does not fit."""
    if options.kv_cache_dtype != "auto":
        raise ValueError(
            f"kv_cache_dtype {options.kv_cache_dtype!r}: the flow of the stack {options.stack.name!r} keeps no keys "
            "and values; set auto"
        )
    network, shared = options.load(load_unet_flow, path)
    return UNetStreaming(network, flow_noise(options.device), **shared)


class UNetStreaming(StreamingFlow[WindowStream]):
    """Streams CosyVoice2's flow.

    Where chunks end on 25-token boundaries counted from the prompt's start and no token has left the window yet, the
    mel equals that of the finished utterance rendered at once under the training masks.

    On a GPU with `graphs`, the solve is one of fused kernels in CUDA graphs, unless a runtime has the estimator.
    """

    cumulative = True
    _network: UNetFlow

    def __init__(self, network: UNetFlow, noise: NoiseTape, *, context_tokens: int = CONTEXT_TOKENS, **options: Any):
        super().__init__(network, noise, **options)
        self._chunk_tokens = network.config.encoder.chunk_tokens
        self._context = context_tokens
        self._solve: PlainWindowSolve | GraphedWindowSolve = PlainWindowSolve(network, noise, self._steps)
        if self._graphed:
            from cosyvoice_triton.token2wav.flow.unet_fused import FusedUNet  # its kernels need Triton

            self._estimator = FusedUNet(network.decoder.estimator, network.decoder.schedule(self._steps)[0])
            self._capture()

    @property
    def batch_tokens(self) -> int:
        return self.limits.profile.limits.unet_batch_tokens

    def _capture(self) -> None:
        sizes = self.limits.sizes(self.limits.window_frames, UNET_FRAMES)
        self._solve = GraphedWindowSolve(
            self._network, self._estimator, self._noise, sizes, self._steps, worker=self.limits.worker
        )
        self.padded = padding(sizes)

    @property
    def cache_bytes(self) -> int:
        return 0

    def open(self, prompt: Prompt, vocoder: VocoderState) -> WindowStream:
        speaker, mel = self._project_speaker(prompt), self._mel_of(prompt)
        return WindowStream(vocoder=vocoder, prompt=prompt, mel=mel, speaker=speaker)

    def _computed(self, stream: WindowStream, new: int) -> int:
        return len(stream.prompt.tokens) + stream.rendered + new - self._forgotten(stream)

    def _forgotten(self, stream: WindowStream) -> int:
        """Count the tokens between prompt and window: whole training chunks, so that their boundaries stay in place."""
        return max(0, -(-(stream.rendered - self._context) // self._chunk_tokens)) * self._chunk_tokens

    def _render(self, chunks: list[WindowChunk]) -> list[Tensor]:
        mel = self._solve.run(chunks, self._encoder.encode([self._window(chunk) for chunk in chunks]))
        ends = [TOKEN_MEL_RATIO * chunk.computed for chunk in chunks]
        return [
            mel[index, end - chunk.frames : end].T  # (T, C) -> (C, T)
            for index, (end, chunk) in enumerate(zip(ends, chunks, strict=True))
        ]

    def _again(self, chunk: WindowChunk) -> Tensor:
        exact, stream = self.exact(), chunk.stream
        anew = exact.open(stream.prompt, stream.vocoder)
        anew.rendered = chunk.offset
        (mel,) = exact.render([replace(chunk, stream=anew)])
        stream.mel, stream.speaker = self._mel_of(stream.prompt), self._project_speaker(stream.prompt)
        return mel

    def _plain(self, network: Any, *shared: Any, **options: Any) -> "UNetStreaming":
        return super()._plain(network, *shared, context_tokens=self._context, **options)

    def _window(self, chunk: WindowChunk) -> Window:
        tokens = np.concatenate([chunk.stream.prompt.tokens, chunk.tokens[forgotten_tokens(chunk) :]])
        training_chunk = np.arange(chunk.computed) // self._chunk_tokens
        visible = np.minimum((training_chunk + 1) * self._chunk_tokens, chunk.computed)
        return Window(with_ahead(tokens, chunk.computed), visible)


class PlainWindowSolve:
    """The network's own solve over padded windows, on any device."""

    def __init__(self, network: UNetFlow, noise: NoiseTape, steps: int):
        self._network = network
        self._noise = noise
        self._steps = steps

    def run(self, chunks: list[WindowChunk], mu: Tensor) -> Tensor:
        """Compute the windows' mel from encoder output: mu (B, T, mel) -> (B, T, mel), valid until the next call."""
        T, device = mu.shape[1], mu.device
        frames = torch.tensor([TOKEN_MEL_RATIO * chunk.computed for chunk in chunks], device=device)
        valid = valid_frames(frames, T).repeat(self._network.decoder.rows, 1, 1)
        prompts = [chunk.stream.mel[0].to(mu.dtype) for chunk in chunks]
        condition = torch.stack([F.pad(prompt.T, (0, T - len(prompt))) for prompt in prompts])  # (B, mel, T)
        noise = self._noise.at(noise_indices(chunks, T).to(device)).transpose(1, 2)  # (B, T, C) -> (B, C, T)
        speaker = torch.cat([chunk.stream.speaker for chunk in chunks])
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
