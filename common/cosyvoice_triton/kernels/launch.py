"""How kernels are launched, and compiled.

Programmatic dependent launch (CUDA programming guide, 4.5): a kernel starts before the one before it has ended. A
network of small kernels spends much of its time between them. Where the GPU can, the programs of a kernel are started
while those of the one before end, and wait there until its results can be read. Every kernel waits, so nothing is read
or overwritten early.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from typing import Any

import triton
import triton.language as tl
from tqdm import tqdm
from triton.language.extra import cuda
from triton.runtime.jit import JITFunction

FIRST_ARCHITECTURE = 90  # compute capability 9.0
COMPILERS = 8  # threads


def architecture() -> int:
    """Return the compute capability of the process's GPU: 90 for 9.0."""
    return _architecture(triton.runtime.driver.active)


@cache  # torch takes some microseconds for it, and a launch asks four times
def _architecture(driver: Any) -> int:
    return driver.get_current_target().arch


def early() -> dict[str, bool]:
    """Return the arguments of a launch that say whether the kernel, by its parameter PDL, starts early on this GPU."""
    if architecture() < FIRST_ARCHITECTURE:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def cdiv(x: int, y: int) -> int:
    """Return x / y, rounded up. Triton's own, as its `next_power_of_2`, is for kernels, and slow on the host, where
    thousands of launches are captured at a start."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """Return the smallest power of 2 that is at least x, which is at least 1."""
    return 1 << (x - 1).bit_length()


@triton.jit
def wait(PDL: tl.constexpr):
    """Return when the kernel before has ended, and let the next one start. Comes before any other work of a kernel.

    In this order: letting the next one start before the wait made most networks slower when measured.
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


class _Compilations(triton.AsyncCompileMode):
    """Triton's compile mode, which by itself looks for a kernel again at each launch until it is compiled: 0.2 ms each
    time in Triton 3.6."""

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        kernel = super().submit(key, compile_fn, finalize_fn)
        finalize_fn(kernel)  # is found by later launches; replaced by the compiled one
        return kernel


@contextmanager
def compiled_ahead(name: str) -> Iterator[None]:
    """Compile kernels that are launched in the block after it, several at the same time; they do not run.

    A start without a cache compiles some hundred, each half a second or more of one core. No other thread may launch
    kernels meanwhile. `name` is for the progress bar.
    """
    run, launched = JITFunction.run, threading.Event()

    def compile_only(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *arguments, grid=grid, warmup=True, **options)

    setattr(JITFunction, "run", compile_only)  # noqa: B010 Triton has no mode in which a launch only compiles
    try:
        # The threads begin after the block, and are few: a part of their work is Python's, for which they wait for each
        # other, and the block would wait with them.
        workers = ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1), initializer=launched.wait)
        # After an error of its own, Triton's mode would stay active.
        with workers, _Compilations(workers, ignore_errors=True) as compilations:
            try:
                yield
            finally:
                launched.set()
            kernels = compilations.raw_futures
            for _ in tqdm(as_completed(kernels), desc=f"compiling {name}", unit="kernel", total=len(kernels)):
                pass
        for kernel in kernels:
            kernel.result()
    finally:
        setattr(JITFunction, "run", run)  # noqa: B010
