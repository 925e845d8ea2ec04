"""Programmatic dependent launch (CUDA programming guide, 4.5): a kernel starts before the one before it has ended.

A network of small kernels spends much of its time between them. Where the GPU can, the programs of a kernel are started
while those of the one before end, and wait there until its results can be read. Every kernel waits, so nothing is read
or overwritten early.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

FIRST_ARCHITECTURE = 90  # compute capability 9.0


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
