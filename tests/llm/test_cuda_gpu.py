"""The engine cuda on a GPU: kernels in CUDA graphs compared with plain torch in float32. Weights are random."""

import asyncio
import sys
from itertools import chain

import numpy as np
import pytest
import torch
from cosyvoice_triton.llm.engines.cuda.operations import Plain
from cosyvoice_triton.llm.engines.cuda.weights import Weights
from cosyvoice_triton.llm.engines.interface import GenerationRequest
from cosyvoice_triton.llm.interface import Sampling
from cosyvoice_triton.profiles import H200

from tests.llm.test_cuda_engine import Observed, Slots
from tests.support.llm_fixtures import load_engine, request_of, tokens_of

pytestmark = pytest.mark.gpu
REQUESTS = 40
SAMPLING = [
    {"temperature": 0.0, "repetition_penalty": 1.0},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 25, "repetition_penalty": 1.0, "ras_window": 10},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1},
    {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0},
]


@pytest.fixture(scope="module", params=[torch.float32, torch.float16, torch.bfloat16])
def weights(request, llm_dir, tokenizer):
    return Weights.read(llm_dir, tokenizer, torch.device("cuda"), request.param)


def prompts(weights):
    """Of one token, of some pages, and around the ends of pages."""
    rng = np.random.default_rng(0)
    lengths = [1, 2, 63, 64, 65, 66, 128, 300, *rng.integers(1, 200, REQUESTS - 8)]
    return [rng.integers(0, weights.sizes.vocab, length) for length in lengths]


def fused():
    from cosyvoice_triton.llm.engines.cuda.fused_operations import Fused

    return Fused(torch.device("cuda"))


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_logits_of_the_kernels_equal_those_of_plain_torch_up_to_rounding(weights, llm_dir, tokenizer, rows):
    requests = [GenerationRequest(ids, Sampling(), (0,)) for ids in prompts(weights)]
    exact = Weights.read(llm_dir, tokenizer, torch.device("cuda"), torch.float32)
    found = []
    for of, operations in ((weights, Observed(fused())), (exact, Observed(Plain()))):
        served = Slots(of, requests, operations, prefill=512, pages=8)
        served.set_batch(range(rows))
        served.step()
        found.append(operations.logits[-1][:rows])
    bounds = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 3e-2}
    error = (found[0] - found[1]).norm() / found[1].norm()
    assert error < bounds[weights.embedding.dtype]


def test_captured_steps_draw_the_tokens_of_eager_ones(weights):
    """In batches that change, with rows that end; in float32 also those of plain torch."""
    requests = [
        GenerationRequest(ids, Sampling(**SAMPLING[i % 4], seed=i, max_tokens=20 + i % 30), (weights.first + 5,))
        for i, ids in enumerate(prompts(weights))
    ]
    kinds = [(fused(), True), (fused(), False)]
    if weights.embedding.dtype == torch.float32:
        kinds.append((Plain(), False))
    answers = []
    for operations, graphs in kinds:
        served = Slots(weights, requests, operations, prefill=512, pages=8, graphs=graphs)
        answers.append([])
        for batch in (range(40), range(5), [39], range(39, 20, -1), range(40)):
            served.set_batch(batch)
            answers[-1] += served.decoder.step(len(batch), 8).columns().tolist()
    assert all(answer == answers[0] for answer in answers)


def test_an_engine_on_the_gpu_gives_each_request_the_tokens_that_it_gets_alone(llm_dir, tokenizer):
    engine = load_engine("cuda", llm_dir, tokenizer, 8, llm_memory_gib=4.0, instance_kind="KIND_GPU")

    async def speak(seed):
        return await tokens_of(engine, request_of(tokenizer, "text " * (seed % 8 + 1), seed=seed))

    async def together():
        return [await asyncio.gather(*map(speak, range(seed, seed + 8))) for seed in range(0, 32, 8)]

    try:
        alone = [asyncio.run(speak(seed)) for seed in range(32)]
        answers = list(chain.from_iterable(asyncio.run(together())))
        assert all(len(answer) > 20 for answer in alone)
        # Another batch size rounds differently, which in 16 bits changes a draw of most answers, sooner or later.
        pairs = list(zip(alone, answers, strict=True))
        assert sum(one[:5] == other[:5] for one, other in pairs) >= 20
        assert sum(one == other for one, other in pairs) >= 4
        assert engine.live == 0 and engine._pages.free == engine._pages.total
        assert sys.getswitchinterval() == pytest.approx(H200.llm.switch_seconds)
    finally:
        engine.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; run on a machine with two GPUs")
def test_the_second_gpu_gives_the_tokens_of_the_first_and_takes_nothing_of_it(llm_dir, tokenizer):
    def spoken(gpu):
        # torch captures on one stream for the whole process, of the first GPU. A model's process has one GPU.
        torch.cuda.graph.default_capture_stream = None
        engine = load_engine("cuda", llm_dir, tokenizer, 2, llm_memory_gib=4.0, instance_kind="KIND_GPU", llm_gpu=gpu)
        try:
            return asyncio.run(tokens_of(engine, request_of(tokenizer, "text", seed=1)))
        finally:
            engine.close()

    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved(0)
    second = spoken(1)
    assert torch.cuda.memory_reserved(0) == taken and torch.cuda.memory_reserved(1) > 0
    assert len(second) > 20 and spoken(0) == second
