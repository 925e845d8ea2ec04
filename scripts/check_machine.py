"""Check, before anything is installed, that this machine can run the server.

    python3 scripts/check_machine.py [--disk GB] [--free-ports PORT ...]

If something is missing, one line names it and the command that installs it. Any Python from 3.6 on runs it; it needs no
packages.
"""

import argparse
import importlib.util
import platform
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "common"))  # the package is not installed yet

SUPPORTED = ((3, 10), (3, 12))  # what pyproject.toml allows


def main(argv: "list[str] | None" = None) -> int:  # quoted: older Pythons must reach the message
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=float, default=6.0, help="GB of disk that must be free (6)")
    parser.add_argument("--free-ports", type=int, nargs="+", default=[], metavar="PORT", help="that must be free")
    args = parser.parse_args(argv)
    missing = missing_requirements(args.disk) or ports_in_use(args.free_ports)
    for line in missing:
        print(f"error: {line}", file=sys.stderr)
    return 1 if missing else 0


def missing_requirements(disk_gigabytes: float) -> "list[str]":
    """One line for each requirement that is not met."""
    if not SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]:
        return [
            f"Python 3.10, 3.11 or 3.12 is needed, {sys.executable} is {platform.python_version()}; "
            "name another interpreter: make demo PYTHON=python3.11"
        ]
    from cosyvoice_triton.server import installation  # here, because older Pythons cannot import it

    missing = []
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        missing.append(
            "tritonserver's wheel is for Linux on x86_64, this is "
            f"{platform.system()} on {platform.machine()}; run it on such a machine"
        )
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not all(importlib.util.find_spec(module) for module in ("venv", "ensurepip")):
        missing.append(f"this Python cannot make environments; run: sudo apt-get install python{version}-venv")
    try:
        installation.require_machine()
    except installation.ServerError as error:
        missing.append(str(error))
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < disk_gigabytes:
        missing.append(
            f"{disk_gigabytes:g} GB of disk are needed at {ROOT}, {free:.1f} GB are free; "
            f"run: du -xh --max-depth=1 {ROOT.anchor} | sort -h, and delete what is not needed"
        )
    return missing


def ports_in_use(ports: "list[int]") -> "list[str]":
    """One line for each port of this machine that another process has."""
    if not ports:
        return []
    from cosyvoice_triton.server import tritonserver

    found = []
    for port in ports:
        try:
            tritonserver.require_free(port, tritonserver.LOOPBACK)
        except tritonserver.ServerError as error:
            found.append(str(error))
    return found


if __name__ == "__main__":
    sys.exit(main())
