"""The queries of deploy/monitoring and of the page on operation, and the metrics that they name."""

import json
import re

import yaml

from tests.conftest import ROOT

MONITORING = ROOT / "deploy/monitoring"
BOARD = json.loads((MONITORING / "grafana/dashboards/speech.json").read_text())
RULES = [rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
OPERATE = (ROOT / "docs/operate.md").read_text()
SHOWN = [target["expr"].replace("$__rate_interval", "1m") for panel in BOARD["panels"] for target in panel["targets"]]
SHOWN += [line for block in re.findall(r"```promql\n(.*?)```", OPERATE, re.DOTALL) for line in block.splitlines()]
# Of a GPU, which the machines of the tests have not.
GPU = {"nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"}


def unknown(page: str, prefix: str) -> set[str]:
    """The metrics with a prefix that are asked for and not described on a page of Prometheus' format."""
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)", page, re.MULTILINE))
    queries = re.sub(r"\{.*?\}|\bby \(.*?\)", "", "\n".join([*SHOWN, *(rule["expr"] for rule in RULES)]))  # no labels
    asked = set(re.findall(rf"\b{prefix}\w+", queries))
    histograms = [f"{name}_{part}" for name in kinds if kinds[name] == "histogram" for part in ("bucket", "count")]
    return asked - GPU - {*kinds, *histograms}
