"""Programs that tests run to their end, and Docker Compose 2: `docker-compose` beside this Python, the one on PATH, or
the plugin of `docker`."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def ran(*command: object, code: int = 0, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """The output of a program, which must end with this code. environment: variables beside this process's own."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=os.environ | environment, capture_output=True, errors="replace")
    assert done.returncode == code, done.stdout + done.stderr
    return done


OLDEST = (2, 24, 4)  # the first that has the tags of deploy/compose/cpu.yml
MISSING = "Docker Compose 2.24.4 or newer is not installed; .ci/run has the command"


@functools.cache
def compose_command() -> tuple[str, ...] | None:
    """The command that runs it; None if there is none."""
    beside = Path(sys.executable).parent / "docker-compose"
    for command in ((str(beside),), ("docker-compose",), ("docker", "compose")):
        if shutil.which(command[0]) is None:
            continue
        shown = subprocess.run([*command, "version", "--short"], capture_output=True, text=True)
        found = re.fullmatch(r"v?(\d+)\.(\d+)\.(\d+)\S*", shown.stdout.strip())
        if shown.returncode == 0 and found and tuple(map(int, found.groups())) >= OLDEST:
            return command
    return None
