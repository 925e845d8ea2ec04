"""The dashboard, alerts and Prometheus's configuration, compared with the metrics that there are."""

import json
import re

import yaml
from cosyvoice_triton.monitoring import health, metrics

from tests.conftest import ROOT


def test_dashboard_and_alerts_use_existing_metrics() -> None:
    values = [*vars(metrics).values(), *vars(health).values()]
    ours = {one.name for one in values if isinstance(one, metrics.Metric)}
    board = json.loads((ROOT / "deploy/monitoring/grafana/dashboards/speech.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    alerts = yaml.safe_load((ROOT / "deploy/monitoring/alerts.yml").read_text())
    queries += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    queried = {re.sub(r"_bucket$", "", name) for query in queries for name in re.findall(r"\btts_\w+", query)}
    assert queried and queried <= ours
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}) == len(board["panels"])
    scraped = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text())["scrape_configs"]
    assert {job["job_name"] for job in scraped} == {"triton", "models", "speech", "llm"}
