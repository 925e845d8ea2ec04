"""The manifests, which are never applied here: schemas, references, what kustomize builds of them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cosyvoice_triton import stacks
from cosyvoice_triton.cli import prepare, render
from cosyvoice_triton.stacks import Stack

from tests.conftest import ROOT

TOOLS = Path(sys.executable).parent
MANIFESTS = sorted(path for path in (ROOT / "deploy/k8s").glob("*.yaml") if path.name != "kustomization.yaml")


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


def kustomized(folder: Path) -> list[dict[str, Any]]:
    run = subprocess.run([TOOLS / "kubectl", "kustomize", folder], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return list(yaml.safe_load_all(run.stdout))


def test_kustomize_builds_every_object() -> None:
    built = kustomized(ROOT / "deploy/k8s")
    assert len(built) == len(documents()) + 2  # and the gateway's files, and the stack
    assert {one["metadata"].get("namespace") for one in built if one["kind"] != "Namespace"} == {"speech"}
    (files,) = (one for one in built if one["kind"] == "ConfigMap" and "balance.sh" in one["data"])
    assert files["data"]["balance.sh"] == (ROOT / "deploy/nginx/balance.sh").read_text()
    deployments = [one["spec"]["template"]["spec"] for one in built if one["kind"] == "Deployment"]
    images = {one["image"] for pod in deployments for one in [*pod["containers"], *pod.get("initContainers", [])]}
    assert images == {"cosyvoice-triton:gpu", "vllm/vllm-openai:v0.25.1", "nginx:1.28.0", "redis:7.4.2"}
    (gateway,) = (pod for pod in deployments if pod["containers"][0]["name"] == "gateway")
    assert gateway["volumes"][0]["configMap"]["name"] == files["metadata"]["name"]


@pytest.mark.parametrize("stack", stacks.BUILT_IN, ids=lambda stack: stack.name)
def test_two_values_choose_the_stack_of_the_pods(stack: Stack, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    path = tmp_path / "deploy/k8s/kustomization.yaml"
    text = path.read_text().replace("STACK=dit", f"STACK={stack.name}")
    path.write_text(text.replace("LLM=cosyvoice2_llm", f"LLM={stack.llm.directory}"))
    built = kustomized(path.parent)
    maps = {one["metadata"]["name"]: one["data"] for one in built if one["kind"] == "ConfigMap"}
    pods = [one["spec"]["template"]["spec"] for one in built if one["kind"] == "Deployment"]
    commands = []
    for container in (one for pod in pods for one in [*pod["containers"], *pod.get("initContainers", [])]):
        names = [one["configMapRef"]["name"] for one in container.get("envFrom", []) if "configMapRef" in one]
        values = {key: value for name in names for key, value in maps[name].items()}
        commands.append([re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in container["command"]])  # noqa: B023
    calls = {
        name: [one[2:] for one in commands if one[:2] == ["cosyvoice-triton", name]] for name in ("prepare", "render")
    }
    downloads = [prepare.build_parser().parse_args(one) for one in calls["prepare"]]
    assert [one.stack for one in downloads] == [stack.name] * 2
    assert [one.python_path for one in downloads] == [True, False], (
        "vLLM's PYTHONPATH is what its pod's download copied"
    )
    (rendered,) = (render.build_parser().parse_args(one) for one in calls["render"])
    (served,) = (one for one in commands if one[0] == "vllm")
    assert (rendered.stack, rendered.llm_model) == (stack.name, stack.llm.directory)
    assert served[2] == f"/models/{stack.llm.directory}" and f"--served-model-name={rendered.llm_model}" in served


def test_process_1_of_every_pod_is_the_program_itself() -> None:
    """Not a shell, which ignores SIGTERM while it waits for a command; balance.sh has traps."""
    for document in documents():
        pod = document["spec"].get("template", {}).get("spec", {}) if document["kind"] == "Deployment" else {}
        for container in [*pod.get("containers", []), *pod.get("initContainers", [])]:
            assert container["command"][0] not in ("bash", "sh") or "balance.sh" in container["command"][1]


def test_pods_live_longer_than_their_streams() -> None:
    """The grace period of Kubernetes and compose covers serve.py's notice, its drain and tritonserver's exit."""
    text = (ROOT / "deploy/k8s/tts.yaml").read_text()
    notice, limit = (int(re.findall(rf"--{name}-seconds[ =](\d+)", text)[0]) for name in ("notice", "drain"))
    assert int(re.findall(r"terminationGracePeriodSeconds: (\d+)", text)[0]) > notice + limit + 12
    text = (ROOT / "deploy/compose/services.yml").read_text()
    notice, limit = (int(re.findall(rf"--{name}-seconds[ =](\d+)", text)[0]) for name in ("notice", "drain"))
    assert 90 > notice + limit + 12
