"""The staged scripts: what each stage calls, and with LOCAL=1 the server that the stages of one of them start."""

import importlib
import json
import shlex
import socket
import subprocess
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from cosyvoice_triton import samples
from cosyvoice_triton.server.tritonserver import free_port

from tests.conftest import ROOT
from tests.support.programs import ran
from tests.support.serve_process import with_model

pytestmark = pytest.mark.server

UNET, DIT = "scripts/run.sh", "scripts/run_stepaudio2_dit_token2wav.sh"
COSYVOICE3 = "scripts/run_cosyvoice3.sh"
PORTS = ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT", "HEALTH_PORT", "LLM_PORT")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short samples."""
    path = tmp_path_factory.mktemp("data") / "two.jsonl"
    voice = {"prompt_audio": str(samples.FOLDER / "reference_zh.wav"), "prompt_text": "甚至出现交易几乎停滞的情况"}
    path.write_text("".join(json.dumps(voice | {"id": name, "target_text": name}) + "\n" for name in ("one", "two")))
    return path


def run(script: str, *arguments: str, manifest: Path, work: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a script with free ports; check that it wrote below `work` alone and left no server running."""
    data = f"--manifest-path {manifest}"
    environment = {"LOCAL": "1", "MODELS": "", "OFFLINE_DATA": data, "WORK": str(work)}
    environment |= {"DATA": f"{data} --num-requests 2"}  # the default is twenty and more
    environment |= {name: str(free_port()) for name in PORTS}
    done = ran("bash", script, *arguments, code=code, **environment)
    assert {path.name for path in work.iterdir()} <= {"build", "out", "models"}, "stages write below WORK"
    for name in PORTS:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(environment[name]))) != 0, f"{name} is still served"
    return done


def stages_of(printed: str) -> list[int]:
    return [int(line.split()[2].rstrip(":")) for line in printed.splitlines() if line.startswith("=== stage")]


@pytest.mark.timeout(600)
def test_the_stages_give_a_server_and_ask_it(manifest: Path, tmp_path: Path) -> None:
    done = run(DIT, "-1", "4", manifest=manifest, work=tmp_path)
    assert stages_of(done.stdout) == [-1, 0, 1, 2, 3, 4] and "finish reason" in done.stdout
    assert "ok       free ports: " in done.stdout
    assert "requests answered, 0 failed" in done.stdout
    assert (tmp_path / "out/dit/grpc_streaming_2_tasks/summary.json").exists()
    assert (tmp_path / "out/logs/triton.log").stat().st_size > 0


def test_a_server_that_does_not_start_is_reported_with_its_log(manifest: Path, tmp_path: Path) -> None:
    with_model(tmp_path / "build/unet", code="raise ValueError('flow.pt is missing')")
    done = run(UNET, "3", "5", manifest=manifest, work=tmp_path, code=1)
    assert f"triton did not become ready; its log: {tmp_path}/out/logs/triton.log" in done.stderr
    assert "flow.pt is missing" in done.stderr and "stage 3 failed with code 1" in done.stderr
    assert stages_of(done.stdout) == [3]


@pytest.mark.parametrize("script", [UNET, DIT, COSYVOICE3])
def test_the_scripts_have_a_help_text_and_refuse_what_they_cannot_do(script: str, manifest: Path) -> None:
    shown = ran("bash", script, "--help").stdout
    assert "LOCAL=1 bash" in shown and "Settings" in shown and "shellcheck" not in shown
    if script != COSYVOICE3:
        from_the_root = ran("bash", ROOT / Path(script).name, "--help").stdout
        assert from_the_root == shown, "upstream's documents call it in the current directory"
    for arguments in (["3", "2"], ["0", "10"], ["x", "1"], []):
        assert "START and STOP are stages" in ran("bash", script, *arguments, code=2).stderr
    refused = ran("bash", script, "2", "2", code=1, WORK=str(manifest))  # a file
    assert f"stages write to WORK, which is {manifest}" in refused.stderr
    if script == UNET:
        assert "not 'both'" in ran("bash", script, "4", "4", "both", code=2, LOCAL="1").stderr


MODULES = {"offline": "cli.offline_inference", "streaming": "cli.streaming_inference", "bench": "bench.load"}


def parsed(program: str, *arguments: str) -> Namespace:
    """What one of our programs reads of its arguments."""
    name = MODULES.get(program, f"cli.{program.replace('-', '_')}")
    module = importlib.import_module(f"cosyvoice_triton.{name}")
    words = arguments[1:] if program == "bench" else arguments
    return (module.parse_args if hasattr(module, "parse_args") else module.build_parser().parse_args)([*words])


Called = dict[str, list[Namespace]]
# In the place of Python: it records its arguments, and waits for a server until that has recorded its own.
RECORDER = """#!/bin/bash
echo "${@@Q}" >>"$CALLS"
[[ ${3:-} != wait ]] || tail --pid="$5" --sleep-interval=0.01 --follow /dev/null
"""


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Called]:
    """What the stages of a script call, read by the parsers of these programs. None of them runs."""
    recorder, calls = tmp_path / "python", tmp_path / "calls"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    for name in ("LOCAL", "MODELS", "DATA"):
        monkeypatch.delenv(name, raising=False)

    def record(script: str, first: int, last: int, *mode: str, **settings: str) -> Called:
        calls.write_text("")
        environment = {"PYTHON": str(recorder), "CALLS": str(calls), "WORK": str(tmp_path / "work"), **settings}
        done = ran("bash", script, first, last, *mode, **environment)
        assert stages_of(done.stdout) == list(range(first, last + 1))
        found: Called = {}
        for line in calls.read_text().splitlines():
            match shlex.split(line):
                case ["-m", "cosyvoice_triton", program, *arguments] if program != "wait":
                    found.setdefault(program, []).append(parsed(program, *arguments))
        return found

    return record


@pytest.mark.parametrize(
    ("script", "last", "mode", "programs"),
    [
        (UNET, 7, ("offline",), {"client-http", "client-grpc", "offline"}),
        (UNET, 7, (), {"client-grpc", "offline"}),
        (DIT, 9, (), {"client-grpc", "offline", "token2wav", "streaming", "bench"}),
        (COSYVOICE3, 5, (), {"client-grpc", "offline"}),
    ],
)
def test_without_a_gpu_every_stage_has_a_command(called, script, last, mode, programs) -> None:
    found = called(script, -1, last, *mode, LOCAL="1", ENABLE_TRT="1")
    assert found.keys() - programs == {"prepare", "test-llm", "render", "serve"}
    (rendered,), (benchmark,) = found["render"], found["client-grpc"]
    assert (rendered.device, rendered.decoupled) == ("cpu", not mode)
    assert benchmark.mode == (mode or ("streaming",))[0]
    plans = [each.capability for each in found["prepare"] if each.step == "plans"]
    assert plans == ([] if script == COSYVOICE3 else [["8.9"]])
    assert ("flow_runtime=tensorrt" in str(rendered.settings)) == bool(plans)
    if script == DIT:
        assert [len(each.servers) for each in found["bench"]] == [1, 2]
        assert len({each.grpc_port for each in found["serve"]}) == 3, "two token2wav servers after the one of stage 3"


@pytest.mark.parametrize("upstream", [False, True], ids=["cuda", "trtllm"])
def test_the_stages_for_a_gpu_serve_with_our_engine_unless_upstreams_is_named(called, tmp_path, upstream) -> None:
    ways = {UNET: "trtllm-backend", DIT: "trtllm-serve", COSYVOICE3: "trtllm-serve"}
    settings = {"HUB": "modelscope", "USE_SPK2INFO_CACHE": "1"}
    each = {script: called(script, 0, 2, **settings, **({"LLM": ways[script]} if upstream else {})) for script in ways}
    prepared = [one for found in each.values() for one in found["prepare"]]
    downloads = [one for one in prepared if one.step == "download"]
    assert [(one.stack, one.spk2info) for one in downloads] == [("unet", True), ("dit", False), ("cosyvoice3", False)]
    assert {one.hub for one in downloads} == {"modelscope"}
    assert {one.models for one in prepared} == {tmp_path / "work" / "models" / "official"}
    asked = [called(script, stage, stage, **settings)["client-grpc"][0] for script, stage in ((UNET, 5), (DIT, 4))]
    assert [one.use_spk2info_cache for one in asked] == [True, False]
    rendered, tried = ([one for found in each.values() for one in found[name]] for name in ("render", "test-llm"))
    built = [one.kind for one in prepared if one.step == "engine"]
    chosen = [(one.llm_backend, one.llm_transport, one.llm_engine) for one in rendered]
    if upstream:
        assert chosen == [("tensorrtllm", "triton", "auto")] + [("python", "openai", "auto")] * 2
        assert built == ["tensorrt_llm"] * 3
        assert {one.engine_dir.name for one in tried} == {"trt_engines_bfloat16", "cosyvoice3_trt_engines_bfloat16"}
    else:
        assert chosen == [("python", "triton", "cuda")] * 3 and not built
        assert {(one.engine, one.engine_dir) for one in tried} == {("cuda", one.tokenizer_dir) for one in tried}
