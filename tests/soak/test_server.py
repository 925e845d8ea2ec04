"""A short soak of the real servers, with faults: what `make soak` does."""

import json
import re
from pathlib import Path

import pytest
from cosyvoice_triton.monitoring.faults import GPU_ERROR

from tests.soak import __main__ as soak

pytestmark = [pytest.mark.server, pytest.mark.serial]

FAULT = "file gpu_error"


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
    assert f"has failed and cannot recover: {GPU_ERROR}" in (tmp_path / "soak.md").read_text()
