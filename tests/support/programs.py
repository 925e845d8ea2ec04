"""Programs that tests run to their end."""

import os
import subprocess
from pathlib import Path

from tests.conftest import ROOT


def ran(*command: object, code: int = 0, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """The output of a program, which must end with this code. environment: variables beside this process's own."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, errors="replace"
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done
