"""The window of a stream that the flow's encoder computes: the prompt, the recent tokens, the new ones.

The encoder keeps no caches of a stream, which would take 14 MB each, and computes the whole window for every chunk. A
window holds `CONTEXT_TOKENS` of the stream's past; older tokens are left out.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cosyvoice_triton.constants import LOOKAHEAD_TOKENS
from cosyvoice_triton.device import pinned
from cosyvoice_triton.networks.flow.base import ConformerFlow, MelFlow
from cosyvoice_triton.token2wav.gpu.graphs import TRIED, Graphs
from cosyvoice_triton.token2wav.gpu.limits import ENCODER_TOKENS, BatchLimits, Size

ABSENT = -1
AHEAD = np.arange(1 + LOOKAHEAD_TOKENS)


@dataclass(frozen=True)
class Window:
    """The encoder's input for one stream.

    tokens: (T, 1 + look-ahead) int64, each with the tokens after it, ABSENT where there is none.
    visible: (T,) int64, how many tokens, counted from the first, each one attends to.
    """

    tokens: np.ndarray
    visible: np.ndarray


def with_ahead(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the first `length` of `tokens`, each with the `LOOKAHEAD_TOKENS` after it: (length, 1 + look-ahead)."""
    padded = np.full(length + LOOKAHEAD_TOKENS, ABSENT, np.int64)
    known = tokens[: len(padded)]
    padded[: len(known)] = known
    return padded[np.arange(length)[:, None] + AHEAD]


def stacked(windows: Sequence[Window], length: int) -> tuple[Tensor, Tensor]:
    """Stack windows, padded to `length`: tokens (B, length, 1 + look-ahead), visible (B, length), on the CPU."""
    tokens = np.full((len(windows), length, 1 + LOOKAHEAD_TOKENS), ABSENT, np.int64)
    visible = np.ones((len(windows), length), np.int64)  # padding attends to one token: a softmax over none is NaN
    for row, window in enumerate(windows):
        count = len(window.tokens)
        tokens[row, :count], visible[row, :count] = window.tokens, window.visible
    return torch.from_numpy(tokens), torch.from_numpy(visible)


class WindowEncoder:
    """The flow's encoder over batches of windows; with `graphs`, by fused kernels in CUDA graphs on a GPU."""

    def __init__(self, network: MelFlow, limits: BatchLimits, graphs: bool = True):
        self._network = network
        self._device = network.spk_embed_affine_layer.weight.device
        self._graphs: Graphs | None = None
        if self._device.type == "cuda":
            # cuDNN plans every new attention shape for tens of milliseconds.
            torch.backends.cuda.enable_cudnn_sdp(False)
        if graphs and self._device.type == "cuda":
            self._fused, self._trial = _fused(network, limits)
            self._capture(limits)

    def for_worker(self, limits: BatchLimits) -> "WindowEncoder":
        """Return this encoder with CUDA graphs of its own."""
        encoder = copy(self)
        encoder._capture(limits)
        return encoder

    def _capture(self, limits: BatchLimits) -> None:
        self._graphs = Graphs(
            self._fused, self._inputs, _sizes(limits), "the encoder", worker=limits.worker, trial=self._trial
        )

    def encode(self, windows: Sequence[Window], *, warn: bool = True) -> Tensor:
        """Encode windows -> (B, 2 T, mel), T at least that of the longest one. Valid until the next call.

        warn: log a length beyond every graph; whole utterances may be of such lengths.
        """
        graphs, longest = self._graphs, max(len(window.tokens) for window in windows)
        if graphs is None:
            return self._eager(windows, longest)

        def compute(part: slice, size: Size | None) -> Tensor:
            of = windows[part]
            if size is None:
                return self._eager(of, longest)
            graphs.inputs(size)[1][len(of) :] = 1  # rows of padding
            return graphs.run(size, *(pinned(x, self._device) for x in stacked(of, size[1])))[: len(of)]

        return graphs.run_rows(len(windows), longest, compute, warn=warn)

    def _eager(self, windows: Sequence[Window], longest: int) -> Tensor:
        tokens, visible = stacked(windows, longest)
        return self._network.encode_window(tokens.to(self._device), visible.to(self._device))

    def _inputs(self, B: int, T: int) -> tuple[Tensor, ...]:
        tokens = torch.zeros(B, T, 1 + LOOKAHEAD_TOKENS, dtype=torch.int64, device=self._device)
        return tokens, torch.ones(B, T, dtype=torch.int64, device=self._device)


def _sizes(limits: BatchLimits) -> list[Size]:
    return limits.sizes(limits.window_tokens, ENCODER_TOKENS)


def _fused(network: MelFlow, limits: BatchLimits) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return `network.encode_window`, for a conformer by fused kernels, and its trial, see `Graphs`."""
    if not isinstance(network, ConformerFlow):
        return network.encode_window, network.encode_window
    from cosyvoice_triton.token2wav.flow.encoder_fused import FusedEncoder  # its kernels need Triton

    fused = FusedEncoder(network, max(length for _, length in _sizes(limits)))
    return fused, partial(fused, tried=TRIED)
