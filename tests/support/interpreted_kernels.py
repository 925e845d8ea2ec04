"""The GPU's kernels under Triton's interpreter, compared with plain torch; every address that they read or write is
checked. A program of its own, because Triton decides at its import whether it interprets:
`TRITON_INTERPRET=1 python -m tests.support.interpreted_kernels layers steps`."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from cosyvoice_triton import kernels
from cosyvoice_triton.constants import LOOKAHEAD_TOKENS, MEL_BINS
from cosyvoice_triton.kernels import tiles
from cosyvoice_triton.kernels.tiles import MULTIPLY_ADD, ProductTile, Tiles, TmaDecoderTiles
from cosyvoice_triton.llm.engines.cuda import operations as ops
from cosyvoice_triton.llm.engines.cuda.fused_operations import Fused
from cosyvoice_triton.llm.interface import Sampling
from cosyvoice_triton.llm.sampler import SamplingRow
from cosyvoice_triton.networks import flow as networks
from cosyvoice_triton.networks.flow.cache import KeyValues
from cosyvoice_triton.networks.flow.layers import valid_frames
from cosyvoice_triton.networks.flow.unet import UNetEstimator
from cosyvoice_triton.networks.hift.config import HiFTConfig
from cosyvoice_triton.networks.hift.generator import HiFTGenerator
from cosyvoice_triton.networks.hift.source import silenced
from cosyvoice_triton.token2wav.flow.cached_flow import CachedStreaming
from cosyvoice_triton.token2wav.flow.cached_graphs import GraphedSolve
from cosyvoice_triton.token2wav.flow.cosyvoice3_flow import CosyVoice3Streaming
from cosyvoice_triton.token2wav.flow.dit_flow import DiTStreaming
from cosyvoice_triton.token2wav.flow.encoder_fused import FusedEncoder
from cosyvoice_triton.token2wav.flow.encoder_window import ABSENT
from cosyvoice_triton.token2wav.flow.kv_cache import PromptCaches, StreamCachePool
from cosyvoice_triton.token2wav.flow.unet_fused import FusedUNet
from cosyvoice_triton.token2wav.gpu.graphs import Graphs
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits, Size
from cosyvoice_triton.token2wav.gpu.noise import flow_noise
from cosyvoice_triton.token2wav.gpu.quantization import dequantized, quantized
from cosyvoice_triton.token2wav.policy.scheduler import FIRST_CHUNK_WORKER
from cosyvoice_triton.token2wav.stream import VocoderState
from cosyvoice_triton.token2wav.vocoder.hift_fused import FusedBody
from torch import Tensor
from torch.testing import assert_close

from tests.parity import flow_dit
from tests.parity.fixture import Fixture
from tests.support.kernel_launches import pretended
from tests.support.kernel_memory import EXTENTS, checked
from tests.support.streams import DIT, GOLDEN, prompt, randomize

linear_kernels: Any = import_module("cosyvoice_triton.kernels.linear")  # the package has a function of that name
HEADS, KV_HEADS, D, HIDDEN, MLP, LAYER = 6, 2, 16, 24, 200, 1
SLOTS, CONTEXT, TWO = 3, 3 * ops.PAGE, BatchLimits(max_streams=2)
SAMPLING = [
    {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 3},
    {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.3, "min_tokens": 3},
    {"temperature": 0.3, "top_p": 0.8, "top_k": 25, "repetition_penalty": 1.0, "ras_window": 10},
]


def layer(operations: ops.Plain, T: int, consecutive: int, cast: bool = False) -> list[torch.Tensor]:
    """What a layer and the head make of T tokens; their sequences begin with 0, 60 and 120 tokens.

    consecutive: so many tokens follow each other in one sequence; some of them cross the end of a page. cast: x comes
    as `begin` leaves it where TMA fetches tiles.
    """
    random = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    tables = torch.randperm(SLOTS * 3, generator=random).view(SLOTS, 3) + 1
    keys, values = (torch.full((2, SLOTS * 3 + 1, KV_HEADS, ops.PAGE, D), torch.nan) for _ in range(2))
    run, within = torch.arange(T) // consecutive, torch.arange(T) % consecutive
    slots = run % SLOTS
    positions = 60 * slots + run // SLOTS * consecutive + within
    for slot in range(SLOTS):
        for position in range(60 * slot):
            for pool in (keys, values):
                pool[LAYER, tables[slot, position // ops.PAGE], :, position % ops.PAGE] = normal(KV_HEADS, D)
    metadata = ops.AttentionMetadata(slots, positions, keys, values, tables, normal(2, CONTEXT, D // 2), consecutive)
    x = ops.Residual(normal(T, HIDDEN))
    if cast:
        x.for_tma = x.x.clone(), x.x.square().view(T, 3, -1).sum(2)
    heads = (HEADS + 2 * KV_HEADS) * D
    q = operations.project_heads(x, normal(heads, HIDDEN), normal(heads), 1e-6, metadata, LAYER)
    attended = operations.attend(q, metadata, LAYER)
    gated = [operations.gated(x, normal(2 * MLP, HIDDEN), 1e-6)]
    operations.linear_residual(gated[0], normal(HIDDEN, MLP), x, 1e-6)
    gated.append(operations.gated(x, normal(2 * MLP, HIDDEN), 1e-6))  # its norm may be computed already
    return [q, keys, values, attended, *gated, x.x, operations.head(x, normal(70, HIDDEN), 1e-6)]


def compare_layers(
    sizes: Sequence[Size] = ((1, 1), (31, 1), (37, 1), (48, ops.CONSECUTIVE)), cast_up_to: int = 0
) -> None:
    """One token, whose sequence is split among programs; more than a tile; more than the fused kernels are for, and
    the same as pieces of prompts."""
    fused = Fused(torch.device("cpu"))
    for T, consecutive in sizes:
        plain = layer(ops.Plain(), T, consecutive)
        for found, expected in zip(layer(fused, T, consecutive, cast=T <= cast_up_to), plain, strict=True):
            assert_close(found, expected, atol=1e-4, rtol=1e-4, equal_nan=True)


def compare_outliers() -> None:
    """In float16 activations beyond its range are its largest value, for one token and for many; they join a residual
    stream whose type has the range."""
    torch.manual_seed(0)
    fused, down = Fused(torch.device("cpu")), torch.full((HIDDEN, MLP), 1.0, dtype=torch.float16)
    for T in (1, 48):
        x = ops.Residual(torch.randn(T, HIDDEN).sign())
        weight = (x.x[0] * 60).expand(2 * MLP, -1).half()  # gate times up is beyond the range
        gated = fused.gated(x, weight, 1e-6)
        assert gated[0].eq(torch.finfo(torch.float16).max).all() and gated.isfinite().all()
        assert fused.gated(x, weight * -50, 1e-6).isfinite().all()  # so is the gate
        fused.linear_residual(gated, down, x, 1e-6)
        assert x.x.isfinite().all()


def compare_tma_layers() -> None:
    """The same with tiles that TMA fetches, of which the last are not full: few tokens, in all kernels of a
    layer and in the first one, and many."""
    tile = ProductTile(32, 32, 16, 4, 1)
    few = TmaDecoderTiles(tile, (tile._replace(rows=16), tile), tile, tile)
    with (
        patch.object(tiles, "uses_tma", lambda: True),
        patch.object(tiles, "MULTIPLY_ADD", MULTIPLY_ADD._replace(decoder_tma=few)),
    ):
        compare_layers(((5, 1), (31, 1), (37, 1)), tile.rows)


def compare_steps() -> None:
    """Both ends of a step: slots in another order than rows and one without a request, columns that are never drawn,
    end tokens, prompts, repetitions, rows that end by a token, by their length and by logits that are not finite."""
    torch.manual_seed(0)
    C, slots = 90, len(SAMPLING)
    bias = torch.randn(C)
    bias[17] = -torch.inf
    kinds: list[tuple[ops.Plain, ops.Requests]] = []
    for operations in (ops.Plain(), Fused(torch.device("cpu"))):
        state = ops.Requests(bias, 100, slots + 1)
        for slot, of in enumerate(SAMPLING):
            state.sampler.start({slot: [1, 2, slot]})
            state.sampling[slot] = torch.tensor(SamplingRow.of(Sampling(**of), C))
        keys = torch.tensor([2**31 - 1, 0, 2**32 - 1, 11])
        ids, most = torch.arange(slots), torch.tensor([30, 30, 30, 9])
        state.numbers[:slots] = torch.stack([ids, 60 * ids, 0 * ids, most, keys], 1)
        state.ended[:slots] = False
        state.ends[:, [70, 71, 72]] = True
        kinds.append((operations, state))
    batch, embedding = torch.tensor([3, 0, slots, 2, 1]), torch.randn(100 + C, HIDDEN)
    fixed = torch.randn(len(batch), C) * 2
    fixed[1] -= 20  # negative ones, which a penalty lowers, too
    for step in range(ops.RING_STEPS + 2):
        logits = fixed + torch.randn(len(batch), C) / 4
        logits[:, 70:73] = -90  # no row ends by chance
        if step == 1:
            logits[1, 71] = 90  # an end token below min_tokens, of slot 0
        if step == 5:
            logits[1, 3] = torch.nan  # of slot 0
        if step == 7:
            logits[4, 3:10] = torch.inf  # of slot 1
        if step == 12:
            logits[3, 71] = 90  # an end token, of slot 2
        found = []
        for operations, state in kinds:
            of_slots, positions, x = operations.begin(state, batch, embedding)
            operations.sample(logits, state, of_slots)
            found.append([of_slots, positions[2:4], x.x[2:4], state.ended, state.ring, state.steps])
        assert all(map(torch.equal, *found))
    plain, fused = (
        [rows[[2, 3]] for rows in (state.numbers, state.sampler.seen, state.sampler.recent)] for _, state in kinds
    )
    assert all(map(torch.equal, plain, fused))
    nothing, faulty, infinite, other = (state.ring[:, row].tolist() for row in (2, 1, 4, 0))
    assert set(nothing) == {ops.NOTHING} and faulty[4:7] == [faulty[4], ops.FAULT, ops.NOTHING] and state.ended.all()
    assert infinite[6:9] == [infinite[6], ops.FAULT, ops.NOTHING]
    assert other[8] >= 0 and other[9] == ops.NOTHING and len(set(state.ring[2:, 3].tolist())) > 2


@torch.inference_mode()
def compare_unet() -> None:
    """Two streams, the second one padded, in more than one chunk of attention."""
    torch.manual_seed(0)
    config = networks.UNetConfig(channels=32, heads=2, head_dim=16, blocks=1, mid_stages=1, chunk_frames=10)
    network = UNetEstimator(config).eval()
    randomize(network)
    frames, T, times = torch.tensor([14, 11]), 14, [0.0, 0.4]
    x, mu, condition = torch.randn(3, 4, MEL_BINS, T)
    speaker = torch.randn(4, MEL_BINS)
    valid = valid_frames(frames, T).repeat(2, 1, 1)
    expected = network(x, torch.full((4,), times[1]), mu, speaker, condition, valid, streaming=True)
    rows = torch.cat([x, mu, speaker[:, :, None].expand_as(x), condition], dim=1).transpose(1, 2).contiguous()
    found = FusedUNet(network, times).velocity(1, rows, frames).transpose(1, 2)
    assert_close(found * valid, expected * valid, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def compare_encoder() -> None:
    """Windows of several blocks of queries, of one, and of one token, in which tokens attend to the end of their chunk;
    the distances of a longer window are known."""
    torch.manual_seed(0)
    sizes = networks.EncoderConfig(width=32, heads=2, feed_forward=48, blocks=2, up_blocks=2)
    network = networks.DiTFlow(
        networks.DiTFlowConfig(vocab=50, encoder=sizes, estimator=networks.DiTConfig(depth=1))
    ).eval()
    randomize(network)
    lengths, T, chunk, at = torch.tensor([41, 20, 1])[:, None], 41, 7, torch.arange(41)
    visible = ((at // chunk + 1) * chunk).minimum(lengths).where(at < lengths, 1)
    ahead = at[:, None] + torch.arange(1 + LOOKAHEAD_TOKENS)
    tokens = torch.randint(50, (3, T, 1 + LOOKAHEAD_TOKENS)).masked_fill(ahead >= lengths[:, :, None], ABSENT)
    expected = network.encode_window(tokens, visible)
    expected[(torch.arange(2 * T) >= 2 * lengths)] = 0
    assert_close(FusedEncoder(network, T + 4)(tokens, visible), expected, atol=1e-4, rtol=1e-4)


class Padded(Graphs):
    """Computes at once what graphs would, with one more row and three more frames than are needed; prompts one by one,
    chunks together."""

    def __init__(self, function: Any, inputs: Any, _: Any, name: str, worker: int, trial: Any) -> None:
        self._function, self._made, self._halved = function, inputs, name == "prompts"

    def parts(self, rows: int, length: int, *, warn: bool = True) -> list[tuple[slice, Size | None]]:
        count = 1 if self._halved else rows
        return [(slice(begin, begin + count), (count + 1, length + 3)) for begin in range(0, rows, count)]

    def run(self, size: Size, *values: Tensor) -> Tensor:
        inputs = self._made(*size)
        for tensor, value in zip(inputs, values, strict=False):
            tensor[tuple(slice(length) for length in value.shape)] = value
        return self._function(*inputs)


@torch.inference_mode()
def compare_dit(**options: Any) -> None:
    """Rings wrap around in the second chunk of both streams."""
    network = flow_dit.build(Fixture(GOLDEN / f"{DIT}.json"), "stepaudio2_flow_tiny.weights.safetensors")
    made = partial(DiTStreaming, network, flow_noise(), limits=TWO, steps=1, cache_frames=6, **options)
    compare_streams(lambda: made(prompts=PromptCaches(1 << 28)), voices=(5, 0), hops=((2, 3), (2, 1)))


def compare_int8() -> None:
    """The same over keys and values in 8 bits, in a prompt and in rings that wrap around; rows of zeros, and rows that
    are not finite stay so."""
    compare_dit(kv_cache_dtype="int8")
    x = torch.randn(1, 1, 1, 4, D)
    x[..., 1, :], x[..., 2, 3], x[..., 3, 5] = 0, torch.nan, torch.inf
    rows = torch.zeros_like(quantized(x))
    EXTENTS.addressed.append(rows)
    place, frames = rows.data_ptr(), x.shape[-2]
    kernels.append(x, x, torch.tensor([[0] * 8 + [place, place, frames, frames]]).T.contiguous(), 0, int8=True)
    found, expected = (dequantized(of, torch.float32) for of in (rows, quantized(x)))
    assert_close(found, expected, equal_nan=True)
    assert not found[..., 2:, :].isfinite().any()


@torch.inference_mode()
def compare_rotary() -> None:
    """Rows begin within a prompt, at a chunk of the mask and within the last one; they keep all, a part and nothing of
    what they compute. With guidance, and without; steps and layers are told apart in the latter."""
    torch.manual_seed(0)
    encoder = networks.LookaheadConfig(hidden=24, chunk_tokens=2)
    for depth, guidance, grid, hops in ((1, 0.7, (0, 1), ((2, 3), (1, 4), (5, 1))), (2, 0.0, (0, 0.3, 1), ((2, 3),))):
        steps = len(grid) - 1
        estimator = networks.RotaryDiTConfig(width=32, depth=depth, heads=2, head_dim=16, feed_forward=40,
                                             time_frequencies=16, conv_kernel=5, conv_groups=2,
                                             chunk_frames=4)  # fmt: skip
        config = networks.CosyVoice3FlowConfig(vocab=50, speaker_dim=8, encoder=encoder, estimator=estimator,
                                               steps=steps, guidance=guidance, time_grid=grid)  # fmt: skip
        network = networks.CosyVoice3Flow(config).eval()
        randomize(network)
        made = partial(CosyVoice3Streaming, network, flow_noise(), limits=TWO, steps=steps, cache_frames=6)
        compare_streams(lambda made=made: made(prompts=PromptCaches(1 << 28)), voices=(8, 1), hops=hops)


def compare_streams(
    streaming: Callable[[], CachedStreaming], voices: Sequence[int], hops: Sequence[Sequence[int]]
) -> None:
    """Streams in two voices, given the tokens of their prompts: rings that wrap around, a row and frames of padding."""
    plain, fused = streaming(), streaming()
    network = fused._network
    EXTENTS.addressed += [fused._pool.keys, fused._pool.values]
    empty = StreamCachePool.empty_attention

    def noted(pool: StreamCachePool, frames: int) -> KeyValues:
        place = empty(pool, frames)
        EXTENTS.addressed += [place.keys, place.values]
        return place

    with patch.object(StreamCachePool, "empty_attention", noted):
        solver = fused._solver(kernels)
        fused._solve = GraphedSolve(
            solver, fused._pool, flow_noise(), TWO.of_worker(FIRST_CHUNK_WORKER), 200, make=Padded
        )
        random = np.random.default_rng(0)
        sizes = network.config
        spoken_in = [prompt(tokens, tokens, sizes.vocab, sizes.speaker_dim) for tokens in voices]
        for flow in (plain, fused):
            flow.prefill(spoken_in)
        streams = [[flow.open(voice, VocoderState(0)) for voice in spoken_in] for flow in (plain, fused)]
        sent = [random.integers(0, network.config.vocab, 40) for _ in voices]
        ends = np.zeros(len(voices), int)
        for batch in hops:
            begins = np.zeros_like(ends) if plain.cumulative else ends
            ends = ends + batch
            tokens = [row[begin : end + LOOKAHEAD_TOKENS] for row, begin, end in zip(sent, begins, ends, strict=True)]
            expected, found = (
                flow.render([flow.chunk(stream, part, final=False) for stream, part in zip(of, tokens, strict=True)])
                for flow, of in zip((plain, fused), streams, strict=True)
            )
            for ours, theirs in zip(found, expected, strict=True):
                assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def compare_tma() -> None:
    """Products whose tiles TMA fetches, with some rows of padding: a convolution with history, gate and
    residual; a plain one with a residual; queries, keys and values, of which a tile has two heads."""
    torch.manual_seed(0)
    R, T, C, H, D = 4, 50, 32, 4, 16
    frames = torch.tensor([T, 17])
    valid = (torch.arange(T) < frames.repeat(2)[:, None])[:, :, None]
    x, out = torch.randn(2, R, T, C)
    conv, plain, heads = torch.randn(C, 3 * C), torch.randn(C, C), torch.randn(3 * H * D, C)
    gate, bias, qk_norm, history = torch.randn(C), torch.randn(3 * H * D), torch.randn(2, 2, D), torch.randn(R, 2, C)
    with (
        patch.object(linear_kernels, "uses_tma", lambda: True),
        patch.object(Tiles, "linear_tma", lambda *sizes: ProductTile(16, 32, 16, 4, 1)),
    ):
        made = kernels.linear(
            x, conv, gate=gate, add_to=out.clone(), history=(history, history.clone(), frames), frames=frames
        )
        added = kernels.linear(x, plain, bias[:C], add_to=out.clone(), frames=frames)
        split = torch.full((3, R, H, T, D), torch.nan)
        kernels.linear(x, heads, bias, heads=(split[0], split[1], split[2]), qk_norm=qk_norm, frames=frames)
    padded = torch.cat([history, x], dim=1)
    taps = torch.cat([padded[:, :-2], padded[:, 1:-1], padded[:, 2:]], dim=-1)
    expected = F.linear(x, heads, bias).view(R, T, 3, H, D).permute(2, 0, 3, 1, 4)
    normed = [F.layer_norm(part, (D,), *norm) for part, norm in zip(expected, qk_norm, strict=False)]
    for ours, theirs in (
        (made, out + gate * F.linear(taps, conv)),
        (added, out + F.linear(x, plain, bias[:C])),
        *((ours.transpose(1, 2).flatten(2), theirs.transpose(1, 2).flatten(2))
          for ours, theirs in zip(split, [*normed, expected[2]], strict=True)),
    ):  # fmt: skip
        assert_close(ours.masked_fill(~valid, 0), theirs.masked_fill(~valid, 0), atol=1e-4, rtol=1e-4)


def compare_snake() -> None:
    """Longer than a block; rows that end early."""
    torch.manual_seed(0)
    x, alpha = torch.randn(2, 3, 1100), torch.rand(3)
    for lengths in (None, torch.tensor([1100, 1025])):
        expected = silenced(x + torch.sin(alpha[:, None] * x).square() / (alpha[:, None] + 1e-9), lengths)
        assert_close(kernels.snake(x, alpha, lengths), expected)


# The last stage's tensors have one frame more than its upsampling makes. No block divides these numbers of channels.
HIFT = HiFTConfig(channels=80, f0_channels=8, upsample_rates=(5, 3), upsample_kernels=(11, 7),
                  resblock_kernels=(3, 5, 1), resblock_dilations=((1, 3),) * 3, source_resblock_kernels=(5, 3),
                  source_resblock_dilations=((1, 3), (5, 2)))  # fmt: skip


@torch.inference_mode()
def compare_hift() -> None:
    """Rows that end within the first tile and the last one, where what follows is not finite, and one that would be
    longer than the tensor; then a batch without padding."""
    torch.manual_seed(0)
    network = HiFTGenerator(HIFT).eval()
    randomize(network)
    for name, parameter in network.named_parameters():
        if name.endswith("alpha"):
            parameter.add_(1)
    body, rate, T = FusedBody(network), HIFT.hop // HIFT.istft_hop, 6
    mel, excitation = torch.randn(3, MEL_BINS, T), torch.randn(3, HIFT.n_fft + 2, rate * T + 1)
    frames = torch.tensor([T + 2, 1, 5])
    bins = rate * frames + 1
    expected = network.body(silenced(mel, frames), silenced(excitation, bins), frames)
    inside = silenced(torch.ones_like(excitation), bins).bool()
    padded = mel.where(silenced(torch.ones_like(mel), frames).bool(), torch.nan), excitation.where(inside, torch.nan)
    assert_close(body(*padded, frames)[inside], expected[inside], atol=1e-4, rtol=1e-4)
    assert_close(body(mel[:1], excitation[:1]), network.body(mel[:1], excitation[:1]), atol=1e-4, rtol=1e-4)


if __name__ == "__main__":
    with pretended(75), checked():
        for comparison in sys.argv[1:]:
            globals()[f"compare_{comparison}"]()
