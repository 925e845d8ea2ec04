"""Kernels of the LLM and of CosyVoice3's flow under Triton's interpreter, compared with plain torch. A program of its
own, because Triton decides at its import whether it interprets:
`TRITON_INTERPRET=1 python -m tests.support.interpreted_kernels`."""

import torch
from torch.testing import assert_close

from common.constants import MEL_BINS
from common.flow.config import RotaryDiTConfig
from common.flow.cosyvoice3 import RotaryDiTEstimator
from common.flow.layers import valid_frames
from common.llm.batch_sampler import BatchSampler, SamplingRow
from common.llm.engines.cuda.fused import Fused
from common.llm.engines.cuda.operations import CONSECUTIVE, PAGE, Operations, Places, Plain
from common.llm.interface import Sampling
from common.token2wav.cosyvoice3.fused import FusedRotaryDiT
from tools.bench.kernels import pretended

HEADS, KV_HEADS, D, HIDDEN, MLP, LAYER = 6, 2, 16, 24, 200, 1
SLOTS, CONTEXT = 3, 3 * PAGE
SAMPLING = [
    {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 3},
    {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.3, "min_tokens": 3},
    {"temperature": 0.3, "top_p": 0.8, "top_k": 25, "repetition_penalty": 1.0, "ras_window": 10},
]


def layer(operations: Operations, T: int, consecutive: int) -> list[torch.Tensor]:
    """What a layer and the head make of T tokens; their sequences begin with 0, 60 and 120 tokens.

    consecutive: so many tokens follow each other in one sequence; some of them cross the end of a page.
    """
    random = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    tables = torch.randperm(SLOTS * 3, generator=random).view(SLOTS, 3) + 1
    keys, values = (torch.full((2, SLOTS * 3 + 1, KV_HEADS, PAGE, D), torch.nan) for _ in range(2))
    run, within = torch.arange(T) // consecutive, torch.arange(T) % consecutive
    slots = run % SLOTS
    positions = 60 * slots + run // SLOTS * consecutive + within
    for slot in range(SLOTS):
        for position in range(60 * slot):
            for pool in (keys, values):
                pool[LAYER, tables[slot, position // PAGE], :, position % PAGE] = normal(KV_HEADS, D)
    places = Places(slots, positions, keys, values, tables, normal(2, CONTEXT, D // 2), consecutive)
    x = normal(T, HIDDEN)
    heads = (HEADS + 2 * KV_HEADS) * D
    q = operations.project_heads(x, normal(heads, HIDDEN), normal(heads), 1e-6, places, LAYER)
    attended = operations.attend(q, places, LAYER)
    gated = operations.gated(x, normal(2 * MLP, HIDDEN), 1e-6)
    operations.project_add(gated, normal(HIDDEN, MLP), x)
    return [q, keys, values, attended, gated, x, operations.head(x, normal(70, HIDDEN), 1e-6)]


def compare_layers() -> None:
    """One token, whose sequence is split among programs; more than a tile; more than the fused kernels are for, and
    the same as pieces of prompts."""
    fused = Fused(torch.device("cpu"))
    for T, consecutive in ((1, 1), (31, 1), (37, 1), (48, CONSECUTIVE)):
        for found, expected in zip(layer(fused, T, consecutive), layer(Plain(), T, consecutive), strict=True):
            assert_close(found, expected, atol=1e-4, rtol=1e-4, equal_nan=True)


def compare_draws() -> None:
    """Slots in another order than rows, columns that are never drawn, end tokens, prompts, repetitions."""
    torch.manual_seed(0)
    C, rows = 90, len(SAMPLING)
    bias = torch.randn(C)
    bias[17] = -torch.inf
    plain, fused = (BatchSampler(bias, rows + 1) for _ in range(2))
    for slot in range(rows):
        plain.start(slot, [1, 2, slot])
        fused.start(slot, [1, 2, slot])
    ends = torch.zeros(rows + 1, C, dtype=torch.bool)
    ends[:, :40] = True
    slots = torch.tensor([3, 0, 2, 1])
    sampling = torch.tensor([SamplingRow.of(Sampling(**SAMPLING[slot]), C) for slot in slots])
    keys = torch.tensor([11, 2**31 - 1, 2**32 - 1, 0])
    fixed, drawn = torch.randn(rows, C) * 2, []
    for position in range(4):
        logits, positions = fixed + torch.randn(rows, C) / 4, torch.full((rows,), position)
        expected = Plain().draw(logits, plain, slots, positions, keys, sampling, ends)
        assert (
            Fused(torch.device("cpu")).draw(logits, fused, slots, positions, keys, sampling, ends).tolist()
            == expected.tolist()
        )
        drawn.append(expected.tolist())
    assert torch.equal(plain.seen, fused.seen) and torch.equal(plain.recent, fused.recent)
    assert len(set(map(tuple, drawn))) > 2


@torch.inference_mode()
def compare_velocities() -> None:
    """CosyVoice3's estimator: two streams, the second one padded, in more than one chunk of attention."""
    torch.manual_seed(0)
    config = RotaryDiTConfig(
        width=48, depth=1, heads=3, head_dim=16, feed_forward=40, time_frequencies=16, conv_kernel=5, conv_groups=4,
        chunk_frames=10,
    )  # fmt: skip
    network = RotaryDiTEstimator(config).eval()
    for parameter in network.parameters():
        parameter.copy_(torch.randn_like(parameter) * (parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3))
    frames, T, times = torch.tensor([24, 13]), 24, [0.0, 0.4]
    x, mu, condition = torch.randn(3, 4, MEL_BINS, T)
    speaker = torch.randn(4, MEL_BINS)
    valid = valid_frames(frames, T).repeat(2, 1, 1)
    expected = network(x, torch.full((4,), times[1]), mu, speaker, condition, valid, streaming=True)
    rows = torch.cat([x, mu, speaker[:, :, None].expand_as(x), condition], dim=1).transpose(1, 2).contiguous()
    found = FusedRotaryDiT(network, times).velocity(1, rows, frames).transpose(1, 2)
    assert_close(found * valid, expected * valid, atol=1e-4, rtol=1e-4)


if __name__ == "__main__":
    with pretended(75):
        compare_layers()
        compare_velocities()
        compare_draws()
