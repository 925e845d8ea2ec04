"""Check our networks against golden fixtures: one line per output, exit status 1 on any miss."""

import argparse
import sys
from itertools import chain
from pathlib import Path

import torch

from tools.parity.manifests import run_manifests
from tools.parity.runner import run_folder

DESCRIPTION = """\
Compute every fixture of a folder with the networks of common/ and compare with the stored results.

A fixture is a pair: NAME.json (what was called, sizes, tolerances), NAME.safetensors (in/... inputs, out/... results).
Weights are *.weights.safetensors beside them, or drawn by a rule that the JSON states. manifests/*.json, if there, list
the keys and shapes of official checkpoints. Sizes, seeds, chunks and tolerances are all read from the folder.
"""
EPILOG = """\
each line: PASS, MISS or SKIP (a listing of a file that no network of ours loads), the fixture and tensor, the largest
absolute difference, the same relative to the largest expected magnitude, the RMS difference, and what is allowed.

exit status: 0 all within tolerance; 1 a miss, an output that was not computed, or a fixture that no check knows;
2 the folder is not there or holds no fixture.

example: python tools/parity/__main__.py tests/assets/golden
"""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder with the fixtures")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; the stored results were made with one")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if not args.folder.is_dir():
        print(f"{args.folder} is not a folder", file=sys.stderr)
        return 2
    torch.set_num_threads(args.threads)
    results = []
    for result in chain(run_folder(args.folder), run_manifests(args.folder / "manifests")):
        print(f"{result.verdict}  {result.name}  {result.detail}", flush=True)
        results.append(result)
    if not results:
        print(f"{args.folder} holds no fixture", file=sys.stderr)
        return 2
    misses = [result.name for result in results if result.verdict == "MISS"]
    passes = sum(result.verdict == "PASS" for result in results)
    print(f"{passes} passed, {len(misses)} missed" + "".join(f"\n  missed: {name}" for name in misses))
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
