"""The dashboard, alerts and the configuration of Prometheus and Alertmanager, read by their own programs."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cosyvoice_triton.speech_service.metrics import Metrics
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.conftest import ROOT
from tests.support.queries import BOARD, MONITORING, OPERATE, RULES, SHOWN, unknown

CASES = ROOT / "tests/deployment/alerts.yml"

needs_prometheus = pytest.mark.skipif(not shutil.which("promtool"), reason="apt-get install prometheus")


def accepted(*command: object) -> str:
    run = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


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
    cases = yaml.safe_load(CASES.read_text())
    fired = {one["alertname"] for case in cases["tests"] for one in case["alert_rule_test"] if one.get("exp_alerts")}
    names = [rule["alert"] for rule in RULES]
    assert fired == {*names} and all(f"`{name}`" in OPERATE for name in names)
    for case in cases["tests"]:
        asked = {one["alertname"] for one in case["alert_rule_test"]}
        others = [{"eval_time": case["alert_rule_test"][0]["eval_time"], "alertname": one} for one in {*names} - asked]
        case["alert_rule_test"] += others
    cases["rule_files"] = [str(MONITORING / "alerts.yml")]
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases))
    accepted("promtool", "test", "rules", tmp_path / "cases.yml")


@needs_prometheus
def test_prometheus_reads_its_configuration_and_every_query(tmp_path: Path) -> None:
    accepted("promtool", "check", "config", "--syntax-only", MONITORING / "prometheus.yml")
    shown = [{"record": f"shown:{number}", "expr": query} for number, query in enumerate(SHOWN)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": shown}]}))
    accepted("promtool", "check", "rules", tmp_path / "rules.yml")
    scraped = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    jobs = {word for rule in RULES for word in re.findall(r'job!?="(\w+)"', rule["expr"])}
    assert jobs <= {job["job_name"] for job in scraped}


@pytest.mark.skipif(not shutil.which("amtool"), reason="apt-get install prometheus-alertmanager")
def test_alertmanager_sends_pages_and_tickets_to_their_receivers() -> None:
    file = f"--config.file={MONITORING / 'alertmanager.yml'}"
    severities = {rule["labels"]["severity"] for rule in RULES}
    for severity, receiver in (("page", "pager"), ("ticket", "tickets")):
        severities.remove(severity)
        assert accepted("amtool", "config", "routes", "test", file, f"severity={severity}").strip() == receiver
    assert not severities
