"""The manifests, which are never applied here: what kustomize builds of them, schemas, references. The dashboard,
alerts and the configuration of Prometheus and Alertmanager, read by their own programs."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cosyvoice_triton import stacks
from cosyvoice_triton.cli import prepare, serve
from cosyvoice_triton.monitoring import metrics
from cosyvoice_triton.speech_service.metrics import Metrics
from cosyvoice_triton.stacks import Stack
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.conftest import ROOT
from tests.support.programs import ran
from tests.support.queries import BOARD, MONITORING, OPERATE, RULES, SHOWN, unknown

TOOLS = Path(sys.executable).parent
COMPONENTS = sorted(path.name for path in (ROOT / "deploy/k8s/components").iterdir())

Objects = dict[tuple[str, str], dict[str, Any]]


def kustomized(folder: Path) -> Objects:
    built = ran(TOOLS / "kubectl", "kustomize", folder).stdout
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(built)}


def with_components(folder: Path, names: list[str], stack: Stack = stacks.DEFAULT) -> Objects:
    """What an overlay of a user's builds, with these components and values of a stack."""
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    overlay = {
        "namespace": "speech",
        "resources": ["../k8s"],
        "components": [f"../k8s/components/{name}" for name in names],
        "configMapGenerator": [
            {"name": "stack", "behavior": "merge", "literals": [f"STACK={stack.name}", f"LLM={stack.llm.directory}"]}
        ],
    }
    (folder / "deploy/overlay").mkdir()
    (folder / "deploy/overlay/kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return kustomized(folder / "deploy/overlay")


def pods_of(objects: Objects) -> dict[str, dict[str, Any]]:
    return {name: one["spec"]["template"]["spec"] for (kind, name), one in objects.items() if kind == "Deployment"}


def containers_of(*pods: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for pod in pods for each in (*pod["containers"], *pod.get("initContainers", []))]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return with_components(tmp_path_factory.mktemp("all"), COMPONENTS)


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
def test_manifests_match_the_schemas(version: str, everything: Objects) -> None:
    for (kind, _), document in everything.items():
        if kind != "ScaledObject":  # KEDA's
            kubernetes_validate.validate(document, version, strict=True)


def test_references_resolve_and_process_1_of_every_pod_is_the_program_itself(everything: Objects) -> None:
    pods = pods_of(everything)
    for (kind, name), one in everything.items():
        if kind == "Service":
            (name,) = one["spec"]["selector"].values()
            assert everything["Deployment", name]["spec"]["template"]["metadata"]["labels"]["app"] == name
            ports = {port["name"] for container in pods[name]["containers"] for port in container["ports"]}
            assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports
        if kind in ("PodDisruptionBudget", "NetworkPolicy"):
            selector = one["spec"].get("selector") or one["spec"]["podSelector"]
            assert selector == {"matchLabels": {"app": name}} and name in pods
    backend = everything["Ingress", "speech"]["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    ports = everything["Service", backend["name"]]["spec"]["ports"]
    assert backend["port"]["name"] in {port["name"] for port in ports}
    for name, pod in pods.items():
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        for container in containers_of(pod):
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= set(volumes), name
            assert container["command"][0] not in ("bash", "sh"), "which ignore SIGTERM while they wait for a command"
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in everything
            elif not volume.get("secret", {}).get("optional") and "emptyDir" not in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in everything


def test_the_stack_is_whole_without_a_component() -> None:
    built = kustomized(ROOT / "deploy/k8s")
    assert {one["metadata"].get("namespace") for (kind, _), one in built.items() if kind != "Namespace"} == {"speech"}
    images = {container["image"] for container in containers_of(*pods_of(built).values())}
    assert images == {"cosyvoice-triton:gpu", "envoyproxy/envoy:v1.40.0"}
    (files,) = (one for (kind, _), one in built.items() if kind == "ConfigMap" and "envoy.yaml" in one["data"])
    assert files["data"]["run.sh"] == (ROOT / "deploy/envoy/run.sh").read_text()


def test_the_overlay_sets_every_value() -> None:
    built = kustomized(ROOT / "deploy/k8s-overlay")
    secrets = {name for kind, name in built if kind == "Secret"}
    pods = pods_of(built)
    containers = containers_of(*pods.values())
    sources = [one for each in containers for one in each.get("envFrom", [])]
    named = {one["secretRef"]["name"] for one in sources if "secretRef" in one}
    assert secrets == named, "the keys and the hub's token reach their pods"
    images = {container["image"] for container in containers}
    assert any(image.startswith("registry.example.com/cosyvoice-triton:") for image in images)
    assert "cosyvoice-triton:gpu" not in images
    assert "nodeSelector" in pods["tts"]
    assert built["PersistentVolumeClaim", "models"]["spec"]["storageClassName"]
    assert built["Service", "gateway"]["spec"]["type"] == "ClusterIP", "the ingress is the only way in"


def test_an_older_revision_has_its_own_image_and_settings(tmp_path: Path) -> None:
    """`kubectl rollout undo` brings back a pod's template, which names them: their content must not be another."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    file = tmp_path / "deploy/k8s-overlay/kustomization.yaml"
    old = kustomized(file.parent)
    file.write_text(file.read_text().replace("0.2.0", "0.3.0").replace("STACK=dit", "STACK=unet"))
    new = kustomized(file.parent)
    before, after = (str(pods_of(each)["tts"]) for each in (old, new))
    assert before.count(":0.2.0-gpu") == after.count(":0.3.0-gpu") == 2
    assert pods_of(old)["gateway"] == pods_of(new)["gateway"]
    same = [key for key in old.keys() & new.keys() if key[0] in ("ConfigMap", "Secret")]
    assert [old[key] for key in same] == [new[key] for key in same]


def test_both_autoscalers_scale_by_the_load_alike(everything: Objects) -> None:
    hpa = everything["HorizontalPodAutoscaler", "tts"]["spec"]
    keda = everything["ScaledObject", "tts"]["spec"]
    assert "replicas" not in everything["Deployment", "tts"]["spec"], "an apply would undo what they did"
    (metric,), (trigger,) = hpa["metrics"], keda["triggers"]
    assert metric["pods"]["metric"]["name"] == metrics.LOAD.name and metrics.LOAD.name in trigger["metadata"]["query"]
    assert metric["pods"]["target"]["averageValue"] == f"{1000 * float(trigger['metadata']['threshold']):.0f}m"
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (keda["minReplicaCount"], keda["maxReplicaCount"])
    assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert hpa["scaleTargetRef"]["name"] == keda["scaleTargetRef"]["name"] == "tts"
    rules = yaml.safe_load((ROOT / "deploy/k8s/components/hpa/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert rules[0]["seriesQuery"].startswith(metrics.LOAD.name)


def test_a_second_apply_changes_nothing(everything: Objects) -> None:
    """kubectl compares these with the API server's object as a whole, so that its defaults have to be written out."""
    for (kind, _), one in everything.items():
        if kind == "Deployment":
            strategy = one["spec"].get("strategy", {"type": "Recreate"})
            assert "rollingUpdate" in strategy or strategy == {"type": "Recreate"}
        if kind == "NetworkPolicy":
            assert all("protocol" in port for rule in one["spec"]["ingress"] for port in rule["ports"])


@pytest.mark.parametrize("components", [[], ["llm"]], ids=["cuda", "vllm"])
@pytest.mark.parametrize("stack", stacks.BUILT_IN, ids=lambda stack: stack.name)
def test_one_value_chooses_the_stack_of_the_pods(stack: Stack, components: list[str], tmp_path: Path) -> None:
    built = with_components(tmp_path, components, stack)
    commands = []
    for container in containers_of(*pods_of(built).values()):
        names = [one["configMapRef"]["name"] for one in container.get("envFrom", []) if "configMapRef" in one]
        values = {key: value for name in names for key, value in built["ConfigMap", name]["data"].items()}
        commands.append([re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in container["command"]])  # noqa: B023
    downloads = [prepare.build_parser().parse_args(one[2:]) for one in commands if "prepare" in one]
    (rendered,) = (
        serve.build_parser().parse_args(one[2:]) for one in commands if one[:2] == ["cosyvoice-triton", "serve"]
    )
    assert {one.stack for one in [*downloads, rendered]} == {stack.name}
    assert rendered.repository is None, "rendered where the GPU is, so that max_streams follows from it"
    if not components:
        assert rendered.llm_engine == "cuda" and len(downloads) == 1
        return
    assert sorted(one.python_path for one in downloads) == [False, True], "vLLM imports what its pod has copied"
    (served,) = (one for one in commands if one[0] == "vllm")
    assert (rendered.llm_transport, rendered.llm_model) == ("openai", stack.llm.directory)
    assert served[2] == f"/models/{stack.llm.directory}" and f"--served-model-name={rendered.llm_model}" in served


def test_pods_live_longer_than_their_streams() -> None:
    """The grace period of Kubernetes and compose covers serve.py's notice, its drain and tritonserver's exit."""
    for file, grace in (("k8s/tts.yaml", r"terminationGracePeriodSeconds: (\d+)"), ("compose/services.yml", None)):
        text = (ROOT / "deploy" / file).read_text()
        notice, limit = (int(re.findall(rf"--{name}-seconds[ =](\d+)", text)[0]) for name in ("notice", "drain"))
        assert (int(re.findall(grace, text)[0]) if grace else 90) > notice + limit + 12


needs_prometheus = pytest.mark.skipif(not shutil.which("promtool"), reason="apt-get install prometheus")


def kept(ours: Any, theirs: Any) -> bool:
    """Whether all of a document is in another."""
    if isinstance(ours, dict):
        return all(name in theirs and kept(value, theirs[name]) for name, value in ours.items())
    return all(map(kept, ours, theirs)) if isinstance(ours, list) else bool(ours == theirs)


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    """Grafana's own types drop what they do not know."""
    register_default_plugins()
    assert kept(BOARD, json.loads(JSONEncoder().encode(Dashboard.from_json(BOARD))))
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert unknown(Metrics().page().decode(), "speech_") == set()
    provisioned = [yaml.safe_load(file.read_text()) for file in sorted(MONITORING.glob("grafana/provisioning/*/*.yml"))]
    folder, source = provisioned[0]["providers"][0]["options"]["path"], provisioned[1]["datasources"][0]
    assert all(panel["datasource"] == {"type": source["type"], "uid": source["uid"]} for panel in BOARD["panels"])
    compose = (ROOT / "deploy/compose/services.yml").read_text()
    assert f"grafana/dashboards:{folder}:ro" in compose and f"HOME_DASHBOARD_PATH: {folder}/speech.json" in compose


@needs_prometheus
def test_every_alert_fires_as_its_case_says(tmp_path: Path) -> None:
    """Each has a case in which it fires, and must not fire in the cases of the others."""
    cases = yaml.safe_load((ROOT / "tests/deployment/alerts.yml").read_text())
    fired = {one["alertname"] for case in cases["tests"] for one in case["alert_rule_test"] if one.get("exp_alerts")}
    names = [rule["alert"] for rule in RULES]
    assert fired == {*names} and all(f"`{name}`" in OPERATE for name in names)
    for case in cases["tests"]:
        asked = {one["alertname"] for one in case["alert_rule_test"]}
        others = [{"eval_time": case["alert_rule_test"][0]["eval_time"], "alertname": one} for one in {*names} - asked]
        case["alert_rule_test"] += others
    cases["rule_files"] = [str(MONITORING / "alerts.yml")]
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases))
    ran("promtool", "test", "rules", tmp_path / "cases.yml")


@needs_prometheus
def test_prometheus_reads_its_configuration_and_every_query(tmp_path: Path) -> None:
    ran("promtool", "check", "config", "--syntax-only", MONITORING / "prometheus.yml")
    shown = [{"record": f"shown:{number}", "expr": query} for number, query in enumerate(SHOWN)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": shown}]}))
    ran("promtool", "check", "rules", tmp_path / "rules.yml")
    scraped = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    jobs = {word for rule in RULES for word in re.findall(r'job!?="(\w+)"', rule["expr"])}
    assert jobs <= {job["job_name"] for job in scraped}


@pytest.mark.skipif(not shutil.which("amtool"), reason="apt-get install prometheus-alertmanager")
def test_alertmanager_sends_pages_and_tickets_to_their_receivers() -> None:
    file = f"--config.file={MONITORING / 'alertmanager.yml'}"
    severities = {rule["labels"]["severity"] for rule in RULES}
    for severity, receiver in (("page", "pager"), ("ticket", "tickets")):
        severities.remove(severity)
        assert ran("amtool", "config", "routes", "test", file, f"severity={severity}").stdout.strip() == receiver
    assert not severities
