"""`--help` of every script: `python -m tests.support.explaining file|module` prints {script: what it said}.

Each is run as the interpreter runs a file or a module: with the same first entry of sys.path, and with our own packages
imported anew. The libraries that they import are read once for all, which is what takes the time.
"""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path.stem for path in (ROOT / "scripts").glob("*.py") if path.stem != "__init__" and "def main(" in path.read_text()
)
OURS = ("common", "scripts", "tests")


def explain(script: str, way: str, search: list[str]) -> str:
    """What it prints; the error where it does not end well."""
    for module in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[module]
    sys.argv = [f"scripts/{script}.py", "--help"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            if way == "file":
                sys.path[:] = [str(ROOT / "scripts"), *search]
                runpy.run_path(f"scripts/{script}.py", run_name="__main__")
            else:
                sys.path[:] = [str(ROOT), *search]
                runpy.run_module(f"scripts.{script}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return said.getvalue() if not end.code else f"it ended with {end.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it went on after its help"


def main() -> None:
    way, search = sys.argv[1], [entry for entry in sys.path[1:] if entry != str(ROOT)]
    json.dump({script: explain(script, way, search) for script in SCRIPTS}, sys.stdout)


if __name__ == "__main__":
    main()
