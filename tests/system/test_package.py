"""The installed package: one import name, its data, one command, the demo outside of a checkout, locked versions;
commands that run no network start without the libraries for networks; the files that are started without the console
command: upstream's names in scripts/, and what `make` runs first."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from zipfile import ZipFile

import pytest
import soundfile
from cosyvoice_triton import cli, samples
from cosyvoice_triton.arguments import program
from cosyvoice_triton.cli import COMMANDS, demo, main
from cosyvoice_triton.constants import SAMPLE_RATE
from packaging.requirements import Requirement

from tests.conftest import ROOT
from tests.support.programs import ran

PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
SOURCES = (
    "common",
    "model_repo",
    "model_repo_dit",
    "model_repo_cosyvoice3",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "NOTICE",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tracked files."""
    clone = tmp_path_factory.mktemp("clone")
    tracked = subprocess.run(["git", "ls-files", "-z", *SOURCES], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        if os.path.lexists(ROOT / name):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name, follow_symlinks=False)
    built = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(built), "."]
    subprocess.run(pip, cwd=clone, check=True, capture_output=True)
    (path,) = built.iterdir()
    return path


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The console command of an environment with the wheel and this one's other packages, but no checkout."""
    environment = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    # A path in a .pth file is searched, but the .pth files in that folder, such as ours of the checkout, are not read.
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    return environment / "bin" / "cosyvoice-triton"


def test_the_wheel_has_one_package_with_templates_voice_page_and_samples(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"cosyvoice_triton"}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    for folder in ("model_repo", "model_repo_dit", "model_repo_cosyvoice3"):
        tracked = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob("*/**/*") if path.is_file()}
        tracked = {name for name in tracked if "__pycache__" not in name}
        assert {f"cosyvoice_triton/templates/{name}" for name in tracked} <= set(names)
    data = """demo_checkpoint/trained/voices/kumo.wav samples/manifest.jsonl samples/reference_en.wav
        speech_service/page/index.html server/input_shapes.c server/sweep.sh
        speech_service/routes/cosyvoice.proto"""
    assert {f"cosyvoice_triton/{name}" for name in data.split()} <= set(names)


@pytest.mark.server
def test_the_demo_runs_in_an_empty_folder(command: Path, tmp_path: Path) -> None:
    code = "import cosyvoice_triton as package; print(package.__file__)"
    found = ran(command.with_name("python"), "-c", code, cwd=tmp_path, PYTHONPATH="").stdout
    assert Path(found.strip()).is_relative_to(command.parents[1])
    listed = ran(command, "--help", cwd=tmp_path, PYTHONPATH="").stdout
    assert all(f"  {name} " in listed for name in ENTRIES)
    printed = ran(command, "demo", "--set", "max_streams=4", *PORTS, cwd=tmp_path, PYTHONPATH="").stdout
    promises = "first chunk", "total time", "audio length", demo.TEXT, "serve --set max_streams=4 --speech-port"
    assert all(promised in printed for promised in promises)
    info = soundfile.info(tmp_path / "out" / "demo.wav")
    assert (info.samplerate, info.channels, info.subtype) == (SAMPLE_RATE, 1, "PCM_16") and info.duration > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build", "models", "out"]


QUICK_START = re.search(
    r"```python\n(from cosyvoice_triton import Speaker\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
)
# What the extra `local` does not bring.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys('tritonclient pytriton grpc fastapi matplotlib'.split()))\n"


def test_readmes_library_speaks_from_the_wheel_without_a_server(command: Path, tmp_path: Path) -> None:
    assert QUICK_START is not None
    printed = ran(command.with_name("python"), "-c", WITHOUT + QUICK_START[1], cwd=tmp_path, PYTHONPATH="").stdout
    assert len(printed.split()) > 1 and all(int(samples) > 0 for samples in printed.split())


ENTRIES = {name: entry for group in COMMANDS.values() for name, entry in group.items()}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_subcommand_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ENTRIES[name].actions or ("",):
        words = [name, *([action] if action else [])]
        try:
            assert main([*words, "--help"]) == 0
        except SystemExit as end:
            assert not end.code
        assert f"usage: cosyvoice-triton {' '.join(words)} " in capsys.readouterr().out


def test_unknown_commands_and_none_are_answered_with_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and "usage: cosyvoice-triton COMMAND" in capsys.readouterr().err
    assert main(["bench"]) == 2 and "usage: cosyvoice-triton bench COMMAND" in capsys.readouterr().err
    assert main(["bench", "lode"]) == 2
    assert capsys.readouterr().err == "error: unknown command 'lode'; `cosyvoice-triton bench --help` lists them\n"


HEAVY = {"torch", "scipy", "transformers"}


# Each does what its command does without a server: it imports everything, reads a voice or a recording, writes audio.
LIGHT = {
    "say, client-grpc, client-http": """
from cosyvoice_triton.cli import client_grpc, client_http, say
from cosyvoice_triton.client.answer import SpeechResult
from cosyvoice_triton.client.utterance import read_reference
SpeechResult(read_reference(Path(RECORDING)).wav, (0.1,), 0.2).save(Path("hello.wav"))
""",
    "voice": """
from cosyvoice_triton.cli import voice
shutil.copy(RECORDING, "voices/anna.wav")
assert voice.main(["list", "."]) == voice.main(["delete", ".", "anna"]) == 0
""",
    "serve, demo, prepare": """
from cosyvoice_triton.cli import demo, prepare, serve
""",
    "wait, bench load": """
from cosyvoice_triton.cli import wait_ready
from cosyvoice_triton.bench import load as benchmark
""",
    "speech": """
from cosyvoice_triton.speech_service import service
from cosyvoice_triton.voice.book import VoiceBook
shutil.copy(RECORDING, "voices/anna.wav")
assert VoiceBook("voices", "voices", str).get().seconds > 5
""",
}


@pytest.mark.parametrize("command", LIGHT)
def test_commands_without_networks_of_their_own_do_not_import_the_libraries_for_them(command, tmp_path) -> None:
    (tmp_path / "voices").mkdir()
    begin = f"import shutil, sys\nfrom pathlib import Path\nRECORDING = {str(samples.FOLDER / 'reference_en.wav')!r}\n"
    code = f"{begin}{LIGHT[command]}\nprint(*sys.modules)"
    assert not HEAVY & set(ran(sys.executable, "-c", code, cwd=tmp_path).stdout.split())


def test_the_command_is_named_as_the_callers_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "venv" / "bin" / "cosyvoice-triton"
    command.parent.mkdir(parents=True)
    command.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(command.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert program() == "venv/bin/cosyvoice-triton"
    monkeypatch.setenv("PATH", str(command.parent))
    assert program() == "cosyvoice-triton"


def test_a_library_that_is_not_installed_is_named_with_the_command_that_installs_it() -> None:
    code = (
        "import sys; sys.modules['tritonclient'] = None\nfrom cosyvoice_triton.cli import main; sys.exit(main(['say']))"
    )
    told = ran(sys.executable, "-c", code, code=1).stderr
    assert re.fullmatch(r"error: .*tritonclient.*; run: pip install '.*client.*'\n", told)


def test_a_trial_says_what_is_missing_or_cannot_be_written_before_it_loads_anything(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert demo.main(["--output", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert str(tmp_path) in told.err and told.out == "" and list(tmp_path.iterdir()) == []
    assert demo.main(["--models", "mine", "--stack", "cosyvoice3", "--set", "max_streams=2"]) == 1
    assert "prepare download mine --stack cosyvoice3" in capsys.readouterr().err
    assert not (tmp_path / "models").exists() and not (tmp_path / "build").exists()


def test_the_first_second_can_be_interrupted_and_the_version_is_printed(monkeypatch, capsys) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    assert main(["--version"]) == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", capsys.readouterr().out)
    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert main(["say", "Hello."]) == 130
    assert capsys.readouterr().err == "interrupted\n"


LOCKED = {"constraints": ("client", "http", "local", "server", "dev")}  # `make lock` writes it
for image in ("cpu", "gpu", "trtllm"):
    (extras,) = re.findall(rf"--constraint {image}.txt .*'\.\[(.+)\]'", (ROOT / "Dockerfile.server").read_text())
    LOCKED[f"deploy/constraints/{image}"] = tuple(extras.split(","))
PYTHONS = {"deploy/constraints/trtllm": ["3.12"], "constraints": ["3.10", "3.11", "3.12"]}


@pytest.mark.parametrize("file, python", [(file, python) for file in LOCKED for python in PYTHONS.get(file, ["3.11"])])
def test_the_locked_versions_are_those_of_the_project(file: str, python: str) -> None:
    tomllib = pytest.importorskip("tomllib", reason="since Python 3.11")
    machine = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": "x86_64"}
    machine |= {"sys_platform": "linux", "extra": ""}

    def pins(lines: Iterable[str]) -> dict[str, str]:
        found = [Requirement(line) for line in lines if line and line[0] not in "# "]
        here = [one for one in found if one.marker is None or one.marker.evaluate(machine)]
        return {one.name: str(one.specifier) for one in here if "==" in str(one.specifier)}

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sections = (project["dependencies"], *(project["optional-dependencies"][extra] for extra in LOCKED[file]))
    wanted, locked = pins(chain(*sections)), pins((ROOT / f"{file}.txt").read_text().splitlines())
    assert len(wanted) > 20 and wanted.items() - locked.items() == set()


LAUNCHERS = sorted(path for path in (ROOT / "scripts").glob("*.py") if path.stem != "doctor")


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda path: path.stem)
def test_every_launcher_is_a_command_and_runs_as_a_file_from_any_directory(launcher: Path, tmp_path: Path) -> None:
    entries = [entry for group in COMMANDS.values() for entry in group.items()]
    commands = [each for name, entry in entries for each in ((name, entry), *entry.actions.items())]
    module = f"cosyvoice_triton.cli.{launcher.stem}"
    assert any(module.endswith(f".{name.replace('-', '_')}") or entry.module == module for name, entry in commands)
    assert launcher.read_text().endswith(f"\n\nfrom {module} import main\n\nraise SystemExit(main())\n")
    if launcher.stem == "client_grpc":
        assert "usage:" in ran(sys.executable, launcher, "--help", cwd=tmp_path, PYTHONPATH="").stdout


def test_the_doctor_of_a_bare_clone_needs_no_packages_and_checks_settings_as_rendering_does(tmp_path: Path) -> None:
    """-S: without site-packages, as the system's own Python before `make setup`."""
    for given, code, found in (
        ((), 0, "which can install tritonserver"),
        (("--set", "max_streams=many"), 1, "parameter 'max_streams' must be an integer, not 'many'"),
        (("--set", "max_stream=4"), 1, "unknown setting 'max_stream'; the models of this stack have batching_strategy"),
    ):
        command = [sys.executable, "-S", ROOT / "scripts" / "doctor.py", "--device", "cpu", "--ports", *given]
        finished = ran(*command, code=code, cwd=tmp_path)
        assert finished.stderr == "" and found in finished.stdout


def test_a_python_that_tritonserver_does_not_have_is_told_why_and_what_to_install(tmp_path: Path) -> None:
    script = (ROOT / "scripts" / "doctor.py").read_text()
    for version in ((3, 9, 18), (3, 13, 0)):
        told = f"import sys; sys.version_info = {version}; exec(compile({script!r}, 'doctor.py', 'exec'))"
        said = ran(sys.executable, "-c", told, code=1).stderr
        assert said.startswith("error: Python 3.10, 3.11 or 3.12 is needed") and said.count("\n") == 1
        assert "make demo PYTHON=$(build/uv/bin/uv python find 3.12)" in said


def test_make_serve_looks_at_its_ports_before_it_installs_or_renders() -> None:
    """With the system's own Python, as before `make setup`. Port 0 is always free."""
    ports = {name: "0" for name in ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT", "HEALTH_PORT")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = [f"{name}={value}" for name, value in (ports | {"SPEECH_PORT": str(port)}).items()]
        refused = ran("make", "serve", f"PYTHON={sys.executable} -S", "MODELS=nowhere", *given, code=2)
    assert f"port {port} is in use" in refused.stderr
    assert "render" not in refused.stdout and "nowhere" not in refused.stderr


def planned(*words: str) -> str:
    """What make would run."""
    return ran("make", "-n", *words).stdout


def test_make_passes_settings_and_paths_with_blanks_on_and_refuses_an_unknown_device() -> None:
    shown = planned("render", "SET=max_streams=4 first_hop_tokens=10")
    assert "--set max_streams=4 --set first_hop_tokens=10" in shown
    assert "models" not in planned("clean"), "which keeps them and the voices that were added"
    for target in ("render", "serve", "demo", "bench", "parity"):
        shown = planned(target, "MODELS=my models", "OUTPUT=out dir/a.wav", "FOLDER=a b")
        words = shlex.split([line for line in shown.replace("\\\n", " ").splitlines() if line.strip()][-1])
        assert {"my models", "out dir/a.wav", "a b"} & set(words), (target, words)
    assert "DEVICE is cpu or gpu, not 'cuda'" in ran("make", "-n", "serve", "DEVICE=cuda", code=2).stderr


def test_make_serve_on_a_gpu_checks_the_machine_installs_its_extra_downloads_and_serves() -> None:
    shown = planned("serve", "DEVICE=gpu", "STACK=unet", "SET=max_streams=8")
    steps = ("doctor.py", "uninstall --quiet --yes torch", "[client,http,gpu]", "prepare download", "serve --models")
    assert sorted(map(shown.index, steps)) == [*map(shown.index, steps)]
    for step in (steps[0], *steps[3:]):
        (line,) = re.findall(rf".*{step}.*", shown)
        assert "models/official" in line and "--stack unet" in line, step
        assert ("--set max_streams=8" in line) == (step != "prepare download")
