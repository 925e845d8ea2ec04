"""Make the package `tensorrt` of another Python visible to this one, by links. Run once, when the image is built.

    /opt/venv/bin/python3 -m cosyvoice_triton.prepare.share_tensorrt /usr/bin/python3

The image's environment has our own torch and no packages of NVIDIA's Python except this one. Its libraries are the
image's, and both Pythons are of one version. Exit code 1 if the other Python has no TensorRT.
"""

import argparse
import json
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("tensorrt", "tensorrt_bindings", "tensorrt_libs")  # the last two are part of wheels, not of the archive
FIND = """
import importlib.util, json, sys
specs = [importlib.util.find_spec(name) for name in sys.argv[1:]]
print(json.dumps([spec.submodule_search_locations[0] for spec in specs if spec and spec.submodule_search_locations]))
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the interpreter that has TensorRT")
    parser.add_argument("--site", type=Path, default=sysconfig.get_paths()["purelib"], help="where to make the links")
    args = parser.parse_args(argv)
    command = [args.python, "-c", FIND, *PACKAGES]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout
    folders = [Path(folder) for folder in json.loads(found)]
    if PACKAGES[0] not in {folder.name for folder in folders}:
        print(f"{args.python} has no TensorRT", file=sys.stderr)
        return 1
    for folder in folders:
        link = Path(args.site) / folder.name
        link.symlink_to(folder, target_is_directory=True)
        print(f"{link} -> {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
