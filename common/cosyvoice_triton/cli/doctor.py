"""Check this machine and say what it would serve: a line for each check, and what to do about each that fails.

    python3 scripts/doctor.py models/official --device gpu   in a clone, before anything is installed
    cosyvoice-triton doctor                                  with the GPU, if there is one
    cosyvoice-triton doctor models/official --stack unet --device gpu
    cosyvoice-triton doctor models/official --stack unet --files   after a download: reads each file, speaks a second

Downloads nothing, and loads no model without --files. The exit code is 1 if a check failed.
"""

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cosyvoice_triton.arguments import command_parser
from cosyvoice_triton.cli.render import add_stack_options, stack_options
from cosyvoice_triton.constants import GRPC_PORT, HEALTH_PORT, HTTP_PORT, METRICS_PORT, SPEECH_PORT
from cosyvoice_triton.demo_checkpoint import DEMO
from cosyvoice_triton.server import gpus
from cosyvoice_triton.server.installation import Installation, ServerError, require_machine
from cosyvoice_triton.server.options import StackOptions, planned
from cosyvoice_triton.server.rendering import filled_configs
from cosyvoice_triton.server.tritonserver import LOOPBACK, require_free

CHECKPOINT_GB = 8  # of a stack's downloads, the LLM's directory and a reserve
SHARED_MEMORY_GB = 1.0  # of requests and answers between tritonserver and its models
SHARED_MEMORY = Path("/dev/shm")
PORTS = (HTTP_PORT, GRPC_PORT, METRICS_PORT, HEALTH_PORT, SPEECH_PORT)

Line = tuple[bool, str]  # whether the check passed, and what it found


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(__doc__)
    parser.add_argument(
        "models", type=Path, nargs="?", default=Path("models/official"), help="of the checkpoints (%(default)s)"
    )
    parser.add_argument("--files", action="store_true", help="read every file, load the networks on the CPU and speak")
    parser.add_argument("--ports", type=int, nargs="*", default=PORTS, help="that must be free (those of `serve`)")
    parser.add_argument("--disk", type=float, default=0, metavar="GB", help="that must be free here, to install (0)")
    parser.add_argument("--quiet", action="store_true", help="print problems only, on standard error")
    add_stack_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    all_passed = True
    for passed, text in checked(args):
        if args.quiet and not passed:
            print(f"error: {text}", file=sys.stderr)
        elif not args.quiet:
            print(f"{'ok      ' if passed else 'problem '} {text}", flush=True)
        all_passed &= passed
    return 0 if all_passed else 1


def checked(args: argparse.Namespace) -> Iterator[Line]:
    """Yield the lines of the checks that the options ask for."""
    try:
        options = stack_options(args.models, args)
    except ValueError as error:
        yield False, str(error)
        return
    checks = [_software(), _settings(options), _gpu(options), _models(options), _ports(args.ports)]
    checks += [_shared_memory()] if options.device != "cpu" else []  # the demo voice needs little
    checks += [_space(Path.cwd(), args.disk, "what is installed and written")] if args.disk else []
    for check in checks:
        try:
            for found in check:
                yield True, found
        except (ValueError, ServerError) as error:
            yield False, str(error)
    if args.files:
        from cosyvoice_triton.offline.inspection import inspected  # imports torch

        yield from inspected(options)


# Each check yields what it found, and ends with the error that says what to do.


def _software() -> Iterator[str]:
    """Yield what there is of tritonserver or, before anything is installed, whether this Python can install it."""
    if (machine := f"{platform.system()} on {platform.machine()}") != "Linux on x86_64":
        raise ServerError(f"tritonserver's wheel is for Linux on x86_64, this is {machine}; run it on such a machine")
    if gpus.cuda_of_torch() is not None:
        yield f"tritonserver: {Installation.find().binary}"
        return
    require_machine()
    version = platform.python_version()
    if not all(importlib.util.find_spec(module) for module in ("venv", "ensurepip")):
        package = f"python{version.rpartition('.')[0]}-venv"
        raise ServerError(f"this Python {version} cannot make environments; run: sudo apt-get install {package}")
    yield f"Python {version}, which can install tritonserver"


def _settings(options: StackOptions) -> Iterator[str]:
    filled_configs(options)
    yield f"settings: {' '.join(f'{key}={value}' for key, value in options.settings.items()) or 'none'}"


def _gpu(options: StackOptions) -> Iterator[str]:
    for gpu in gpus.used(options.device):
        yield f"GPU {gpu.index}: {gpu}, driver {gpu.driver}, compute capability {gpu.capability}"
    _, plan = planned(options)
    given = options.settings.get("max_streams")
    on_cpu = "no GPU is used: the CPU renders the demo voice in time, of official weights one listener at best"
    yield plan or (f"max_streams={given}, as given" if given else on_cpu)
    if runtime := _container_runtime():
        yield runtime


def _models(options: StackOptions) -> Iterator[str]:
    """Yield whether the checkpoints are there, or could be downloaded, and whether their folder can be written to."""
    folder = options.models_dir.resolve()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(place, os.W_OK):
        raise ValueError(
            f"{place} cannot be written to by this user (uid {os.getuid()}): voices and downloads are kept there; "
            f"run: sudo chown -R {os.getuid()} {place}, or name another directory"
        )
    if not options.missing_files():
        yield f"checkpoints of the {options.stack} stack: {options.models_dir}"
    elif folder != DEMO.resolve():
        yield from _space(place, CHECKPOINT_GB, "the checkpoints")


def _ports(ports: Sequence[int]) -> Iterator[str]:
    for port in ports:
        require_free(port, LOOPBACK)
    yield f"free ports: {' '.join(map(str, ports)) or 'not looked at'}"


def _space(place: Path, needed: float, by: str) -> Iterator[str]:
    if (free := shutil.disk_usage(place).free / 1e9) < needed:
        raise ValueError(
            f"{needed:g} GB of disk are needed at {place} for {by}, {free:.1f} GB are free: delete what is not needed "
            f"(du -xh --max-depth=1 {place.anchor} | sort -h; docker system df) or use another disk"
        )
    yield f"disk: {free:.0f} GB free at {place}, {needed:g} GB are for {by}"


def _shared_memory() -> Iterator[str]:
    if (size := shutil.disk_usage(SHARED_MEMORY).total / 1e9) < SHARED_MEMORY_GB:
        raise ValueError(
            f"{SHARED_MEMORY} has {size:.2f} GB and {SHARED_MEMORY_GB:g} GB are needed: docker run --shm-size 2g"
        )
    yield f"shared memory: {size:.1f} GB"


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
