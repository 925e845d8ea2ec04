"""What the flow's encoder is shown of a stream: its prompt, the tokens it remembers, the new ones.

The encoder is small beside the estimator, so that computing the whole window for every chunk costs less than keeping
and moving caches of it. A stream remembers `CONTEXT_TOKENS`; what is older drops out of the window as if it had not
been spoken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.constants import LOOKAHEAD_TOKENS
from common.flow.base import MelFlow
from common.token2wav.graphs import Graphs, sizes_up_to

ABSENT = -1
TOKENS = (160, 208, 256, 320, 416, 512, 768, 1024, 1280)  # the last: a prompt of 30 s, all context, the largest hop
MAX_TOKENS = 64 * 416


@dataclass(frozen=True)
class Window:
    """Tokens in the order in which the networks see them.

    tokens: (T, 1 + look-ahead) int64, each with those ahead of it, ABSENT where there is none.
    visible: (T,) int64, how many tokens from the first on each one sees.
    """

    tokens: np.ndarray
    visible: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


def with_ahead(tokens: np.ndarray, length: int) -> np.ndarray:
    """The first `length` of `tokens`, each with the `LOOKAHEAD_TOKENS` after it: (length, 1 + look-ahead)."""
    padded = np.pad(tokens, (0, max(0, length + LOOKAHEAD_TOKENS - len(tokens))), constant_values=ABSENT)
    return np.lib.stride_tricks.sliding_window_view(padded, 1 + LOOKAHEAD_TOKENS)[:length]


def stacked(windows: Sequence[Window], length: int) -> tuple[Tensor, Tensor]:
    """Windows padded to `length` tokens: tokens (B, length, 1 + look-ahead), visible (B, length), on the CPU."""
    tokens = np.full((len(windows), length, 1 + LOOKAHEAD_TOKENS), ABSENT, np.int64)
    visible = np.ones((len(windows), length), np.int64)  # padding sees one token: nothing is no softmax
    for row, window in enumerate(windows):
        tokens[row, : len(window)], visible[row, : len(window)] = window.tokens, window.visible
    return torch.from_numpy(tokens), torch.from_numpy(visible)


class WindowEncoder:
    """The flow's encoder over batches of windows; on a GPU as CUDA graphs where they are wanted."""

    def __init__(self, network: MelFlow, graphs: bool = True):
        self._network = network
        self._device = network.encoder_proj.weight.device
        self._graphs: Graphs | None = None
        if self._device.type == "cuda":
            # It plans every new shape of an attention for tens of milliseconds.
            torch.backends.cuda.enable_cudnn_sdp(False)
        if graphs and self._device.type == "cuda":
            sizes = sizes_up_to(MAX_TOKENS, TOKENS)
            self._graphs = Graphs(network.encode_window, self._inputs, sizes, "the encoder")

    def encode(self, windows: Sequence[Window]) -> Tensor:
        """-> (B, 2 T, mel), T at least the longest window; lasts until the next call."""
        B, longest = len(windows), max(len(window) for window in windows)
        size = self._graphs.fitting(B, longest) if self._graphs else None
        if self._graphs is None or size is None:
            return self._network.encode_window(*(x.to(self._device) for x in stacked(windows, longest)))
        values = (x.pin_memory() for x in stacked(windows, longest))
        return self._graphs.run(size, *values)[:B]

    def _inputs(self, B: int, T: int) -> tuple[Tensor, ...]:
        tokens = torch.zeros(B, T, 1 + LOOKAHEAD_TOKENS, dtype=torch.int64, device=self._device)
        return tokens, torch.ones(B, T, dtype=torch.int64, device=self._device)
