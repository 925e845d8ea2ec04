"""`--help` of every launcher and tool: `python -m tests.support.help_texts file|module` prints {name: help text}.

Each program runs as the interpreter runs a file or a module: with the same first entry of sys.path and with our own
packages imported again. The libraries that they import are loaded only once, because loading takes most of the time.
Files run in another directory than the repository's, as upstream's users may call them.
"""

import contextlib
import functools
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ("common", "scripts", "tools")


def _programs(folder: str) -> list[str]:
    """The names that `python -m` takes, of all files below a folder that end in `if __name__ == "__main__"`."""
    paths = [path for path in (ROOT / folder).rglob("*.py") if '\nif __name__ == "__main__"' in path.read_text()]
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in paths]
    return sorted(".".join(name[:-1] if name[-1] == "__main__" else name) for name in parts)


LAUNCHERS = _programs("scripts")
PROGRAMS = [*LAUNCHERS, *_programs("tools"), "cosyvoice_triton.speech_service"]


@functools.cache
def explanations(way: str) -> dict[str, str]:
    """The output of each program, or its error; "file": only the launchers."""
    command = [sys.executable, "-m", "tests.support.help_texts", way]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, timeout=240, check=True)
    return dict(json.loads(finished.stdout))


def help_text(name: str, way: str, installed: list[str]) -> str:
    """The help text, or the error. installed: sys.path without the directory of the running program."""
    for module in [module for module in sys.modules if module.partition(".")[0] in OURS]:
        del sys.modules[module]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            if way == "file":
                file = ROOT / f"{name.replace('.', '/')}.py"
                sys.argv, sys.path[:] = [str(file), "--help"], [str(file.parent), *installed]
                runpy.run_path(str(file), run_name="__main__")
            else:
                sys.argv, sys.path[:] = [name, "--help"], [str(ROOT), *installed]
                runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return printed.getvalue() if not end.code else f"exit code {end.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it did not stop after printing its help"


def main() -> None:
    way, installed = sys.argv[1], sys.path[1:]
    with tempfile.TemporaryDirectory() as elsewhere:
        if way == "file":
            os.chdir(elsewhere)
        names = LAUNCHERS if way == "file" else PROGRAMS
        result = {name: help_text(name, way, installed) for name in names}
        os.chdir(ROOT)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
