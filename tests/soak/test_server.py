"""A short soak of the real servers, with faults: what `make soak` does."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.soak import __main__ as soak
from tests.support.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.serial]

FAULT = "kill token2wav_dit"


def test_a_short_soak_accounts_for_every_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "soak"
    code = soak.main(["--minutes", "0.2", "--seed", "1", "--output", str(output), "--faults", FAULT])
    report = json.loads((tmp_path / "soak.json").read_text())
    out, err = capsys.readouterr()
    assert report["problems"] == [] and code == 0, out
    assert "\r" not in err and re.search(r"^\d+ of 12 s: \d+ requests, ", err, re.MULTILINE)  # lines for a log
    assert out.splitlines()[-1].startswith("soak passed: 0 problems; ")
    assert report["faults"][0]["name"] == f"1. {FAULT}"
    assert "failed" in {request["outcome"] for request in report["requests"]}
    assert {process["name"] for process in report["processes"]} >= {"serve", "speech", "tritonserver", "cosyvoice2"}
    assert "the process of model token2wav_dit has died" in (tmp_path / "soak.md").read_text()


def test_servers_that_are_still_starting_end_with_the_soak(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak", "--output", str(tmp_path / "soak")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: len(servers(tmp_path)) >= 2, every=0.1)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and "its servers have ended" in said
    assert servers(tmp_path) == []


def servers(directory: Path) -> list[str]:
    """The processes with a path in the directory, without the soak itself."""
    found = subprocess.run(["pgrep", "--list-full", "--full", str(directory)], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "tests.soak" not in line]
