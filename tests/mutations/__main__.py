"""Breaks the code in one place after another, and prints whether the tests notice.

    python -m tests.mutations [--only PACKAGE] [--list]

Each entry of mutations.yaml names a file, a text that occurs once in it, what takes its place, and the tests that must
fail then. It is applied to a copy of the working tree, so nothing here changes. Before the first one the named tests
run on the unchanged copy. The exit code is 1 if a mutation survives or does not apply.
"""

import argparse
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

ROOT = Path(__file__).resolve().parents[2]
MUTATIONS = Path(__file__).with_name("mutations.yaml")
SECONDS = 600  # for the tests of one mutation; some make a server or a loop wait for ever

Result = Literal["killed", "survived", "does not apply", "not tested"]


@dataclass(frozen=True)
class Mutation:
    """One change that tests must notice: in `file`, `new` takes the place of `old`. package: what `--only` names."""

    package: str
    what: str
    file: str
    old: str
    new: str
    tests: str  # arguments of pytest

    def applied(self, text: str) -> str | None:
        """Return the changed text, or None unless `old` occurs exactly once in it."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


def read(path: Path = MUTATIONS) -> list[Mutation]:
    """Return the mutations in a file. Raises TypeError if an entry lacks a field or has another one."""
    groups = yaml.safe_load(path.read_text())
    return [
        Mutation(package=name, **({"tests": group["tests"], "file": group.get("file")} | entry))
        for name, group in groups.items()
        for entry in group["mutations"]
    ]


def copied(destination: Path) -> None:
    """Copies what git tracks or would add, so that the tests of the copy see no leftovers."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, listed.split("\0")):
        source, copy = ROOT / name, destination / name
        if source.is_symlink() or source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


def python_of(tree: Path) -> Path:
    """Makes an interpreter beside the tree that imports from it in every process: Triton's stubs ignore PYTHONPATH."""
    home = tree.with_name("python")
    venv.create(home, symlinks=True)
    paths = Path(sysconfig.get_path("purelib", vars={"base": str(home)}), "tree.pth")
    paths.write_text("\n".join(map(str, (tree / "common", tree, *site.getsitepackages()))))
    programs = home / "bin"
    for program in Path(sys.executable).parent.iterdir():  # tests look for them beside their interpreter
        if not (programs / program.name).exists():
            (programs / program.name).symlink_to(program)
    return programs / "python"


def run_tests(python: Path, tree: Path, tests: str) -> Result:
    """Runs pytest in the tree; a run that does not end in time counts as one that failed."""
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line", *tests.split()]
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return "killed"
    if process.returncode == 0:  # tests that are left out, as for want of a program, have not seen the change
        return "survived" if " passed" in output.splitlines()[-1] else "not tested"
    return "not tested" if process.returncode in (4, 5) else "killed"  # usage, and no tests


def result_of(mutation: Mutation, python: Path, tree: Path) -> Result:
    """Applies the mutation to the tree, runs its tests and takes it back."""
    path = tree / mutation.file
    text = path.read_text() if path.exists() else ""
    if (changed := mutation.applied(text)) is None:
        return "does not apply"
    path.write_text(changed)
    try:
        return run_tests(python, tree, mutation.tests)
    finally:
        path.write_text(text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.mutations", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="PACKAGE", action="append", help="such as admission; may be repeated")
    parser.add_argument("--list", action="store_true", help="only say which mutations apply; no test runs")
    args = parser.parse_args(argv)
    mutations = read()
    if unknown := set(args.only or ()) - {one.package for one in mutations}:
        known = ", ".join(dict.fromkeys(one.package for one in mutations))
        parser.error(f"no mutations of {', '.join(sorted(unknown))}; there are {known}")
    chosen = [one for one in mutations if not args.only or one.package in args.only]
    counts: dict[Result, int] = {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as directory:
        tree = Path(directory, "tree")
        copied(tree)
        python = python_of(tree)
        if not args.list:
            for tests in dict.fromkeys(one.tests for one in chosen):
                if run_tests(python, tree, tests) == "killed":
                    print(f"these tests fail without any mutation: {tests}", file=sys.stderr)
                    return 2
        for one in chosen:
            begun = time.monotonic()
            if args.list:
                path = tree / one.file
                applies = path.exists() and one.applied(path.read_text()) is not None
                result: Result = "not tested" if applies else "does not apply"
            else:
                result = result_of(one, python, tree)
            counts[result] = counts.get(result, 0) + 1
            print(f"{one.package:14} {result:15} {time.monotonic() - begun:4.0f} s  {one.what}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    bad = counts.get("does not apply", 0) + counts.get("survived", 0)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
