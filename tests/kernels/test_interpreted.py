import os
import subprocess
import sys


def test_the_kernels_compute_what_plain_torch_does_and_stay_within_their_tensors() -> None:
    """Triton's interpreter runs them on the CPU: tests/support/interpreted_kernels.py."""
    command = [sys.executable, "-m", "tests.support.interpreted_kernels"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
