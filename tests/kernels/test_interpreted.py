import os
import subprocess
import sys

import pytest

# Of tests/support/interpreted_kernels.py, which Triton's interpreter runs on the CPU, each in a process of its own.
COMPARISONS = "snake tma layers outliers tma_layers unet encoder hift rotary dit int8 steps".split()


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_the_kernels_compute_what_plain_torch_does_and_stay_within_their_tensors(comparison: str) -> None:
    command = [sys.executable, "-m", "tests.support.interpreted_kernels", comparison]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
