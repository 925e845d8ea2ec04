"""The parts of the network over a batch of T tokens, in plain torch.

The residual stream x (T, hidden) is float32, all else has the type of the weights.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cosyvoice_triton.llm.sampler import BatchSampler, SamplingRow

PAGE = 64  # tokens
SCRATCH_PAGE = 0  # never allocated: rows without a request write to it
# Each piece of a prompt is padded to a multiple of so many tokens, so a tile of attention has one sequence's tokens.
CONSECUTIVE = 8
RING_STEPS = 16  # steps whose columns stay in the device's ring buffer until they are copied to the host
INTERLEAVE = 8  # gate rows of the MLP's weight, then as many up rows, and so on: a thread has both after a product
# In place of a column of the logits: the row's request had ended before; its logits are not finite.
NOTHING, FAULT = -1, -2


class PromptPiece(NamedTuple):
    """Tokens of a prompt to prefill, from position `begin`."""

    slot: int
    begin: int
    ids: np.ndarray  # (n,)


@dataclass(frozen=True)
class AttentionMetadata:
    """Says which sequence and position each token of a batch has, and where the keys and values of sequences are.

    slots (T,), positions (T,): of each token. keys, values (layers, pages, kv_heads, PAGE, D). block_tables (slots,
    pages of a context): entry n is the page of a sequence's tokens n * PAGE to (n + 1) * PAGE - 1. rotary (2, context,
    D / 2): cosines and sines. consecutive: 1, or CONSECUTIVE if each so many tokens have consecutive positions in one
    sequence (or are padding behind such tokens).
    """

    slots: Tensor
    positions: Tensor
    keys: Tensor
    values: Tensor
    block_tables: Tensor
    rotary: Tensor
    consecutive: int


@dataclass
class Residual:
    """The residual stream x (T, hidden), with what an operation may have computed of it for the next one.

    normed: x after its RMS norm. for_tma: x in the type of the weights and sums of its squares (T, n), the operands of
    products whose tiles TMA fetches.
    """

    x: Tensor
    normed: Tensor | None = None
    for_tma: tuple[Tensor, Tensor] | None = None


class Requests:
    """The state of all requests that a step reads and writes, by slot, on the device.

    The last slot is for rows without a request. numbers (slots, 5): id of the last token, which the next step computes;
    tokens before it; tokens of the answer; the most of these; the key of its random numbers. ended (slots,); ends
    (slots, C): the end tokens; sampling (slots, 7): fields of `SamplingRow`. first: id of column 0 of the logits.
    ring (RING_STEPS, rows): the ring buffer of sampled columns, or NOTHING or FAULT. steps (1,): steps so far.
    """

    def __init__(self, bias: Tensor, first: int, slots: int) -> None:
        """`bias` (C,) is added to the logits."""
        device, rows = bias.device, slots + 1
        self.numbers = torch.zeros(rows, 5, dtype=torch.long, device=device)
        self.ended = torch.ones(rows, dtype=torch.bool, device=device)
        self.ends = torch.zeros(rows, len(bias), dtype=torch.bool, device=device)
        self.sampling = torch.ones(rows, len(SamplingRow._fields), device=device)
        self.sampler = BatchSampler(bias, rows)
        self.first = first
        self.ring = torch.zeros(RING_STEPS, slots, dtype=torch.int32, device=device)
        self.steps = torch.zeros(1, dtype=torch.long, device=device)


class Plain:
    """The parts of the network in plain torch. They run everywhere; `Fused` has them by kernels for a GPU, which are
    compared with these."""

    def begin(self, requests: Requests, batch: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor, Residual]:
        """Begin a step of the slots in `batch` (R,).

        Returns these slots (R,), with the last slot in place of those that have ended; the positions (R,) of their
        last tokens; and the embeddings of these tokens.
        """
        slots = batch.masked_fill(requests.ended[batch], len(requests.ended) - 1)
        last, positions = requests.numbers[slots, :2].T
        requests.steps += 1
        return slots, positions, Residual(embedding[last].float())

    def project_heads(
        self, x: Residual, weight: Tensor, bias: Tensor, eps: float, metadata: AttentionMetadata, layer: int
    ) -> Tensor:
        """Apply the RMS norm, project to queries, keys and values, and apply the rotary embedding (RoPE).

        Returns the queries (T, heads, D), and writes keys and values to the sequences' pages.
        """
        kv_heads, _, D = metadata.keys.shape[2:]
        heads = F.linear(_normed(x.x, eps).to(weight.dtype), weight, bias).unflatten(1, (-1, D)).float()
        rotated = heads[:, :-kv_heads]  # queries and keys
        cosines, sines = metadata.rotary[:, metadata.positions, None]  # (2, context, D / 2) -> (2, T, 1, D / 2)
        first, second = rotated.chunk(2, dim=-1)
        rotated = torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1).to(weight.dtype)
        pages, rows = metadata.block_tables[metadata.slots, metadata.positions // PAGE], metadata.positions % PAGE
        metadata.keys[layer, pages, :, rows] = rotated[:, -kv_heads:]
        metadata.values[layer, pages, :, rows] = heads[:, -kv_heads:].to(weight.dtype)
        return rotated[:, :-kv_heads]

    def attend(self, q: Tensor, metadata: AttentionMetadata, layer: int) -> Tensor:
        """Return the attention (T, heads * D) of queries (T, heads, D) to their sequence up to their position."""
        pages = metadata.block_tables[metadata.slots, : int(metadata.positions.max()) // PAGE + 1]  # (T, n)
        # (T, n, kv_heads, PAGE, D) -> (T, kv_heads, n * PAGE, D)
        keys, values = (pool[layer][pages].transpose(1, 2).flatten(2, 3) for pool in (metadata.keys, metadata.values))
        own = torch.arange(keys.shape[2], device=q.device) <= metadata.positions[:, None]  # (T, n * PAGE)
        # Beyond the sequence a page may hold values that another request left there, which may not be finite.
        values = values.masked_fill(~own[:, None, :, None], 0)
        q = q.unflatten(1, (keys.shape[1], -1)).float()  # (T, heads, D) -> (T, kv_heads, heads / kv_heads, D)
        scores = q @ keys.transpose(2, 3).float() * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~own[:, None, None], -torch.inf).softmax(-1)
        return (weights @ values.float()).flatten(1).to(keys.dtype)

    def linear_residual(self, y: Tensor, weight: Tensor, x: Residual, eps: float) -> None:
        """Add y weight^T to x. `eps` is that of the norm that follows."""
        x.x += F.linear(y, weight)

    def gated(self, x: Residual, weight: Tensor, eps: float) -> Tensor:
        """Return silu(gate) * up (T, mlp) of the normed x, from interleaved gate and up weights."""
        both = F.linear(_normed(x.x, eps).to(weight.dtype), weight)
        gate, up = both.unflatten(1, (-1, 2, INTERLEAVE)).unbind(2)  # (T, 2 mlp) -> (T, mlp / 8, 8) twice
        return (F.silu(gate) * up).flatten(1)

    def head(self, x: Residual, weight: Tensor, eps: float) -> Tensor:
        """Return the logits (T, C) of the normed x in float32."""
        return F.linear(_normed(x.x, eps).to(weight.dtype), weight).float()

    def sample(self, logits: Tensor, requests: Requests, slots: Tensor) -> None:
        """End a step: sample a column of each row of logits (R, C), and update the requests in these slots (R,)."""
        sampler = requests.sampler
        broken = ~(logits + sampler.bias).amax(1).isfinite()
        _, lengths, generated, most, seeds = requests.numbers[slots].T
        rows = requests.sampling[slots].T[:, :, None]  # (R, 7) -> (7, R, 1)
        columns = sampler.sample(logits, slots, generated, seeds, rows, requests.ends[slots], logits.shape[1])[:, 0]
        idle = slots == len(requests.ended) - 1
        stops = requests.ends[slots, columns] | (generated + 1 >= most)
        advanced = torch.stack([columns + requests.first, lengths + 1, generated + 1], 1).masked_fill(idle[:, None], 0)
        requests.numbers[slots, :3] = advanced
        requests.ended[slots] = idle | broken | stops
        written = columns.masked_fill(broken, FAULT).masked_fill(idle, NOTHING)
        requests.ring[:, : len(slots)].index_copy_(0, (requests.steps - 1) % RING_STEPS, written[None].int())


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
