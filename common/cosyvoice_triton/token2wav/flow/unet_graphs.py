"""The solve of windows on a GPU: an estimator of fused kernels, as CUDA graphs by batch size and window length."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cosyvoice_triton.constants import TOKEN_MEL_RATIO
from cosyvoice_triton.device import pinned
from cosyvoice_triton.networks.flow.unet import UNetFlow
from cosyvoice_triton.token2wav.flow.unet_window import WindowChunk, noise_indices
from cosyvoice_triton.token2wav.gpu.graphs import TRIED, Graphs
from cosyvoice_triton.token2wav.gpu.limits import Size
from cosyvoice_triton.token2wav.gpu.noise import NoiseTape

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
