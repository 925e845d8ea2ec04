"""The parts of the network over a batch of T tokens, in plain torch.

The residual stream x (T, hidden) is float32, all else has the type of the weights.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.llm.batch_sampler import BatchSampler

PAGE = 64  # tokens
CONSECUTIVE = 8  # a piece of a prompt is padded to a multiple of so many tokens


@dataclass(frozen=True)
class Places:
    """Where the tokens of a batch belong, and where the sequences' keys and values are.

    slots (T,), positions (T,): of each token. keys, values (layers, pages, kv_heads, PAGE, D). tables (slots, pages of
    a context): the page of a sequence's tokens n * PAGE to (n + 1) * PAGE - 1. rotary (2, context, D / 2).
    consecutive: each so many tokens, 1 or CONSECUTIVE, have places in one sequence, or are padding behind such ones.
    """

    slots: Tensor
    positions: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    rotary: Tensor
    consecutive: int


class Operations(Protocol):
    """Parts of the network: `Plain`, and kernels for a GPU."""

    def project_heads(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, places: Places, layer: int) -> Tensor:
        """RMS norm, queries, keys and values, rotary embedding -> queries (T, heads, D); keys and values are stored."""
        ...

    def attend(self, q: Tensor, places: Places, layer: int) -> Tensor:
        """Queries (T, heads, D) -> (T, heads * D): attention to the own sequence up to the token's position."""
        ...

    def project_add(self, y: Tensor, weight: Tensor, x: Tensor) -> None:
        """x += y weight^T"""
        ...

    def gated(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm, then silu(gate) * up -> (T, mlp)"""
        ...

    def head(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm, then logits (T, C), float32"""
        ...

    def draw(
        self,
        logits: Tensor,
        sampler: BatchSampler,
        slots: Tensor,
        drawn: Tensor,
        seeds: Tensor,
        sampling: Tensor,
        ends: Tensor,
    ) -> Tensor:
        """Logits (R, C) -> columns (R,)

        slots, drawn, seeds (R,): of each row, `drawn` tokens of the answer. sampling (R, 7): fields of `SamplingRow`.
        ends (slots, C): the end tokens of the request in each slot.
        """
        ...


class Plain:
    """Runs everywhere; what the kernels are compared with."""

    def project_heads(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, places: Places, layer: int) -> Tensor:
        kv_heads, _, D = places.keys.shape[2:]
        heads = F.linear(_normed(x, eps).to(weight.dtype), weight, bias).unflatten(1, (-1, D)).float()
        turned = heads[:, :-kv_heads]  # queries and keys
        cosines, sines = places.rotary[:, places.positions, None]  # (2, context, D / 2) -> (2, T, 1, D / 2)
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1).to(weight.dtype)
        pages, rows = places.tables[places.slots, places.positions // PAGE], places.positions % PAGE
        places.keys[layer, pages, :, rows] = turned[:, -kv_heads:]
        places.values[layer, pages, :, rows] = heads[:, -kv_heads:].to(weight.dtype)
        return turned[:, :-kv_heads]

    def attend(self, q: Tensor, places: Places, layer: int) -> Tensor:
        pages = places.tables[places.slots, : int(places.positions.max()) // PAGE + 1]  # (T, n)
        # (T, n, kv_heads, PAGE, D) -> (T, kv_heads, n * PAGE, D)
        keys, values = (pool[layer][pages].transpose(1, 2).flatten(2, 3) for pool in (places.keys, places.values))
        own = torch.arange(keys.shape[2], device=q.device) <= places.positions[:, None]  # (T, n * PAGE)
        # What a page holds beyond the sequence may be another one's rest, and not finite.
        values = values.masked_fill(~own[:, None, :, None], 0)
        q = q.unflatten(1, (keys.shape[1], -1)).float()  # (T, heads, D) -> (T, kv_heads, heads / kv_heads, D)
        scores = q @ keys.transpose(2, 3).float() * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~own[:, None, None], -torch.inf).softmax(-1)
        return (weights @ values.float()).flatten(1).to(keys.dtype)

    def project_add(self, y: Tensor, weight: Tensor, x: Tensor) -> None:
        x += F.linear(y, weight)

    def gated(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        gate, up = F.linear(_normed(x, eps).to(weight.dtype), weight).chunk(2, dim=1)
        return F.silu(gate) * up

    def head(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.linear(_normed(x, eps).to(weight.dtype), weight).float()

    def draw(
        self,
        logits: Tensor,
        sampler: BatchSampler,
        slots: Tensor,
        drawn: Tensor,
        seeds: Tensor,
        sampling: Tensor,
        ends: Tensor,
    ) -> Tensor:
        rows = sampling.T[:, :, None]  # (R, 7) -> (7, R, 1)
        return sampler.draw(logits, slots, drawn, seeds, rows, ends[slots], logits.shape[1])[:, 0]


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
