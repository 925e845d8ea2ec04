"""Commands that run no network start without the libraries for networks."""

import re
import sys
from pathlib import Path

import pytest
from cosyvoice_triton import cli, samples
from cosyvoice_triton.arguments import program
from cosyvoice_triton.cli import demo

from tests.support.programs import ran

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

    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", capsys.readouterr().out)
    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main(["say", "Hello."]) == 130
    assert capsys.readouterr().err == "interrupted\n"
