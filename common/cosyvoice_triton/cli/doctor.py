"""Check this machine and say what it would serve: a line for each check, and what to do about each that fails.

    cosyvoice-triton doctor                                  with the GPU, if there is one
    cosyvoice-triton doctor models/official --stack unet --device gpu
    cosyvoice-triton doctor models/official --stack unet --files   after a download: reads each file, speaks a second

Downloads nothing, and loads no model without --files. The exit code is 1 if a check failed.
"""

import argparse
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from cosyvoice_triton.arguments import command_parser
from cosyvoice_triton.cli.stack_options import add_stack_options, stack_options
from cosyvoice_triton.prepare import steps
from cosyvoice_triton.server import gpus
from cosyvoice_triton.server.installation import Installation, ServerError
from cosyvoice_triton.server.options import StackOptions, planned

CHECKPOINT_GB = 8  # of a stack's downloads, the LLM's directory and a reserve
SHARED_MEMORY_GB = 1.0  # of requests and answers between tritonserver and its models
SHARED_MEMORY = Path("/dev/shm")

Line = tuple[bool, str]  # whether the check passed, and what it found


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(__doc__)
    parser.add_argument(
        "models", type=Path, nargs="?", default=Path("models/official"), help="of the checkpoints (%(default)s)"
    )
    parser.add_argument("--files", action="store_true", help="read every file, load the networks on the CPU and speak")
    add_stack_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    all_passed = True
    for passed, text in checked(args):
        print(f"{'ok      ' if passed else 'problem '} {text}", flush=True)
        all_passed &= passed
    return 0 if all_passed else 1


def checked(args: argparse.Namespace) -> Iterator[Line]:
    """Yield the lines of the checks that the options ask for."""
    try:
        options = stack_options(args.models, args)
        yield from examine(options)
        if args.files:
            from cosyvoice_triton.offline.inspection import Inspection  # imports torch

            yield from Inspection(options).lines()
    except ValueError as error:  # of the options
        yield False, str(error)


def examine(options: StackOptions) -> Iterator[Line]:
    """Yield one line for each check of what serving with these options needs."""
    yield _tritonserver()
    yield from _gpu(options)
    yield _disk(options)
    yield _shared_memory()


def _tritonserver() -> Line:
    try:
        return True, f"tritonserver: {Installation.find().binary}"
    except ServerError as error:
        return False, str(error)


def _gpu(options: StackOptions) -> Iterator[Line]:
    try:
        found = gpus.used(options.device)
        for gpu in found:
            yield True, f"GPU {gpu.index}: {gpu}, driver {gpu.driver}, compute capability {gpu.capability}"
        _, plan = planned(options)
    except gpus.GpuError as error:
        yield False, str(error)
    else:
        given = options.settings.get("max_streams")
        on_cpu = "no GPU is used: the CPU renders the demo voice in time, of official weights one listener at best"
        yield True, plan or (f"max_streams={given}, as given" if given else on_cpu)
    if runtime := _container_runtime():
        yield True, runtime


def _container_runtime() -> str | None:
    """Return a remark if Docker is here and cannot give a GPU to a container; None without Docker, or if it can."""
    try:
        command = ["docker", "info", "--format", "{{json .Runtimes}} {{json .CDISpecDirs}}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode or "nvidia" in done.stdout or not gpus.visible():
        return None
    return (
        "Docker gives containers no GPU; for compose install nvidia-container-toolkit and run: "
        "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
    )


def _disk(options: StackOptions) -> Line:
    place = next(
        path for path in (options.models_dir.resolve(), *options.models_dir.resolve().parents) if path.exists()
    )
    free = shutil.disk_usage(place).free / 1e9
    if not options.missing_files():
        return True, f"checkpoints of the {options.stack} stack: {options.models_dir}"
    if options.models_dir != steps.DEMO and free < CHECKPOINT_GB:
        return False, (
            f"the checkpoints need {CHECKPOINT_GB} GB at {options.models_dir}, and {free:.1f} GB are free: delete what "
            "is not needed (docker system df shows Docker's part) or name another directory"
        )
    return True, f"disk: {free:.0f} GB free at {place} for checkpoints of about {CHECKPOINT_GB} GB"


def _shared_memory() -> Line:
    size = shutil.disk_usage(SHARED_MEMORY).total / 1e9
    if size < SHARED_MEMORY_GB:
        return False, (
            f"{SHARED_MEMORY} has {size:.2f} GB and {SHARED_MEMORY_GB:g} GB are needed: docker run --shm-size 2g"
        )
    return True, f"shared memory: {size:.1f} GB"
