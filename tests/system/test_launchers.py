"""The files that are started without the console command: upstream's names in scripts/, and what `make` runs first."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cosyvoice_triton.cli import COMMANDS

from tests.conftest import ROOT

LAUNCHERS = sorted(path for path in (ROOT / "scripts").glob("*.py") if path.stem != "doctor")


def test_a_launcher_runs_as_a_file_from_any_directory(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "scripts" / "client_grpc.py"), "--help"]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0 and "usage:" in finished.stdout, finished.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda path: path.stem)
def test_every_launcher_is_a_command(launcher: Path) -> None:
    """What each says of itself is in test_package."""
    entries = [entry for group in COMMANDS.values() for entry in group.items()]
    commands = [each for name, entry in entries for each in ((name, entry), *entry.actions.items())]
    module = f"cosyvoice_triton.cli.{launcher.stem}"
    assert any(module.endswith(f".{name.replace('-', '_')}") or entry.module == module for name, entry in commands)
    assert launcher.read_text().endswith(f"\n\nfrom {module} import main\n\nraise SystemExit(main())\n")


def test_the_doctor_of_a_bare_clone_needs_no_packages_and_checks_settings_as_rendering_does(tmp_path: Path) -> None:
    """-S: without site-packages, as the system's own Python before `make setup`."""
    for given, code, found in (
        ((), 0, "which can install tritonserver"),
        (("--set", "max_streams=many"), 1, "parameter 'max_streams' must be an integer, not 'many'"),
        (("--set", "max_stream=4"), 1, "unknown setting 'max_stream'; the models of this stack have batching_strategy"),
    ):
        command = [sys.executable, "-S", ROOT / "scripts" / "doctor.py", "--device", "cpu", "--ports", *given]
        finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (finished.returncode, finished.stderr) == (code, "") and found in finished.stdout


def test_a_python_that_tritonserver_does_not_have_is_told_why_and_what_to_install(tmp_path: Path) -> None:
    script = (ROOT / "scripts" / "doctor.py").read_text()
    for version in ((3, 9, 18), (3, 13, 0)):
        told = f"import sys; sys.version_info = {version}; exec(compile({script!r}, 'doctor.py', 'exec'))"
        finished = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=60)
        assert finished.returncode == 1 and finished.stderr.startswith("error: Python 3.10, 3.11 or 3.12 is needed")
        assert (
            finished.stderr.count("\n") == 1
            and "make demo PYTHON=$(build/uv/bin/uv python find 3.12)" in finished.stderr
        )


def test_make_serve_looks_at_its_ports_before_it_installs_or_renders() -> None:
    """With the system's own Python, as before `make setup`. Port 0 is always free."""
    ports = {name: "0" for name in ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT", "HEALTH_PORT")}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        given = [f"{name}={value}" for name, value in (ports | {"SPEECH_PORT": str(port)}).items()]
        command = ["make", "serve", f"PYTHON={sys.executable} -S", "MODELS=nowhere", *given]
        refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and f"port {port} is in use" in refused.stderr
    assert "render" not in refused.stdout and "nowhere" not in refused.stderr


def planned(*words: str) -> subprocess.CompletedProcess[str]:
    """What make would run."""
    return subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_make_passes_settings_and_paths_with_blanks_on_and_refuses_an_unknown_device() -> None:
    shown = planned("render", "SET=max_streams=4 first_hop_tokens=10").stdout
    assert "--set max_streams=4 --set first_hop_tokens=10" in shown
    for target in ("render", "serve", "demo", "bench", "parity"):
        shown = planned(target, "MODELS=my models", "OUTPUT=out dir/a.wav", "FOLDER=a b").stdout
        words = shlex.split([line for line in shown.replace("\\\n", " ").splitlines() if line.strip()][-1])
        assert {"my models", "out dir/a.wav", "a b"} & set(words), (target, words)
    refused = planned("serve", "DEVICE=cuda")
    assert refused.returncode == 2 and "DEVICE is cpu or gpu, not 'cuda'" in refused.stderr


def test_make_serve_on_a_gpu_checks_the_machine_installs_its_extra_downloads_and_serves() -> None:
    shown = planned("serve", "DEVICE=gpu", "STACK=unet", "SET=max_streams=8").stdout
    steps = ("doctor.py", "uninstall --quiet --yes torch", "[client,http,gpu]", "prepare download", "serve --models")
    assert sorted(map(shown.index, steps)) == [*map(shown.index, steps)]
    for step in (steps[0], *steps[3:]):
        (line,) = re.findall(rf".*{step}.*", shown)
        assert "models/official" in line and "--stack unet" in line, step
        assert ("--set max_streams=8" in line) == (step != "prepare download")


def test_make_clean_keeps_the_models_and_the_voices_that_were_added() -> None:
    assert "models" not in planned("clean").stdout
