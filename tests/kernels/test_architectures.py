"""Every kernel that serving launches is compiled for every generation of GPUs, by Triton's assembler, without a GPU;
and interpreted, in a process of its own."""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch
from cosyvoice_triton import kernels, stacks
from cosyvoice_triton.kernels.launch import compiled_ahead
from cosyvoice_triton.kernels.tiles import ProductTile, Tiles
from cosyvoice_triton.networks import flow as networks
from cosyvoice_triton.networks.flow.config import RotaryDiTConfig
from cosyvoice_triton.runtimes.loading import HEAD_CHANNELS
from cosyvoice_triton.token2wav.flow.base import FlowOptions
from cosyvoice_triton.token2wav.gpu.limits import BatchLimits
from triton.compiler import CompilationError, CompiledKernel
from triton.runtime.jit import JITFunction

from tests.support.kernel_launches import SHARED_KIB, Launch, launches, pretended, shared_memory, trials_and_solves

FLOW = {
    "add_norm_mish", "append", "attend_blocks", "attend_paged", "attend_relative", "convolve", "convolve_frames",
    "linear", "prepare", "rotate_first_head", "snake"
}  # fmt: skip
DECODER = {
    "apply_rope", "attend_pages", "begin", "gated", "join_parts", "project", "project_heads", "rms_norm", "sample"
}  # fmt: skip
TMA = 90  # compute capability 9.0 is the first that has it


def decoder(capability: int) -> set[str]:
    return DECODER | ({"gated_tma", "project_heads_tma"} if capability >= TMA else {"silu_and_mul"})


@cache
def of_each_size(capability: int) -> list[Launch]:
    """One launch of each kernel and tile."""
    found = launches(torch.float16, capability)
    assert {launch.name for launch in found} == FLOW | decoder(capability)
    return list({(launch.name, launch.size): launch for launch in found}.values())


def elements(launch: Launch) -> int:
    given = dict(launch.constants)
    return given.get("BM", 1) * given.get("BN", 1)


def too_large(some: list[Launch], capability: int) -> dict[str, int]:
    """Bytes of shared memory of those that need more than a block can have on GPUs of that generation, which have the
    same tiles. Raises if one does not compile."""
    needs = {f"{launch.name} {launch.size}": shared_memory(launch, capability) for launch in some}
    least = min(size for other, size in SHARED_KIB.items() if other // 10 == capability // 10)
    return {name: need for name, need in needs.items() if need > least * 1024}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 80, 90, 100, 120])
def test_every_kernel_compiles_for_every_generation_and_fits_its_shared_memory(capability: int) -> None:
    assert too_large([launch for launch in of_each_size(capability) if launch.name in FLOW], capability) == {}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 120])  # the least shared memory, without and with tensor cores
def test_the_largest_kernels_of_the_llm_compile_and_fit_the_least_shared_memory(capability: int) -> None:
    largest: dict[str, Launch] = {}
    for launch in sorted(of_each_size(capability), key=elements):
        largest[launch.name] = launch
    assert too_large([largest[name] for name in sorted(decoder(capability))], capability) == {}


@pytest.mark.parametrize("capability", [80, 90])
def test_a_kernel_that_starts_early_waits_for_the_one_before(capability: int) -> None:
    """Compute capability 9.0 is the first that can. A kernel that did not wait would read what is not there yet."""
    for launch in of_each_size(capability):
        given = dict(launch.constants)
        assert given["PDL"] == given.get("launch_pdl", False) == (capability >= 90), launch.name
        code = launch.kernel.src
        reads = (".load(", "_products(", "_moments(", "_rotate_pairs(")
        assert code.index("wait(PDL)") < min(code.index(read) for read in reads if read in code), launch.name


@pytest.mark.parametrize("D", [8, min(HEAD_CHANNELS), 48])
def test_heads_that_attention_does_not_compile_for_are_refused(D: int) -> None:
    q = torch.empty(2, 1, 9, D, dtype=torch.float16, device="meta")
    ring, table = q[None, None, None], torch.empty(12, 2, dtype=torch.int64, device="meta")
    fits = D in HEAD_CHANNELS
    for attend, others in (
        (kernels.attend_paged, (table, ring, ring, 0)),
        (kernels.attend_relative, (q[0], q[:, 0, :1], table)),
    ):
        with nullcontext() if fits else pytest.raises(CompilationError), pretended(90), compiled_ahead("attention"):
            attend(q, q, q, *others)
    with torch.device("meta"):
        encoder = networks.EncoderConfig(width=2 * D, heads=2, blocks=1, up_blocks=1)
        dit = networks.DiTFlow(networks.DiTFlowConfig(encoder=encoder, estimator=networks.DiTConfig(depth=1)))
        rotary = networks.CosyVoice3Flow(networks.CosyVoice3FlowConfig(estimator=RotaryDiTConfig(depth=1, head_dim=D)))
    options = FlowOptions(
        stack=stacks.DIT,
        device="meta",
        dtype=torch.float16,
        runtime="cuda_graph",
        steps=1,
        limits=BatchLimits(),
        prompt_cache_bytes=0,
    )
    for flow in (dit, rotary):
        with nullcontext() if fits else pytest.raises(ValueError, match=f"heads of .{D}.: set flow_runtime to torch"):
            options.load(lambda *_, flow=flow: flow, Path())
        replace(options, runtime="torch").load(lambda *_, flow=flow: flow, Path())


def test_two_blocks_of_a_network_are_tried_and_launch_every_kernel_of_it() -> None:
    """A kernel that is first met in a capture would be compiled and loaded there, which CUDA may not allow. What the
    trial leaves out has to stay as it was: the padding of every later batch begins with it."""
    torch.use_deterministic_algorithms(True)  # memory that is not written to is NaN
    try:
        kernels, histories = trials_and_solves(90)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (
        len(kernels) == 6 and len(histories) == 2
    )  # of the encoder, three flows, and the prompts of two with histories
    for tried, solved in kernels:
        assert tried == solved and len(tried) > 5
    assert all(history.isfinite().all() for history in histories)


def test_kernels_in_the_block_are_compiled_and_do_not_run() -> None:
    """To run one would fail here."""
    snake, run = import_module("cosyvoice_triton.kernels.vocoder"), JITFunction.run
    with pretended(86), compiled_ahead("snake"):
        compiled = snake._snake.device_caches[86][0]
        before = len(compiled)
        for dtype in (torch.float16, torch.bfloat16):
            snake.snake(torch.empty(1, 2, 5, dtype=dtype, device="meta"), torch.empty(2, device="meta"), None)
    assert [type(kernel) for kernel in list(compiled.values())[before:]] == 2 * [CompiledKernel]
    assert JITFunction.run is run


def test_a_kernel_that_does_not_compile_is_an_error_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, run = import_module("cosyvoice_triton.kernels.linear"), JITFunction.run
    x = torch.empty(1, 300, 512, dtype=torch.float16, device="meta")
    monkeypatch.setattr(Tiles, "linear", lambda *sizes: ProductTile(24, 64, 64, 4, 3))  # no power of two
    with pytest.raises(CompilationError), pretended(86), compiled_ahead("linear"):
        linear.linear(x, torch.empty(512, 512, dtype=torch.float16, device="meta"))
    with compiled_ahead("nothing"):  # after the error another block can begin
        pass
    assert JITFunction.run is run


# Of tests/support/interpreted_kernels.py, which Triton's interpreter runs on the CPU, some of them in one process: its
# start takes as long as the shortest ones.
COMPARISONS = "hift+snake+steps", "rotary+dit+int8", "layers+tma_layers+tma+outliers", "unet+encoder"


@pytest.mark.parametrize("comparisons", COMPARISONS)
def test_the_kernels_compute_what_plain_torch_does_and_stay_within_their_tensors(comparisons: str) -> None:
    command = [sys.executable, "-m", "tests.support.interpreted_kernels", *comparisons.split("+")]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
