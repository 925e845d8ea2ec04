"""The environment variables that the starter of tritonserver sets for the models, named and read only here.

TTS_METRICS_DIR     directory in which each model instance writes its metrics; unset: none are written
TTS_DRAIN_FILE      once this file exists, orchestrators refuse new requests; unset: never
TTS_TEST_FAULTS     directory of faults, see monitoring/faults.py; only tests and soaks set it; unset: none
TTS_GRPC_ADDRESS    host:port of this tritonserver's gRPC endpoint, as orchestrators call it; unset: 127.0.0.1:8001
TTS_LOG_LEVEL       of the models' logs, such as DEBUG; set by the user, if at all; unset: WARNING
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cosyvoice_triton.constants import GRPC_PORT

METRICS_DIRECTORY = "TTS_METRICS_DIR"
DRAIN_FILE = "TTS_DRAIN_FILE"
GRPC_ADDRESS = "TTS_GRPC_ADDRESS"
TEST_FAULTS = "TTS_TEST_FAULTS"
LOG_LEVEL = "TTS_LOG_LEVEL"


def path_of(name: str) -> Path | None:
    """Return the path that a variable of this process has; None if it is unset or empty."""
    return Path(value) if (value := os.environ.get(name)) else None


def grpc_address() -> str:
    return os.environ.get(GRPC_ADDRESS) or f"127.0.0.1:{GRPC_PORT}"


def log_level() -> str:
    return os.environ.get(LOG_LEVEL) or "WARNING"


def tritonserver_environment(
    models: Mapping[str, str], libraries: Sequence[Path], preload: Path | None = None
) -> dict[str, str]:
    """Return the environment to start tritonserver in: this process's own, the models' variables and what the
    stubs need.

    libraries: directories for the loader. preload: a library that it loads before the program's. The stubs run Python
    isolated: they ignore PYTHONPATH but use the first python3 on PATH, which has to be this interpreter for them to
    find its packages.
    """
    environment = dict(os.environ)
    search = [*map(str, libraries), environment.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = ":".join(part for part in search if part)
    if preload is not None:
        environment["LD_PRELOAD"] = f"{environment.get('LD_PRELOAD', '')} {preload}".strip()
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', os.defpath)}"
    # The models' processes share the cores. By default an OpenMP thread that waits for the others of its process spins,
    # while those may not get a core: a millisecond of work can then take a hundred.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # oneDNN, which computes on CPUs, keeps what it prepares for 1,024 shapes, of which windows have hundreds. With 256
    # it is no slower (docs/results/operations.md).
    environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    # torch keeps another 1,024 of its bfloat16 matrix products, of 250 KiB each.
    environment.setdefault("LRU_CACHE_CAPACITY", "256")
    # Voices of 1 to 30 s come and go: torch's usual segments leave a GPU's memory in pieces too small for the next.
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return environment | dict(models)
