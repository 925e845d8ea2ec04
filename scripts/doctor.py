"""`cosyvoice-triton doctor` in a clone, before anything is installed: any Python from 3.6 on, no packages."""

import platform
import sys
from pathlib import Path

if not (3, 10) <= sys.version_info[:2] <= (3, 12):  # what pyproject.toml allows
    # tritonserver's wheel needs numpy 1.26, of which there is no build for later Pythons.
    sys.exit(
        "error: Python 3.10, 3.11 or 3.12 is needed, because tritonserver's numpy is not built for others; "
        f"{sys.executable} is {platform.python_version()}. Name one, as in make demo PYTHON=python3.12; "
        "if your distribution has none, run: python3 -m venv build/uv && build/uv/bin/pip install uv && "
        "build/uv/bin/uv python install 3.12 && make demo PYTHON=$(build/uv/bin/uv python find 3.12)"
    )
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

from cosyvoice_triton.cli.doctor import main

sys.exit(main())
