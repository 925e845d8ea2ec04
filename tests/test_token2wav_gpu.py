"""What only a GPU runs: fused attention, solves and vocoder as CUDA graphs, against the plain form. Random weights."""

import copy

import pytest
import torch

from common.constants import OVERLAP_SAMPLES
from common.flow import DiTFlow, DiTFlowConfig
from common.flow.config import DiTConfig, EncoderConfig
from common.hift.config import HiFTConfig
from common.hift.generator import HiFTGenerator
from common.token2wav.dit_memory import GatheredSolve, Row, TailPool
from common.token2wav.dit_solver import DiTSolver
from scripts.bench_token2wav import randomise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine"),
]
STEPS = 4


@pytest.fixture(scope="module")
def flow() -> DiTFlow:
    """Two blocks at the official width."""
    network = DiTFlow(DiTFlowConfig(encoder=EncoderConfig(blocks=1, up_blocks=1), estimator=DiTConfig(depth=2)))
    randomise(network)
    return network.cuda().eval().requires_grad_(False)


@torch.inference_mode()
def test_graphed_solves_in_half_precision_stay_near_the_gathered_ones_in_full(flow: DiTFlow) -> None:
    """Rows differ in voice, ring and length; the rings wrap around; batches fall between the graphs' sizes."""
    from common.token2wav.dit_graphs import GraphedSolve

    networks = (flow, copy.deepcopy(flow).half())
    solvers = [DiTSolver(network, STEPS) for network in networks]
    pools = [TailPool(solver, slots=3) for solver in solvers]
    solves = (GatheredSolve(solvers[0], pools[0]), GraphedSolve(solvers[1], pools[1]))
    voices = [[_voice(network, tokens) for tokens in (40, 7, 25)] for network in networks]
    tails = [[pool.acquire(voice) for voice in of] for pool, of in zip(pools, voices, strict=True)]
    for lengths in ((30, 30, 30), (50, 8, 44), (200, 120, 2), (208, 300, 60)):
        T = max(lengths)
        noise, mu = torch.randn(3, T, 80, device="cuda"), torch.randn(3, T, 80, device="cuda")
        mels = []
        for solver, solve, pool, of, at in zip(solvers, solves, pools, voices, tails, strict=True):
            rows = [Row(voice, tail, frames) for voice, tail, frames in zip(of, at, lengths, strict=True)]
            conditions = solver.conditions(mu.to(solver.dtype), torch.cat([voice.speaker for voice in of]))
            mel, scratch = solve.run(rows, noise, conditions)
            mels.append(mel.clone())
            for index, row in enumerate(rows):
                pool.commit(row.tail, scratch, index, row.frames)
        for index, frames in enumerate(lengths):
            expected, actual = mels[0][index, :frames], mels[1][index, :frames]
            assert (actual - expected).square().mean().sqrt() < 3e-3 * expected.square().mean().sqrt()


def _voice(network: DiTFlow, tokens: int):
    generator = torch.Generator("cuda").manual_seed(tokens)
    return network.setup_cache(
        torch.arange(tokens, device="cuda")[None],
        torch.randn(1, 2 * tokens, 80, device="cuda", generator=generator) - 4,
        torch.randn(1, 192, device="cuda", generator=generator),
        noise=torch.randn(1, 80, 2 * tokens, device="cuda", generator=generator),
        steps=STEPS,
    )


@torch.inference_mode()
@pytest.mark.parametrize(
    ("rows", "frames", "cached", "together"),
    [(1, 30, 0, 1), (3, 38, OVERLAP_SAMPLES, 3), (1, 52, OVERLAP_SAMPLES, 1), (2, 52, OVERLAP_SAMPLES, 1)],
)
def test_the_graphed_vocoder_equals_the_plain_one(rows: int, frames: int, cached: int, together: int) -> None:
    """Lengths that are no hop's are rendered row by row: a batch of others rounds f0 differently."""
    from common.token2wav.hift_graphs import GraphedHiFT

    hift = HiFTGenerator(HiFTConfig(channels=64, f0_channels=64))
    randomise(hift)
    hift = hift.cuda().eval().requires_grad_(False)
    graphed = GraphedHiFT(hift)
    mel = torch.randn(rows, 80, frames, device="cuda") - 4
    noise = torch.randn(rows, frames * hift.config.hop, hift.config.harmonics + 1, device="cuda")
    source = 0.1 * torch.randn(rows, 1, cached, device="cuda")
    pieces = zip(mel.split(together), noise.split(together), source.split(together), strict=True)
    expectation = [torch.cat(parts) for parts in zip(*(hift(*piece) for piece in pieces), strict=True)]
    for expected, actual in zip(expectation, graphed(mel, noise, source), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=0)
