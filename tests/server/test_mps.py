"""CUDA's MPS beside a server: started with its own pipe folder, ended with it, or warned of. A program stands in for
NVIDIA's daemon, and one for nvidia-smi."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cosyvoice_triton.server import gpus, mps
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.server.rendering import render

from tests.support.waiting import until

# Like NVIDIA's: with -f it makes its pipe and runs until another one of it passes "quit" on, which needs its pipe.
DAEMON = """#!/bin/sh
log=$CUDA_MPS_LOG_DIRECTORY/control.log pipe=$CUDA_MPS_PIPE_DIRECTORY/control
if [ "$1" = -f ]; then
    echo "$CUDA_VISIBLE_DEVICES" >"$MPS_RECORD/started"
    : break
    mkfifo "$pipe" && until [ "${line%% *}" = quit ]; do read -r line <"$pipe"; done
    echo "$line" >"$MPS_RECORD/ended"
else
    [ -p "$pipe" ] && cat >"$pipe"
fi
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a machine with two GPUs and the daemon: the folder in which the daemon records its start and end."""
    programs = tmp_path / "programs"
    programs.mkdir()
    lines = "\\n".join(f"{n}, GPU-{n}f, NVIDIA L4, 23034, 22600, 580.95.05, 8.9" for n in range(2))
    for name, content in (("nvidia-smi", f'#!/bin/sh\nprintf "{lines}\\n"\n'), (mps.PROGRAM, DAEMON)):
        (programs / name).write_text(content)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("MPS_RECORD", str(tmp_path))
    for name in ("CUDA_VISIBLE_DEVICES", mps.PIPES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus, "cuda_of_torch", lambda: "13.0")
    return tmp_path


def rendered(record: Path, device: str = "gpu", **options: object) -> Path:
    render(StackOptions(models_dir=record, device=device, llm_engine="cuda", **options), record / "repository")
    return record / "repository"


def test_the_daemon_runs_while_the_models_do(record: Path) -> None:
    with mps.shared_gpu(rendered(record)):
        folder = Path(os.environ[mps.PIPES])
        assert (folder / "control").exists() and (record / "started").read_text() == "\n"
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert (record / "ended").read_text() == "quit -t 5\n"
    assert mps.PIPES not in os.environ and not folder.exists()


def test_the_daemon_ends_with_a_killed_server(record: Path) -> None:
    code = "import os; from pathlib import Path; from cosyvoice_triton.server import gpus, mps\n"
    code += "gpus.cuda_of_torch = lambda: '13.0'\n"
    code += f"with mps.shared_gpu(Path({str(rendered(record))!r})): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    until((record / "ended").exists)


def test_daemon_and_models_number_the_gpus_alike(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with mps.shared_gpu(rendered(record)):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1f" and (record / "started").read_text() == "GPU-1f\n"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("state", ["runs", "has ended", "is the host's"])
def test_a_daemon_of_the_machine_is_used_unless_only_its_pipe_is_left(record, state, monkeypatch, caplog) -> None:
    program, pipes = record / "programs" / mps.PROGRAM, record / "pipes"
    pipes.mkdir()
    monkeypatch.setattr(mps, "DEFAULT_PIPES", pipes)
    variables = os.environ | {mps.PIPES: str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(pipes)}
    if state == "runs":
        daemon = subprocess.Popen([program, "-f"], env=variables)
        until((pipes / "control").exists)
    else:
        (pipes / "control").touch()
    if state == "is the host's":
        program.unlink()
    with mps.shared_gpu(rendered(record)):
        assert (mps.PIPES in os.environ) == (state == "has ended")
    assert not caplog.messages
    if state == "runs":
        assert not (record / "ended").exists()
        subprocess.run([program], input=b"quit\n", env=variables, check=True)
        assert daemon.wait(60) == 0


@pytest.mark.parametrize("lacking", ["program", "support"])
def test_where_it_cannot_be_had_one_warning_says_what_that_costs(record, lacking, monkeypatch, caplog) -> None:
    program = record / "programs" / mps.PROGRAM
    if lacking == "program":
        program.unlink()
    else:
        program.write_text(
            DAEMON.replace(": break", 'echo "Only the compute mode Default is supported" >"$log"; exit 1')
        )
    with mps.shared_gpu(rendered(record)):
        assert mps.PIPES not in os.environ
    (warning,) = caplog.messages
    why = "is not installed" if lacking == "program" else "Only the compute mode Default is supported"
    assert why in warning and warning.endswith(mps.WITHOUT_MPS)


def test_it_is_left_alone_where_nothing_is_shared_or_somebody_has_decided(record, monkeypatch, caplog) -> None:
    elsewhere = {"llm_transport": "openai", "llm_urls": ("http://llm:8000/v1",), "settings": {"prompt_device": "cpu"}}
    for repository in (lambda: rendered(record, "cpu"), lambda: rendered(record, **elsewhere)):
        with mps.shared_gpu(repository()):
            assert mps.PIPES not in os.environ
    monkeypatch.setenv(mps.PIPES, "/nowhere")
    with mps.shared_gpu(rendered(record)):
        assert os.environ[mps.PIPES] == "/nowhere"
    assert not (record / "started").exists() and not caplog.messages
