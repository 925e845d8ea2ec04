"""Stand-ins with which an engine with CUDA graphs runs on a CPU."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.token2wav.dit.memory import TailPool
from tests.token2wav.test_graphs import Replayed


class Cuda(str):
    """A device's name, whose type is that of a GPU."""

    type = "cuda"


class OnGpu(torch.nn.Parameter):
    """A weight that says that it is on a GPU."""

    device = Cuda("cpu")


class Noted(Replayed):
    """Which graphs are replayed, in order. `meanwhile`: called before and after each."""

    replays: list["Noted"] = []
    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, function: Callable[..., Any], inputs: tuple[Tensor, ...], result: Tensor, urgent: bool) -> None:
        super().__init__(function, inputs, result, urgent)
        self.urgent = urgent

    def replay(self) -> None:
        self.meanwhile()
        self.replays.append(self)
        super().replay()
        self.meanwhile()


class Addressed:
    """In place of the kernels that read and write keys and values by their addresses."""

    places: dict[int, Tensor] = {}  # those of prompts

    def __init__(self, pool: TailPool, table: Tensor) -> None:
        self._pool, self._columns = pool, table.T.tolist()
        rings = {slot.data_ptr(): slot for ring in (pool.keys, pool.values) for slot in ring}
        self._places = {**self.places, **rings}

    def attend(self, step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        for row, (keys, values, prompt_frames, slot, written, own, *_) in enumerate(self._columns):
            both, seen = [row, len(self._columns) + row], []
            for address, ring, new in ((keys, self._pool.keys, k), (values, self._pool.values, v)):
                of_prompt = [self._places[address][step, layer]] if prompt_frames else []
                parts = [*of_prompt, ring[slot, step, layer, :, :, :written], new[both, :, :own]]
                seen.append(torch.cat(parts, dim=2))
            out[both] = F.scaled_dot_product_attention(q[both], seen[0], seen[1])
        return out.transpose(1, 2).flatten(2)  # (R, H, T, D) -> (R, T, H * D)

    def keep(self, step: int, keys: Tensor, values: Tensor) -> None:
        for row, column in enumerate(self._columns):
            own, following, length = column[5], column[6], column[10]
            count = min(own, length)
            at = (following + torch.arange(count)) % length
            for address, new in zip(column[8:10], (keys, values), strict=True):
                latest = new[:, row :: len(self._columns), :, own - count : own]
                self._places[address][step].index_copy_(3, at, latest)
