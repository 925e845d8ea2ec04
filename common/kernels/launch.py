"""How kernels are launched, and compiled.

Programmatic dependent launch (CUDA programming guide, 4.5): a kernel starts before the one before it has ended. A
network of small kernels spends much of its time between them. Where the GPU can, the programs of a kernel are started
while those of the one before end, and wait there until its results can be read. Every kernel waits, so nothing is read
or overwritten early.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.runtime.jit import JITFunction

FIRST_ARCHITECTURE = 90  # compute capability 9.0
COMPILERS = 8  # threads


def early() -> dict[str, bool]:
    """Arguments of a launch: whether the kernel, whose parameter PDL it is, starts early on the current GPU."""
    if triton.runtime.driver.active.get_current_target().arch < FIRST_ARCHITECTURE:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait(PDL: tl.constexpr):
    """Return when the kernel before has ended, and let the next one start. Comes before any other work of a kernel.

    In this order: letting the next one start before the wait made most networks slower, see docs/results/kernels.md.
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Kernels that are launched in the block do not run; after it they are compiled, several at the same time.

    A start without a cache compiles some hundred, each half a second or more of one core. No other thread may launch
    kernels meanwhile.
    """
    run, launched = JITFunction.run, threading.Event()

    def compile_only(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *arguments, grid=grid, warmup=True, **options)

    setattr(JITFunction, "run", compile_only)  # noqa: B010 Triton has no mode in which a launch only compiles
    try:
        # The threads begin after the block, and are few: a part of their work is Python's, for which they wait for each
        # other, and the block would wait with them.
        workers = ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1), initializer=launched.wait)
        with workers, triton.AsyncCompileMode(workers):
            try:
                yield
            finally:
                launched.set()
    finally:
        setattr(JITFunction, "run", run)  # noqa: B010
