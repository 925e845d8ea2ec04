"""Which plan follows from the GPU that is there, and what is said where none can serve. A program of the name of
nvidia-smi stands in for the driver. CUDA's MPS beside a server: started with its own pipe folder, ended with it, or
warned of; a program stands in for NVIDIA's daemon."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cosyvoice_triton.cli import doctor, render
from cosyvoice_triton.server import gpus, mps
from cosyvoice_triton.server.options import StackOptions, planned
from cosyvoice_triton.server.rendering import render as render_stack

from tests.support.waiting import until

CARDS = {
    "Tesla T4": ("15360", "14900", "580.95.05", "7.5"),
    "NVIDIA GeForce RTX 3080": ("10240", "9900", "580.95.05", "8.6"),
    "NVIDIA L4": ("23034", "22600", "580.95.05", "8.9"),
    "NVIDIA GeForce RTX 5090": ("32607", "31800", "580.95.05", "12.0"),
    "NVIDIA A100-SXM4-40GB": ("40960", "40300", "580.95.05", "8.0"),
    "NVIDIA L40S": ("46068", "45500", "580.95.05", "8.9"),
    "NVIDIA H100 80GB HBM3": ("81559", "81000", "580.95.05", "9.0"),
    "NVIDIA H200": ("143771", "143100", "580.95.05", "9.0"),
    "GeForce GTX 1080": ("8192", "7900", "580.95.05", "6.1"),
    "NVIDIA T400": ("4096", "3900", "580.95.05", "7.5"),
    "NVIDIA GB10": ("[N/A]", "[N/A]", "580.95.05", "12.1"),
}
Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with these GPUs: names of CARDS, or pairs of such a name and values that differ."""

    def make(*names: str, free: int | None = None, driver: str | None = None, cuda: str | None = "13.0") -> None:
        lines = []
        for index, name in enumerate(names):
            total, unused, version, capability = CARDS[name]
            lines.append(f"{index}, GPU-{index}f, {name}, {total}, {free or unused}, {driver or version}, {capability}")
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(gpus, "cuda_of_torch", lambda: cuda)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make


def problems(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """What the doctor finds wrong."""
    assert doctor.main(["--ports", "--device", "gpu", *options]) == 1
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem")]


def settings(stack: str = "dit", device: str = "gpu", **given: str) -> dict[str, str]:
    options, _ = planned(StackOptions(models_dir=Path("models"), stack=stack, device=device, settings=given))
    return dict(options.settings)


@pytest.mark.parametrize(
    ("name", "dit", "cosyvoice3", "unet", "prompts"),
    [
        ("NVIDIA GeForce RTX 3080", 4, None, 32, "cpu"),
        ("Tesla T4", 24, 8, 96, "cpu"),
        ("NVIDIA L4", 56, 16, 96, "cpu"),  # the unet stack would fit into the plan of a larger card
        ("NVIDIA GeForce RTX 5090", 56, 16, 96, "cpu"),
        ("NVIDIA A100-SXM4-40GB", 120, 40, 96, "auto"),
        ("NVIDIA L40S", 144, 48, 96, "auto"),
        ("NVIDIA H100 80GB HBM3", 240, 96, 96, "auto"),
        ("NVIDIA H200", 240, 128, 96, "auto"),
    ],
)
def test_without_settings_the_streams_follow_from_the_card(machine, name, dit, cosyvoice3, unet, prompts) -> None:
    machine(name)
    for stack, streams in (("dit", dit), ("cosyvoice3", cosyvoice3), ("unet", unet)):
        for device in ("gpu", "auto"):
            if streams:
                assert settings(stack, device) == {"max_streams": str(streams), "prompt_device": prompts}
    assert settings(device="cpu") == {}, "the CPU renders"


def test_what_is_set_is_kept_and_memory_that_others_take_makes_the_plan_smaller(machine: Machine) -> None:
    machine("NVIDIA H100 80GB HBM3")
    assert settings(max_streams="7") == {"max_streams": "7"}
    assert settings(gpu_memory_gib="22", n_timesteps="5")["max_streams"] == "56"
    assert settings(prompt_device="cpu") == {"max_streams": "240", "prompt_device": "cpu"}
    machine("NVIDIA H100 80GB HBM3", free=40_000)
    assert settings()["max_streams"] == "120"
    machine("NVIDIA H100 80GB HBM3", "NVIDIA L4")
    assert settings()["max_streams"] == "240", "token2wav has the first GPU"
    assert settings(token2wav_gpus="0,1")["max_streams"] == "56", "the smaller one's on each"
    machine("NVIDIA L4", driver="550.54.15", cuda="12.8")
    assert settings()["max_streams"] == "56", "a driver for CUDA 12 serves a torch for CUDA 12"


def test_cuda_visible_devices_chooses_the_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("NVIDIA H200", "NVIDIA L4")
    for chosen in ("1", "GPU-1f"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert [gpu.name for gpu in gpus.visible()] == ["NVIDIA L4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.visible() == [] and settings() == {}, "a machine without a GPU renders for one that has one"


@pytest.mark.parametrize(
    ("names", "changes", "said"),
    [
        (["NVIDIA L4"], {"driver": "550.54.15"}, "driver 550.54.15 of NVIDIA L4 is too old for CUDA 13.0: install 580"),
        (["GeForce GTX 1080"], {}, "compute capability 6.1, and 7.5 is needed"),
        (["NVIDIA T400"], {}, "too small for the dit stack, which needs 7.2 GiB free: use a larger GPU"),
        (["NVIDIA L4"], {"free": 5000}, "end other programs on it (nvidia-smi lists them), use a larger"),
        (
            ["NVIDIA L4"],
            {"cuda": ""},
            "torch is a build for CPUs, which pip would keep; run: pip uninstall --yes torch",
        ),
        (["NVIDIA GB10"], {}, "no GPU is visible: install NVIDIA's driver"),
        ([], {}, "no GPU is visible: install NVIDIA's driver"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_machine_that_cannot_serve_is_told_in_one_line_what_to_do(machine, capsys, names, changes, said) -> None:
    machine(*names, **changes)
    (problem,) = problems(capsys)
    assert said in problem


def test_streams_that_never_fit_are_refused_before_a_download_with_a_number_that_does(machine, capsys, tmp_path):
    machine("NVIDIA L4")
    needed = "max_streams 64 of the dit stack needs at least 22.2 GiB, and NVIDIA L4 (22.5 GiB, 22.1 free) has less"
    for cuda in ("13.0", None):  # None: before anything is installed
        machine("NVIDIA L4", cuda=cuda)
        found = problems(capsys, "--set", "max_streams=64")
        assert f"problem  {needed}: set max_streams <= 55, or leave it out" in found
    assert settings(max_streams="64", prompt_device="cpu")["max_streams"] == "64", "token2wav's check lets it pass"
    assert render.main([str(tmp_path), str(tmp_path / "made"), "--device=gpu", "--set=max_streams=64"]) == 1
    assert needed in capsys.readouterr().err
    with pytest.raises(gpus.GpuError, match=r"leaves it 12: set max_streams <= 16,"):
        settings(max_streams="99", gpu_memory_gib="12")
    less = {"llm_memory_gib": "0", "n_timesteps": "5", "llm_gpu": "1", "token2wav_gpus": "0", "kv_cache_dtype": "int8"}
    for key, value in less.items():
        assert settings(max_streams="99", **{key: value})["max_streams"] == "99", "token2wav knows what these take"
    given = {"models_dir": tmp_path, "device": "gpu", "settings": {"max_streams": "99"}}
    elsewhere = StackOptions(**given, llm_transport="openai", llm_urls=("http://llm",))
    assert planned(elsewhere) == (elsewhere, "")


@pytest.mark.parametrize("size, stated, fits", [(99, False, True), (200, True, True), (200, False, False)])
def test_a_small_or_distilled_checkpoint_is_left_to_token2wavs_check(machine, tmp_path, size, stated, fits) -> None:
    machine("NVIDIA L4")
    options = StackOptions(models_dir=tmp_path, device="gpu", settings={"max_streams": "99"})
    options.checkpoint_dir.mkdir(parents=True)
    with (options.checkpoint_dir / "flow.pt").open("wb") as flow:
        flow.truncate(size << 20)
    if stated:
        (options.checkpoint_dir / "flow.json").write_text('{"guidance": 0}')
    with contextlib.nullcontext() if fits else pytest.raises(gpus.GpuError):
        assert planned(options) == (options, "")


def test_the_doctor_says_what_the_machine_would_serve(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine("NVIDIA L4")
    assert doctor.main(["--ports"]) == 0
    told = capsys.readouterr().out
    assert "GPU 0: NVIDIA L4 (22.5 GiB, 22.1 free), driver 580.95.05" in told
    assert "plan for 24 GB: up to 56 listeners in 20.8 GiB, new voices are read on the CPU; on NVIDIA L4" in told
    assert doctor.main(["--ports", "--set", "max_streams=2"]) == 0
    assert "max_streams=2, as given" in capsys.readouterr().out
    assert doctor.main(["--ports", "--set", "max_streams"]) == 1 and "is not KEY=VALUE" in capsys.readouterr().out
    machine("NVIDIA L4", driver="550.1")
    assert doctor.main(["--ports"]) == 0 and "no GPU is used" in capsys.readouterr().out, "auto: the CPU serves"


def test_ports_in_use_a_folder_that_cannot_be_written_and_a_full_disk_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path != tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [str(tmp_path / "models"), "--device=cpu", "--quiet", "--disk=1e9", "--ports", "0", str(port)]
        assert doctor.main(command) == 1
    folder, busy, disk = capsys.readouterr().err.splitlines()
    assert folder.startswith(f"error: {tmp_path} cannot be written to by this user")
    assert "1e+09 GB of disk are needed" in disk and f"port {port} is in use" in busy


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
def record(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a machine with two GPUs and the daemon: the folder of its programs, in which the daemon records its start and
    end."""
    machine("NVIDIA L4", "NVIDIA L4")
    (tmp_path / mps.PROGRAM).write_text(DAEMON)
    (tmp_path / mps.PROGRAM).chmod(0o755)
    monkeypatch.setenv("MPS_RECORD", str(tmp_path))
    monkeypatch.delenv(mps.PIPES, raising=False)
    return tmp_path


def rendered(record: Path, device: str = "gpu", **options: object) -> Path:
    render_stack(StackOptions(models_dir=record, device=device, llm_engine="cuda", **options), record / "repository")
    return record / "repository"


@pytest.mark.parametrize(("visible", "known"), [(None, ""), ("1", "GPU-1f")])
def test_the_daemon_runs_while_the_models_do_and_numbers_the_gpus_alike(record, visible, known, monkeypatch) -> None:
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with mps.shared_gpu(rendered(record)):
        folder = Path(os.environ[mps.PIPES])
        assert (folder / "control").exists() and (record / "started").read_text() == f"{known}\n"
        assert os.environ.get("CUDA_VISIBLE_DEVICES", "") == known
    assert (record / "ended").read_text() == "quit -t 5\n"
    assert mps.PIPES not in os.environ and not folder.exists()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_the_daemon_ends_with_a_killed_server(record: Path) -> None:
    code = "import os; from pathlib import Path; from cosyvoice_triton.server import gpus, mps\n"
    code += "gpus.cuda_of_torch = lambda: '13.0'\n"
    code += f"with mps.shared_gpu(Path({str(rendered(record))!r})): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    until((record / "ended").exists)


@pytest.mark.parametrize("state", ["runs", "has ended", "is the host's"])
def test_a_daemon_of_the_machine_is_used_unless_only_its_pipe_is_left(record, state, monkeypatch, caplog) -> None:
    program, pipes = record / mps.PROGRAM, record / "pipes"
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
    program, why = record / mps.PROGRAM, "is not installed"
    if lacking == "program":
        program.unlink()
    else:
        why = "Only the compute mode Default is supported"
        program.write_text(DAEMON.replace(": break", f'echo "{why}" >"$log"; exit 1'))
    with mps.shared_gpu(rendered(record)):
        assert mps.PIPES not in os.environ
    (warning,) = caplog.messages
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
