"""Images and compose files, as far as they can be checked without running them: syntax and references."""

import os
import re
import shlex
import sys
from argparse import Namespace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from cosyvoice_triton import cli
from cosyvoice_triton.cli import doctor, prepare, render
from cosyvoice_triton.cli.render import stack_options
from cosyvoice_triton.prepare import steps
from cosyvoice_triton.server.options import StackOptions
from cosyvoice_triton.server.tritonserver import LOAD_SECONDS

from tests.conftest import ROOT
from tests.support.programs import MISSING, compose_command, ran

COMPOSE = ("docker-compose.yml", "docker-compose.dit.yml")
COSYVOICE3 = "docker-compose.cosyvoice3.yml"  # its LLM is always inside Triton
FILES = (*COMPOSE, COSYVOICE3)
CPU = "deploy/compose/cpu.yml"
LLMS = ("cuda", "vllm", "trtllm-serve", "trtllm-backend", "elsewhere")
SOURCES = [ROOT / file for file in (*FILES, CPU, "deploy/compose/services.yml", "deploy/compose/llm.yml")]
PROFILES = ("", "disaggregated,runtime,monitoring,tensorrt")
TOOLS = Path(sys.executable).parent
SHELL = [ROOT / ".ci/run"]
SHELL += sorted(path for of in ("scripts", "deploy", "common") for path in ROOT.glob(f"{of}/**/*.sh"))


@cache
def composed(*files: str, profiles: str = "", **settings: str) -> dict[str, Any]:
    """Compose files as resolved by Compose, with the services of these profiles; not to be changed. Without Compose the
    test is skipped."""
    if (compose := compose_command()) is None:
        pytest.skip(MISSING)
    command = [*compose, *(f"--file={file}" for file in files), "config"]
    return dict(yaml.safe_load(ran(*command, COMPOSE_PROFILES=profiles, **settings).stdout))


def checked_and_downloaded(service: dict[str, Any]) -> tuple[StackOptions, Namespace]:
    """What a download's container checks the machine for, and the arguments of its `cosyvoice-triton prepare`."""
    check, download = script_of(service).split(" && exec cosyvoice-triton prepare ")
    return examined(check, "cosyvoice-triton doctor"), prepare.build_parser().parse_args(download.split())


def script_of(service: dict[str, Any]) -> str:
    """What its shell runs, with the values of its environment."""
    return re.sub(r"\$\$(\w+)", lambda name: service["environment"][name[1]], service["command"][2])


def examined(check: str, program: str) -> StackOptions:
    """What a call of the doctor checks the machine for."""
    assert check.startswith(f"{program} ")
    options = doctor.build_parser().parse_args(check.removeprefix(program).split())
    return stack_options(options.models, options)


def gpu_of(service: dict[str, Any]) -> str:
    return str(service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"][0])


def started(services: dict[str, Any]) -> set[str]:
    """Those with replicas."""
    return {name for name, one in services.items() if one.get("deploy", {}).get("replicas") != 0}


def test_dockerignore_includes_every_path_that_the_dockerfile_copies() -> None:
    """.dockerignore lists the paths of the build context; a COPY of another path fails."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile.server").read_text(), re.MULTILINE):
        for path in line.split():
            path = path.rstrip("*")  # wheels/ is there for builds without a network only
            assert path == "wheels" or (ROOT / path).exists(), path
            assert any(path == name or path.startswith(f"{name}/") or name.startswith(f"{path}/") for name in allowed)


@pytest.mark.parametrize("file", [*ROOT.glob(".github/workflows/*.yml")], ids=lambda path: path.stem)
def test_workflows_name_what_is_here_and_pin_what_is_not(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text())
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] and set(job.get("needs", "").split()) <= set(workflow["jobs"])
        assert all(map(stage, job.get("strategy", {}).get("matrix", {}).get("target", ())))
        for step in job["steps"]:
            run, options = step.get("run", ""), step.get("with", {})
            assert run or re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]), step
            assert set(re.findall(r"\bmake ([\w-]+)", run)) <= set(targets)
            named = re.findall(r"[\w./-]+\.(?:md|toml|txt|py|sh)\b", run)
            for path in [*named, *options.get("cache-dependency-path", "").split(), options.get("file", "LICENSE")]:
                assert (ROOT / path).is_file(), path
            if "build-args" in options:
                assert f"ARG {options['build-args'].partition('=')[0]}" in stage("cpu")


def test_workflows_run_every_python_that_the_package_allows_and_publish_the_tag_of_its_version() -> None:
    tests, release = (
        yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text()) for name in ("tests", "release")
    )
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10,<3.13"\n' in project
    assert tests["jobs"]["quick"]["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12"]
    (version,) = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    (check,) = (step["run"] for step in release["jobs"]["wheel"]["steps"] if "pyproject.toml" in step.get("run", ""))
    for tag, code in ((f"v{version}", 0), (f"v{version}.1", 1), (f"{version[:-1]}x", 1)):
        ran("bash", "-c", check, code=code, GITHUB_REF_NAME=tag)
    assert f"## {version}\n" in (ROOT / "CHANGELOG.md").read_text()


def stage(target: str) -> str:
    """The part of the Dockerfile that builds a target."""
    return (ROOT / "Dockerfile.server").read_text().split(f" AS {target}\n")[1].split("\nFROM ")[0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="importlib.metadata knows the owners of few packages")
def test_the_python_with_tensorrt_llm_gets_what_our_programs_import_there() -> None:
    """Those of stage 1, without the other packages that our project names."""
    (line,) = re.findall(r"-m pip install --break-system-packages (\w.+)", (ROOT / "Dockerfile.server").read_text())
    installed = {"cosyvoice-triton", *(re.split(r"[=<>]", package)[0] for package in line.split())}
    named = set(re.findall(r'^    "([\w-]+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)) - installed
    absent = [module for module, owners in metadata.packages_distributions().items() if named & {*owners}]
    assert {"soundfile", "tritonclient"} <= {*absent}
    code = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
    for module in ("cli.test_llm", "cli.convert_checkpoint"):
        code += f"import cosyvoice_triton.{module}\n"
    ran(sys.executable, "-c", code)


def test_the_dockerfile_passes_hadolint_and_shell_scripts_pass_shellcheck() -> None:
    ran(TOOLS / "hadolint", "Dockerfile.server")
    ran(TOOLS / "shellcheck", "--external-sources", *SHELL)


@pytest.mark.parametrize("file", FILES)
def test_compose_files_are_valid_and_complete(file: str) -> None:
    for profiles in PROFILES:
        services = composed(file, profiles=profiles)["services"]
        for name in started(services):
            assert (services[name].get("restart") == "unless-stopped") == (name not in ("download", "engine", "plans"))
        for name, one in services.items():
            assert one["logging"] == {"driver": "json-file", "options": {"max-size": "20m", "max-file": "5"}}, name
            if one["image"].startswith("cosyvoice-triton"):  # it may change nothing but its volumes
                assert one["read_only"] and one["cap_drop"] == ["ALL"] and one["security_opt"], name
            for volume in one.get("volumes", []):
                assert volume["type"] != "bind" or Path(volume["source"]).exists(), volume
        tts = services["tts"]
        assert tts["shm_size"] and tts["stop_grace_period"] == "1m30s"
        assert gpu_of(tts) == "0"
        for kernels in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):  # which later starts find compiled
            assert any(tts["environment"][kernels].startswith(f"{volume['target']}/") for volume in tts["volumes"])
        gateway = {port["target"]: port.get("host_ip") for port in services["gateway"]["ports"]}
        assert gateway == {8000: None, 8001: "127.0.0.1", 10086: None}
        own = {port["target"]: port["host_ip"] for port in tts["ports"]}
        assert own == {8002: "127.0.0.1", 8003: "127.0.0.1"}


@pytest.mark.parametrize("file", COMPOSE)
@pytest.mark.parametrize("llm", LLMS)
def test_the_setting_llm_decides_what_starts(file: str, llm: str) -> None:
    services = composed(file, LLM=llm, LLM_URLS="http://ours:9000/v1", LLM_MODEL="ours")["services"]
    wanted = {"llm"} if llm in ("vllm", "trtllm-serve") else set()
    wanted |= {"engine"} if llm.startswith("trtllm") else set()
    assert started(services) & {"llm", "engine"} == wanted
    options = services["tts"]["environment"]["LLM_OPTIONS"].split()
    arguments = render.build_parser().parse_args(["models", "repository", *options])
    transport = "openai" if llm in ("vllm", "trtllm-serve", "elsewhere") else "triton"
    assert arguments.llm_transport == transport
    assert (arguments.llm_engine == "cuda") == (llm == "cuda")
    if "llm" in wanted:
        assert arguments.llm_urls == ["http://llm:8000/v1"]
        command = services["llm"]["command"]
        served = next((word.split("=")[1] for word in command if "served-model-name" in word), Path(command[0]).name)
        assert arguments.llm_model == served
    if llm == "trtllm-serve":
        assert services["llm"]["entrypoint"] == ["trtllm-serve"]
    if llm == "elsewhere":
        assert (arguments.llm_urls, arguments.llm_model) == (["http://ours:9000/v1"], "ours")
    assert services["tts"]["depends_on"]["llm"]["condition"] == "service_healthy"
    assert all("memlock" in services[name]["ulimits"] for name in wanted & {"llm"} | {"tts"})


@pytest.mark.parametrize("file", FILES)
def test_without_settings_one_image_serves_with_our_llm_engine(file: str) -> None:
    services = composed(file)["services"]
    assert started(services) == {"download", "tts", "gateway", "speech"}
    assert {services[name]["image"] for name in ("download", "tts", "speech")} == {"cosyvoice-triton:gpu"}
    arguments = render.build_parser().parse_args(["m", "r", *services["tts"]["environment"]["LLM_OPTIONS"].split()])
    assert (arguments.llm_transport, arguments.llm_engine) == ("triton", "cuda")
    if file == COSYVOICE3:
        services = composed(file, LLM="vllm")["services"]  # which it does not have
        assert started(services) == {"download", "tts", "gateway", "speech"}


def test_vllm_serve_finds_our_logits_processor(tmp_path: Path) -> None:
    """In the package that the download copies to the volume; it imports what vLLM's image has."""
    services = composed("docker-compose.dit.yml", LLM="vllm")["services"]
    llm = services["llm"]
    (models,) = (Path(volume["target"]) for volume in llm["volumes"])
    assert Path(llm["environment"]["PYTHONPATH"]) == models / steps.PYTHON_PATH
    assert checked_and_downloaded(services["download"])[1].python_path
    steps.copy_package(tmp_path)
    (processor,) = (word.split("=")[1] for word in llm["command"] if word.startswith("--logits-processors"))
    blocked = "import sys; sys.modules.update(dict.fromkeys(['aiohttp', 'soundfile', 'tritonclient']))"
    fake = "from tests.support import fake_vllm; sys.modules.update(fake_vllm.modules()); import importlib"
    code = f"{blocked}; {fake}; m, c = {processor!r}.split(':'); print(getattr(importlib.import_module(m), c))"
    code += "; print(importlib.import_module(m).__file__)"
    printed = ran(sys.executable, "-c", code, PYTHONPATH=str(tmp_path)).stdout
    assert printed.splitlines()[-1].startswith(str(tmp_path))


@pytest.mark.parametrize("profiles", ["", "disaggregated,runtime,monitoring"])
@pytest.mark.parametrize("file", FILES)
def test_without_a_gpu_nothing_needs_one(file: str, profiles: str) -> None:
    services = composed(file, CPU, profiles=profiles)["services"]
    assert not {"llm", "engine", "plans"} & set(services)
    ours = {name for name, one in services.items() if "cosyvoice" in one["image"]}
    assert {services[name]["image"] for name in ours} == {"cosyvoice-triton:cpu"}
    for name in ours:
        assert "deploy" not in services[name] and "memlock" not in services[name].get("ulimits", {}), name
        if name.startswith("tts"):
            assert services[name]["environment"]["DEVICE"] == "cpu"
            assert set(services[name].get("depends_on", ["download"])) == {"download"}
    assert services["download"]["build"]["target"] == "cpu"


@pytest.mark.parametrize("file, stack", [*zip(FILES, ("unet", "dit", "cosyvoice3"), strict=True)])
def test_the_gpu_that_serves_is_checked_before_anything_is_downloaded(file: str, stack: str) -> None:
    given = {"HUB": "modelscope", "TTS_GPU": "3", "TTS_OPTIONS": "--set max_streams=2"}
    for settings, hub, changes in (({}, "huggingface", {}), (given, "modelscope", {"max_streams": "2"})):
        services = composed(file, **settings)["services"]
        options, download = checked_and_downloaded(services["download"])
        assert (download.step, download.stack, download.hub) == ("download", stack, hub)
        assert (options.stack, options.device, options.settings) == (stack, "gpu", changes)
        assert (download.models, options.models_dir) == (Path("/models"), Path("/models"))
        assert services["download"]["deploy"] == services["tts"]["deploy"]
        assert "check" not in services
        check = composed(file, profiles="check", **settings)["services"]["check"]
        assert examined(script_of(check), "exec python3 /clone/scripts/doctor.py") == options
        assert check["deploy"] == services["tts"]["deploy"] and check["image"].startswith("python:")
        assert check["volumes"][0]["source"] == str(ROOT)
        assert services["download"]["restart"] == "on-failure:3"
        assert services["tts"]["environment"]["STACK"] == stack


@pytest.mark.parametrize("file", COMPOSE)
def test_the_plain_runtime_is_the_speech_service_with_its_port(file: str) -> None:
    assert "runtime" not in composed(file)["services"]
    services = composed(file, profiles="runtime", RUNTIME_PORT="50001", SPEECH_API_KEYS="key")["services"]
    runtime, speech = services["runtime"], services["speech"]
    assert [(port["published"], port["target"]) for port in runtime["ports"]] == [("50001", 50000)]
    assert runtime["environment"] == speech["environment"] and runtime["environment"]["SPEECH_API_KEYS"] == "key"
    alone = " ".join(runtime["command"]).replace("--runtime_port 50000 ", "", 1)
    assert "--runtime_port 50000" in " ".join(runtime["command"]) and speech["command"][2].endswith(f" & exec {alone}")


def test_when_speech_is_ready_its_log_has_the_page_and_a_first_request(tmp_path: Path) -> None:
    """Its script, with a program that records what it is called with and is ready at once."""
    (tmp_path / "cosyvoice-triton").write_text("#!/bin/sh\n[ $1 = wait ] || sleep 0.5\n")
    (tmp_path / "cosyvoice-triton").chmod(0o755)
    for files, port, voice in ((COMPOSE[1:], "127.0.0.1:9000", "sample"), ((COMPOSE[0], CPU), "9000", "kumo")):
        speech = composed(*files, SPEECH_PORT=port)["services"]["speech"]
        script = speech["command"][2].replace("$$", "$")
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        said = ran("bash", "-c", script, **speech["environment"] | path).stdout
        assert said.startswith("ready: speak at http://localhost:9000/ or with: curl http://localhost:9000/v1/audio")
        assert shlex.split(said)[-1] == f'{{"input": "Hello.", "voice": "{voice}"}}'


@pytest.mark.parametrize("llm", LLMS)
def test_each_image_has_one_build(llm: str) -> None:
    services = composed("docker-compose.dit.yml", profiles="disaggregated,tensorrt", LLM=llm)["services"]
    builds = [services[name]["image"] for name in started(services) if "build" in services[name]]
    assert len(set(builds)) == len(builds)
    ours = {one["image"] for one in services.values() if one["image"].startswith("cosyvoice")}
    assert ours <= {*builds, services["engine"]["image"]}


@pytest.mark.parametrize("file, stack", [*zip(COMPOSE, ("unet", "dit"), strict=True)])
def test_a_service_builds_the_tensorrt_plans_that_the_servers_are_rendered_for(file: str, stack: str) -> None:
    services = composed(file, profiles="tensorrt", TTS_TENSORRT="1", TTS_GPU="3")["services"]
    plans, tts = services["plans"], services["tts"]
    assert plans["command"] == f"cosyvoice-triton prepare plans /models --stack {stack}".split()
    assert plans["deploy"] == tts["deploy"] and plans["volumes"] == tts["volumes"]
    assert plans["profiles"] == ["tensorrt"] and tts["environment"]["TTS_TENSORRT"] == "1"
    assert "TTS_TENSORRT:+--set flow_runtime=tensorrt --set runtime=tensorrt}" in tts["command"][-1]
    assert tts["environment"]["STACK"] == stack


def test_each_disaggregated_server_has_its_own_gpu() -> None:
    services = composed("docker-compose.dit.yml", profiles="disaggregated", TTS_GPU="1")["services"]
    gpus = [gpu_of(services[name]) for name in ("llm", "tts", "tts-2", "tts-3")]
    assert gpus == ["0", "1", "2", "3"]
    for name in ("tts-2", "tts-3"):  # the gateway's servers are the addresses of one name
        assert services[name]["networks"] == {"default": {"aliases": ["tts"]}}


def test_every_setting_of_the_compose_files_is_documented() -> None:
    used = {name for path in SOURCES for name in re.findall(r"(?<!\$)\$\{(\w+)", path.read_text())}
    example = (ROOT / ".env.example").read_text()
    documented = set(re.findall(r"^(?:# )?(\w+)=", example, re.MULTILINE))
    assert used - documented == set() and documented - used == {"COMPOSE_PROFILES", "CHECKPOINT_REVISIONS"}
    defaults = dict(re.findall(r"^(\w+)=(.*)$", example, re.MULTILINE))
    for path in SOURCES:
        for name, default in re.findall(r"(?<!\$)\$\{(\w+):-([^}]*)\}", path.read_text()):
            assert name not in defaults or defaults[name] == default, f"{path.name}: {name}"


def test_models_may_load_as_long_as_health_checks_wait() -> None:
    services = (ROOT / "deploy/compose/services.yml").read_text()
    waits = [60 * int(minutes) for minutes in re.findall(r"start_period: (\d+)m", services)]
    probes = re.findall(r"periodSeconds: (\d+)\n *failureThreshold: (\d+)", (ROOT / "deploy/k8s/tts.yaml").read_text())
    assert min(waits) >= LOAD_SECONDS == int(probes[0][0]) * int(probes[0][1])


def commands() -> list[tuple[str, str]]:
    """Subcommand and arguments of every call of our command in images, compose files and manifests."""
    found = []
    for path in [ROOT / "Dockerfile.server", *SOURCES, *(ROOT / "deploy/k8s").rglob("*.yaml")]:
        text = re.sub(r"#.*", "", path.read_text())
        text = re.sub(r'[",\[\]]', " ", text)
        text = re.sub(r"\n\s*- (?!name)", " ", text)  # lists of arguments
        text = re.sub(r"\s+(?=--|&&)", " ", text)  # folded lines
        found += re.findall(r"\bcosyvoice-triton +(\w[\w-]*)([^\n&]*)", text)
    return found


def test_every_command_exists_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    found = commands()
    assert {name for name, _ in found} >= {"prepare", "render", "serve", "speech", "wait"}
    helps: dict[tuple[str, ...], str] = {}
    for name, arguments in found:
        command = (name, *arguments.split()[:1]) if name == "prepare" else (name,)
        if command not in helps:
            with pytest.raises(SystemExit, match="0"):
                cli.main([*command, "--help"])
            helps[command] = capsys.readouterr().out
        for option in set(re.findall(r"--[a-z][\w-]*", arguments)):
            assert option in helps[command], f"{' '.join(command)} has no {option}"
