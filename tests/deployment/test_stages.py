"""Both staged scripts with LOCAL=1: every stage, with the demo checkpoint and the servers that the stages start."""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from common.server.tritonserver import free_port
from tests.conftest import ROOT

pytestmark = pytest.mark.server

UNET, DIT = "scripts/run.sh", "scripts/run_stepaudio2_dit_token2wav.sh"
PORTS = ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT", "HEALTH_PORT", "LLM_PORT")
TOKEN2WAV = ("TOKEN2WAV_HTTP_PORT", "TOKEN2WAV_GRPC_PORT", "TOKEN2WAV_METRICS_PORT", "TOKEN2WAV_HEALTH_PORT")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short samples."""
    path = tmp_path_factory.mktemp("data") / "two.jsonl"
    voice = {"prompt_audio": str(ROOT / "tests/assets/reference_zh.wav"), "prompt_text": "甚至出现交易几乎停滞的情况"}
    path.write_text("".join(json.dumps(voice | {"id": name, "target_text": name}) + "\n" for name in ("one", "two")))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory where the first stages put the demo checkpoint; empty before."""
    return tmp_path_factory.mktemp("models") / "demo"


def run(
    script: str, *arguments: str, models: Path, manifest: Path, work: Path, limit: float = 500, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with free ports and its files in `work`; check that it left no server running."""
    data = f"--manifest-path {manifest}"
    environment = os.environ | {"LOCAL": "1", "MODELS": str(models), "OFFLINE_DATA": data}
    environment |= {"DATA": f"{data} --num-requests 2"}  # the default is twenty and more
    environment |= {"REPOSITORY": str(work / "repository"), "OUT": str(work / "out"), "LOGS": str(work / "logs")}
    environment |= {name: str(free_port()) for name in PORTS}
    environment |= dict(zip(TOKEN2WAV, (str(port_pair()) for _ in TOKEN2WAV), strict=True)) | settings
    command = ["bash", script, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", timeout=limit
    )
    for name in (*PORTS, *TOKEN2WAV):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(environment[name]))) != 0, f"{name} is still served"
    return done


def port_pair() -> int:
    """A free port whose next higher port is free as well."""
    port, above = free_port(), free_port()
    while above != port + 1:
        port, above = above, free_port()
    return port


def stages_of(printed: str) -> list[int]:
    return [int(line.split()[2].rstrip(":")) for line in printed.splitlines() if line.startswith("=== stage")]


@pytest.mark.timeout(600)
def test_every_stage_of_the_unet_stack(models: Path, manifest: Path, tmp_path: Path) -> None:
    done = run(UNET, "-1", "6", "offline", models=models, manifest=manifest, work=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert stages_of(done.stdout) == [-1, 0, 1, 2, 3, 4, 5, 6]
    assert (tmp_path / "out/http.wav").stat().st_size > 1000
    assert (tmp_path / "out/grpc_offline_2_tasks/summary.json").exists()
    for backend in ("hf", "onnxruntime_genai"):
        assert len(list((tmp_path / f"out/offline_{backend}").glob("*.wav"))) == 2


@pytest.mark.timeout(600)
def test_every_stage_of_the_dit_stack_disaggregated_serving_included(
    models: Path, manifest: Path, tmp_path: Path
) -> None:
    done = run(DIT, "-1", "8", models=models, manifest=manifest, work=tmp_path, TASKS_PER_INSTANCE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert stages_of(done.stdout) == [-1, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    out = tmp_path / "out"
    assert (out / "grpc_streaming_2_tasks/summary.json").exists()
    assert len(list((out / "offline").glob("*.wav"))) == len(list((out / "token2wav").glob("*.wav"))) == 2
    assert {path.name for path in out.glob("streaming_*/*.json")} == {
        "streaming-equal.json",
        "streaming-exponential.json",
    }
    assert {path.stem for path in out.glob("disaggregated_*.json")} == {
        "disaggregated_1_gpus",
        "disaggregated_2_gpus",
    }
    for server in ("llm", "triton", "token2wav-0", "token2wav-1"):
        assert (tmp_path / "logs" / f"{server}.log").stat().st_size > 0


def test_a_server_that_does_not_start_is_reported_with_its_log(models: Path, manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "repository/broken/1").mkdir(parents=True)
    (tmp_path / "repository/broken/config.pbtxt").write_text('name: "broken" backend: "python"')
    (tmp_path / "repository/broken/1/model.py").write_text("raise ValueError('flow.pt is missing')")
    done = run(UNET, "3", "5", models=models, manifest=manifest, work=tmp_path)
    assert done.returncode == 1
    assert f"triton did not become ready; its log: {tmp_path}/logs/triton.log" in done.stderr
    assert "flow.pt is missing" in done.stderr and "stage 3 failed with code 1" in done.stderr
    assert stages_of(done.stdout) == [3]


@pytest.mark.parametrize("script", [UNET, DIT])
def test_the_scripts_have_a_help_text_and_refuse_invalid_stages(script: str) -> None:
    shown = subprocess.run(["bash", script, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0 and "LOCAL=1 bash" in shown.stdout and "Settings" in shown.stdout
    for arguments in (["3", "2"], ["0", "9"], ["x", "1"], []):
        refused = subprocess.run(["bash", script, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert refused.returncode == 2 and "START and STOP are stages" in refused.stderr


def test_http_is_skipped_when_the_stack_streams(models: Path, manifest: Path, tmp_path: Path) -> None:
    done = run(UNET, "4", "4", "streaming", models=models, manifest=manifest, work=tmp_path)
    assert done.returncode == 0 and "skipped" in done.stdout
    refused = run(UNET, "4", "4", "both", models=models, manifest=manifest, work=tmp_path)
    assert refused.returncode == 2 and "not 'both'" in refused.stderr
