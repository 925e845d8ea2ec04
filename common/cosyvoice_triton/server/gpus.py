"""The GPUs of this machine as their driver describes them, and what a server with everything on one of them serves.

Without torch, so that a machine can be checked before anything is installed or downloaded. The sizes are those of the
official networks; token2wav checks the checkpoint's own before it loads (token2wav/gpu/memory.py).
"""

import importlib.util
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cosyvoice_triton.profiles import GPU_PLANS, GpuPlan

MIN_CAPABILITY = 7.5  # of CUDA 13 and of its builds of torch
CUDA = "13.0"  # of the torch that the extra `gpu` installs
DRIVERS = {"12": 525, "13": 580}  # by CUDA's major version, the oldest that it runs on
LOWER_BOUND = 0.92  # of the memory that the plans give for any number of listeners: less is never enough
PROMPT_GIB = 1.3  # no more than the prompt models take on a GPU
_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version", "compute_cap")


NONE_VISIBLE = (
    "no GPU is visible: install NVIDIA's driver (nvidia-smi must list the GPU); start a container with `docker run "
    "--gpus all`, which needs NVIDIA's container toolkit on the host (docs/deploy.md#before-the-first-start)"
)


class GpuError(ValueError):
    """The GPU cannot serve; the message says what to do."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: memory in GiB, the driver's version, the compute capability."""

    index: str
    uuid: str
    name: str
    total: float
    free: float
    driver: str
    capability: str

    def __str__(self) -> str:
        return f"{self.name} ({self.total:.1f} GiB, {self.free:.1f} free)"

    def require_usable(self, cuda: str) -> None:
        """Raise GpuError if its driver is too old for that version of CUDA, or the GPU itself."""
        needed = DRIVERS.get(cuda.partition(".")[0], 0)
        if self.driver.partition(".")[0].isdigit() and int(self.driver.partition(".")[0]) < needed:
            raise GpuError(
                f"the driver {self.driver} of {self.name} is too old for CUDA {cuda}: install {needed} or newer "
                f"(Ubuntu: sudo apt-get install nvidia-driver-{needed}-server), and restart the machine"
            )
        if re.fullmatch(r"\d+\.\d+", self.capability) and float(self.capability) < MIN_CAPABILITY:
            raise GpuError(
                f"{self.name} has compute capability {self.capability}, and {MIN_CAPABILITY} is needed (Turing, 2018): "
                "use another GPU, or serve the demo voice with --device cpu"
            )


def visible() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this process; none without a driver that answers."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    gpus = parse(done.stdout) if done.returncode == 0 else []
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    names = [name.strip() for name in wanted.split(",")]
    return [gpu for name in names if name for gpu in gpus if gpu.index == name or gpu.uuid.startswith(name)]


def parse(printed: str) -> list[Gpu]:
    """Return the GPUs in nvidia-smi's lines, without those whose memory it does not tell, which share the host's."""
    rows = [[value.strip() for value in line.split(",")] for line in printed.splitlines()]
    return [
        Gpu(index, uuid, name, int(total) / 1024, int(free) / 1024, driver, capability)
        for index, uuid, name, total, free, driver, capability in (row for row in rows if len(row) == len(_FIELDS))
        if total.isdigit() and free.isdigit()
    ]


def cuda_of_torch() -> str | None:
    """Return the version of CUDA that the installed torch is built for, such as "13.0"; "" if it is a build for CPUs,
    None without torch."""
    spec = importlib.util.find_spec("torch")  # not imported: that takes seconds
    if spec is None or not spec.submodule_search_locations:
        return None
    version = Path(spec.submodule_search_locations[0], "version.py")
    found = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", version.read_text() if version.exists() else "", re.MULTILINE)
    return found[1] if found else ""


def plan(stack: str, gpus: Sequence[Gpu], gib: float | None = None) -> GpuPlan | None:
    """Return the plan for the size of these GPUs, or a smaller one if it does not fit into what is free on each, or
    into `gib`. Return None for a stack that has no plans. Raise GpuError if not even the smallest one fits."""
    plans = [each for each in GPU_PLANS if stack in each.streams]
    if not plans:
        return None
    least, memory = _least(gpus, gib)
    # A card has a little less than its name says: an L4 22.5 GiB. The unet stack, which takes little memory, would fit
    # into the plans of larger cards, but from 40 GB on they read new voices on the GPU.
    of_size = [each for each in plans if min(gpu.total for gpu in gpus) >= 0.93 * each.card]
    if fitting := [each for each in of_size if each.streams[stack].gib <= memory]:
        return fitting[-1]
    others = [name for name, of in GPU_PLANS[0].streams.items() if name != stack and of.gib <= memory]
    raise GpuError(
        f"{least} is too small for the {stack} stack, which needs {plans[0].streams[stack].gib} GiB free: "
        + ("end other programs on it (nvidia-smi lists them), " if least.total > memory + 1 else "")
        + (f"serve --stack {others[0]}, which fits, " if others else "")
        + "use a larger GPU, or choose --set max_streams=… yourself (docs/sizing.md)"
    )


def require_room(stack: str, gpus: Sequence[Gpu], streams: int, gib: float | None = None, prompts: bool = True) -> None:
    """Raise GpuError, with a number that fits, if these GPUs have no room for so many listeners.

    prompts: whether the prompt models are on a GPU. What is nearly enough is left to token2wav, whose check knows the
    checkpoint and all settings.
    """
    on_gpu = PROMPT_GIB if prompts else 0
    points: dict[int, float] = {}
    for plan in GPU_PLANS:
        if of := plan.streams.get(stack):
            points.setdefault(of.listeners, of.gib - (0 if plan.prompt_device == "cpu" else PROMPT_GIB))
    if not points:
        return
    least, memory = _least(gpus, gib)
    if (needed := LOWER_BOUND * _between(points, streams) + on_gpu) > memory:
        fitting = max((fewer for fewer in range(1, streams) if _between(points, fewer) + on_gpu <= memory), default=0)
        raise GpuError(
            f"max_streams {streams} of the {stack} stack needs at least {needed:.1f} GiB, and {least} "
            + (f"leaves it {memory:g}: " if gib is not None else "has less: ")
            + (f"set max_streams <= {fitting}, or leave it out" if fitting else "use a larger GPU")
        )


def _between(points: Mapping[int, float], streams: int) -> float:
    """Return the GiB for so many listeners on the line through the two points around them, or the nearest two."""
    pairs = list(pairwise(points.items()))
    (fewer, low), (more, high) = next((pair for pair in pairs if streams <= pair[1][0]), pairs[-1])
    return low + (high - low) / (more - fewer) * (streams - fewer)


def _least(gpus: Sequence[Gpu], gib: float | None) -> tuple[Gpu, float]:
    """Return the GPU with the least free memory, and the GiB that a server may take there."""
    least = min(gpus, key=lambda gpu: gpu.free)
    return least, least.free if gib is None else min(gib, least.total)


def describe(made: GpuPlan, stack: str, gpus: Sequence[Gpu]) -> str:
    """Return the line that is printed at start."""
    of = made.streams[stack]
    where = str(gpus[0]) if len(gpus) == 1 else f"each of {len(gpus)} GPUs, {gpus[0]}"
    prompts = "CPU" if made.prompt_device == "cpu" else "GPU"
    return (
        f"plan for {made.card} GB: up to {of.listeners} listeners in {of.gib} GiB, new voices are read on the "
        f"{prompts}; on {where}; to choose yourself: --set max_streams=… (docs/sizing.md)"
    )


def used(device: str) -> list[Gpu]:
    """Return the GPUs that a server on `device` ("auto", "cpu", "gpu") has; "auto" without a GPU that can be used has
    none. Raise GpuError if `device` is "gpu", and there is none, or one or its driver is too old for the installed
    torch, or for that of the extra `gpu` where none is installed."""
    if device == "cpu" or (device == "auto" and cuda_of_torch() == ""):
        return []
    if cuda_of_torch() == "":
        raise GpuError(
            "the installed torch is a build for CPUs, which pip would keep; run: "
            "pip uninstall --yes torch onnxruntime; pip install 'cosyvoice-triton[gpu]'"
        )
    try:
        if not (gpus := visible()):
            raise GpuError(NONE_VISIBLE)
        for gpu in gpus:
            gpu.require_usable(cuda_of_torch() or CUDA)
        return gpus
    except GpuError:
        if device == "gpu":
            raise
        return []
