"""Images, compose files and manifests, as far as they can be checked without running them: syntax and references."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

COMPOSE = ("docker-compose.yml", "docker-compose.dit.yml")
PROFILES = ("", "disaggregated", "monitoring", "disaggregated,monitoring")
MANIFESTS = sorted(path for path in (ROOT / "deploy/k8s").glob("*.yaml") if path.name != "kustomization.yaml")
TOOLS = Path(sys.executable).parent
SHELL = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("deploy/**/*.sh"), ROOT / ".ci/run"])

needs_compose = pytest.mark.skipif(
    not shutil.which("docker-compose"), reason="docker-compose is not installed: apt-get install docker-compose"
)


def composed(file: str, profiles: str = "", **settings: str) -> dict[str, Any]:
    """A compose file as resolved by docker-compose, with the services of all profiles."""
    environment = os.environ | {"COMPOSE_PROFILES": profiles} | settings
    run = subprocess.run(
        ["docker-compose", "--file", file, "config"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return dict(yaml.safe_load(run.stdout))


# --- images ------------------------------------------------------------------------------------------------------


def test_the_dockerfile_passes_hadolint() -> None:
    run = subprocess.run([TOOLS / "hadolint", "Dockerfile.server"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_dockerignore_includes_every_path_that_the_dockerfile_copies() -> None:
    """.dockerignore lists the paths of the build context; a COPY of another path fails."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile.server").read_text(), re.MULTILINE):
        for path in line.split():
            assert (ROOT / path).exists(), path
            assert any(path == name or path.startswith(f"{name}/") or name.startswith(f"{path}/") for name in allowed)


@pytest.mark.parametrize(
    ("image", "extras"), [("cpu", ("client", "http", "server")), ("gpu", ("client", "http", "gpu", "datasets"))]
)
def test_the_constraints_hold_the_versions_of_pyproject(image: str, extras: tuple[str, ...]) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML parser to read pyproject.toml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *(one for name in extras for one in extra[name])]
    wanted += project["dependency-groups"]["s3tokenizer"]
    lines = (ROOT / f"deploy/constraints/{image}.txt").read_text().lower().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for requirement in wanted:
        text, _, marker = requirement.partition(";")
        name = re.split(r"[\[=<>]", text)[0].lower().replace("_", "-")
        assert name in pins, f"{requirement} is not in the constraints of {image}: see the command at their top"
        if "==" in text and "<" not in marker:
            assert pins[name] == text.split("==")[1].strip(), requirement


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_shell_scripts_pass_shellcheck(script: Path) -> None:
    run = subprocess.run([TOOLS / "shellcheck", "--external-sources", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


# --- compose -----------------------------------------------------------------------------------------------------


@needs_compose
@pytest.mark.parametrize("profiles", PROFILES)
@pytest.mark.parametrize("file", COMPOSE)
@pytest.mark.slow
def test_compose_files_are_valid_and_complete(file: str, profiles: str) -> None:
    config = composed(file, profiles)
    for name, service in config["services"].items():
        if name in ("download", "engine"):
            assert "unless-stopped" not in service["restart"], "a one-shot service ends"
            continue
        assert service["restart"] == "unless-stopped", name
    tts = config["services"]["tts"]
    assert tts["shm_size"] and tts["stop_grace_period"] == "90s"
    assert tts["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] == ["0"]
    published = {port["target"] for port in config["services"]["gateway"]["ports"]}
    assert published == {8000, 8001, 10086}
    assert [str(port) for port in tts["ports"]] == ["127.0.0.1:8002:8002/tcp"], (
        "metrics are published on this machine only"
    )


@needs_compose
def test_each_disaggregated_server_has_its_own_gpu() -> None:
    services = composed("docker-compose.dit.yml", "disaggregated", TTS_GPU="1")["services"]
    gpus = {
        name: services[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"][0]
        for name in ("llm", "tts", "tts-2", "tts-3")
    }
    assert gpus == {"llm": "0", "tts": "1", "tts-2": "2", "tts-3": "3"}
    servers = services["gateway"]["environment"]["TTS_SERVERS"].split()
    assert set(servers) <= set(services) and len(servers) == 3


@needs_compose
@pytest.mark.parametrize("file", COMPOSE)
def test_every_mounted_file_exists(file: str) -> None:
    for service in composed(file)["services"].values():
        for volume in service.get("volumes", []):
            source = str(volume).split(":")[0]
            assert not source.startswith("/") or Path(source).exists(), source


def test_every_setting_of_the_compose_files_is_documented() -> None:
    sources = [ROOT / file for file in COMPOSE] + [ROOT / "deploy/compose/services.yml"]
    used = {name for path in sources for name in re.findall(r"(?<!\$)\$\{(\w+)", path.read_text())}
    example = (ROOT / ".env.example").read_text()
    documented = set(re.findall(r"^(?:# )?(\w+)=", example, re.MULTILINE))
    assert used - documented == set() and documented - used == {"COMPOSE_PROFILES", "CHECKPOINT_REVISIONS"}
    defaults = dict(re.findall(r"^(\w+)=(.*)$", example, re.MULTILINE))
    for path in sources:
        for name, default in re.findall(r"(?<!\$)\$\{(\w+):-([^}]*)\}", path.read_text()):
            assert name not in defaults or defaults[name] == default, f"{path.name}: {name}"


def commands() -> list[tuple[str, str]]:
    """Name and arguments of every call of our scripts in images, compose files and manifests."""
    found = []
    paths = [ROOT / "Dockerfile.server", ROOT / "deploy/compose/services.yml", *(ROOT / file for file in COMPOSE)]
    for path in [*paths, *MANIFESTS]:
        text = re.sub(r'[",\[\]]', " ", path.read_text())
        text = re.sub(r"\n\s*- (?!name)", " ", text)  # lists of arguments
        text = re.sub(r"\s+(?=--|&&)", " ", text)  # folded lines
        found += re.findall(r"-m\s+scripts\.(\w+)([^\n&]*)", text)
    return found


def test_every_command_names_a_script_and_its_options() -> None:
    found = commands()
    assert {name for name, _ in found} >= {"prepare", "render", "serve", "speech_server", "wait_ready"}
    helps: dict[tuple[str, ...], str] = {}
    for name, arguments in found:
        command = (f"scripts.{name}", *arguments.split()[:1]) if name == "prepare" else (f"scripts.{name}",)
        if command not in helps:
            run = [sys.executable, "-m", *command, "--help"]
            helps[command] = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for option in set(re.findall(r"--[a-z][\w-]*", arguments)):
            assert option in helps[command], f"{' '.join(command)} has no {option}"


# --- monitoring --------------------------------------------------------------------------------------------------


def test_dashboard_and_alerts_use_existing_metrics() -> None:
    from common.process import metrics

    ours = {one.name for one in vars(metrics).values() if isinstance(one, metrics.Metric)}
    board = json.loads((ROOT / "deploy/monitoring/grafana/dashboards/speech.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    alerts = yaml.safe_load((ROOT / "deploy/monitoring/alerts.yml").read_text())
    queries += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    queried = {re.sub(r"_bucket$", "", name) for query in queries for name in re.findall(r"\btts_\w+", query)}
    assert queried and queried <= ours
    assert (
        yaml.safe_load((ROOT / "deploy/k8s/tts.yaml").read_text().split("---")[-1])["spec"]["metrics"][0]["pods"][
            "metric"
        ]["name"]
        in ours
    )
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}) == len(board["panels"])
    scraped = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text())["scrape_configs"]
    assert {job["job_name"] for job in scraped} == {"triton", "models", "speech", "llm"}


# --- Kubernetes --------------------------------------------------------------------------------------------------


def documents() -> list[dict[str, Any]]:
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


@pytest.mark.parametrize("version", ["1.29", "1.33"])
def test_manifests_match_the_schemas(version: str) -> None:
    import kubernetes_validate

    for document in documents():
        kubernetes_validate.validate(document, version, strict=True)


def test_all_manifests_are_listed_and_their_references_resolve() -> None:
    listed = yaml.safe_load((ROOT / "deploy/k8s/kustomization.yaml").read_text())["resources"]
    assert {path.name for path in MANIFESTS} == {name for name in listed if name.endswith(".yaml")}
    gateway_files = yaml.safe_load((ROOT / "deploy/nginx/kustomization.yaml").read_text())["configMapGenerator"][0]
    assert all((ROOT / "deploy/nginx" / name).exists() for name in gateway_files["files"])
    kinds: dict[str, dict[str, Any]] = {}
    for document in documents():
        kinds.setdefault(document["kind"], {})[document["metadata"]["name"]] = document
    pods = {name: one["spec"]["template"] for name, one in kinds["Deployment"].items()}
    for name, service in kinds["Service"].items():
        assert service["spec"]["selector"] == {"app": name} == pods[name]["metadata"]["labels"]
        ports = {port["name"] for one in pods[name]["spec"]["containers"] for port in one["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for name, budget in kinds["PodDisruptionBudget"].items():
        assert budget["spec"]["selector"]["matchLabels"] == {"app": name} and name in pods
    assert kinds["HorizontalPodAutoscaler"]["tts"]["spec"]["scaleTargetRef"]["name"] in pods
    for name, pod in pods.items():
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes, name
        claims = [
            one["persistentVolumeClaim"]["claimName"]
            for one in pod["spec"].get("volumes", [])
            if "persistentVolumeClaim" in one
        ]
        assert set(claims) <= set(kinds["PersistentVolumeClaim"])


def test_pods_live_longer_than_their_streams() -> None:
    """The grace period of Kubernetes and compose covers serve.py's notice, its drain and tritonserver's exit."""
    text = (ROOT / "deploy/k8s/tts.yaml").read_text()
    notice, limit = (int(re.findall(rf"--{name}-seconds (\d+)", text)[0]) for name in ("notice", "drain"))
    assert int(re.findall(r"terminationGracePeriodSeconds: (\d+)", text)[0]) > notice + limit + 12
    for file in COMPOSE:
        text = (ROOT / file).read_text()
        notice, limit = (int(re.findall(rf"--{name}-seconds (\d+)", text)[0]) for name in ("notice", "drain"))
        assert 90 > notice + limit + 12
