"""The parts of the network over a batch of T tokens, in plain torch.

The residual stream x (T, hidden) is float32, all else has the type of the weights.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton.llm.batch_sampler import BatchSampler, SamplingRow

PAGE = 64  # tokens
CONSECUTIVE = 8  # a piece of a prompt is padded to a multiple of so many tokens
RING = 16  # steps whose columns are kept on the device until they are copied
TURN = 8  # gates of the MLP, then their values, in turn
# In place of a column of the logits: the row's request had ended before; its logits are not finite.
NOTHING, FAULT = -1, -2


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


@dataclass
class Residual:
    """The residual stream x (T, hidden). What an operation may have computed of it already: normed, the same after a
    norm; copied, the same in the type of the weights, and sums of its squares (T, n)."""

    x: Tensor
    normed: Tensor | None = None
    copied: tuple[Tensor, Tensor] | None = None


class Requests:
    """What a step reads and writes of all requests, by slot: all of it on the device.

    The last slot is for rows without a request. numbers (slots, 5): id of the last token, which the next step computes;
    tokens before it; tokens of the answer; the most of these; what selects its random numbers. ended (slots,); ends
    (slots, C): the end tokens; sampling (slots, 7): fields of `SamplingRow`. first: id of column 0 of the logits.
    ring (RING, rows): columns of the last steps, or NOTHING or FAULT. steps (1,): how many there were.
    """

    def __init__(self, bias: Tensor, first: int, slots: int) -> None:
        """`bias` (C,): of the logits."""
        device, rows = bias.device, slots + 1
        self.numbers = torch.zeros(rows, 5, dtype=torch.long, device=device)
        self.ended = torch.ones(rows, dtype=torch.bool, device=device)
        self.ends = torch.zeros(rows, len(bias), dtype=torch.bool, device=device)
        self.sampling = torch.ones(rows, len(SamplingRow._fields), device=device)
        self.sampler = BatchSampler(bias, rows)
        self.first = first
        self.ring = torch.zeros(RING, slots, dtype=torch.int32, device=device)
        self.steps = torch.zeros(1, dtype=torch.long, device=device)


class Operations(Protocol):
    """Parts of the network: `Plain`, and kernels for a GPU."""

    def begin(self, requests: Requests, batch: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor, Residual]:
        """Slots (R,) of a batch -> the same, with the last slot for those that have ended; the positions (R,) of their
        last tokens; these tokens' embeddings. A step begins."""
        ...

    def project_heads(
        self, x: Residual, weight: Tensor, bias: Tensor, eps: float, places: Places, layer: int
    ) -> Tensor:
        """RMS norm, queries, keys and values, rotary embedding -> queries (T, heads, D); keys and values are stored."""
        ...

    def attend(self, q: Tensor, places: Places, layer: int) -> Tensor:
        """Queries (T, heads, D) -> (T, heads * D): attention to the own sequence up to the token's position."""
        ...

    def project_add(self, y: Tensor, weight: Tensor, x: Residual, eps: float) -> None:
        """x += y weight^T. eps: of the norm that follows."""
        ...

    def gated(self, x: Residual, weight: Tensor, eps: float) -> Tensor:
        """RMS norm, then silu(gate) * up -> (T, mlp)"""
        ...

    def head(self, x: Residual, weight: Tensor, eps: float) -> Tensor:
        """RMS norm, then logits (T, C), float32"""
        ...

    def draw(self, logits: Tensor, requests: Requests, slots: Tensor) -> None:
        """Draw a column of each row of logits (R, C), and bring the state of the requests in these slots (R,) up to
        date. A step ends."""
        ...


class Plain:
    """Runs everywhere; what the kernels are compared with."""

    def begin(self, requests: Requests, batch: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor, Residual]:
        slots = batch.masked_fill(requests.ended[batch], len(requests.ended) - 1)
        last, positions = requests.numbers[slots, :2].T
        requests.steps += 1
        return slots, positions, Residual(embedding[last].float())

    def project_heads(
        self, x: Residual, weight: Tensor, bias: Tensor, eps: float, places: Places, layer: int
    ) -> Tensor:
        kv_heads, _, D = places.keys.shape[2:]
        heads = F.linear(_normed(x.x, eps).to(weight.dtype), weight, bias).unflatten(1, (-1, D)).float()
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

    def project_add(self, y: Tensor, weight: Tensor, x: Residual, eps: float) -> None:
        x.x += F.linear(y, weight)

    def gated(self, x: Residual, weight: Tensor, eps: float) -> Tensor:
        both = F.linear(_normed(x.x, eps).to(weight.dtype), weight)
        gate, up = both.unflatten(1, (-1, 2, TURN)).unbind(2)  # (T, 2 mlp) -> (T, mlp / 8, 8) twice
        return (F.silu(gate) * up).flatten(1)

    def head(self, x: Residual, weight: Tensor, eps: float) -> Tensor:
        return F.linear(_normed(x.x, eps).to(weight.dtype), weight).float()

    def draw(self, logits: Tensor, requests: Requests, slots: Tensor) -> None:
        sampler = requests.sampler
        broken = ~(logits + sampler.bias).amax(1).isfinite()
        _, lengths, drawn, most, seeds = requests.numbers[slots].T
        rows = requests.sampling[slots].T[:, :, None]  # (R, 7) -> (7, R, 1)
        columns = sampler.draw(logits, slots, drawn, seeds, rows, requests.ends[slots], logits.shape[1])[:, 0]
        idle = slots == len(requests.ended) - 1
        stops = requests.ends[slots, columns] | (drawn + 1 >= most)
        advanced = torch.stack([columns + requests.first, lengths + 1, drawn + 1], 1).masked_fill(idle[:, None], 0)
        requests.numbers[slots, :3] = advanced
        requests.ended[slots] = idle | broken | stops
        told = columns.masked_fill(broken, FAULT).masked_fill(idle, NOTHING)
        requests.ring[:, : len(slots)].index_copy_(0, (requests.steps - 1) % RING, told[None].int())


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
