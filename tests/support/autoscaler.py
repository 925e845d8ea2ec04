"""Kubernetes' HorizontalPodAutoscaler with the numbers of its manifest, for simulated servers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from tests.conftest import ROOT

SPEC = yaml.safe_load((ROOT / "deploy/k8s/components/hpa/hpa.yaml").read_text())["spec"]
TARGET = float(SPEC["metrics"][0]["pods"]["target"]["averageValue"].removesuffix("m")) / 1000
PERIOD_SECONDS, TOLERANCE = 15, 0.1  # Kubernetes' own defaults


@dataclass
class Autoscaler:
    """Kubernetes' controller."""

    wanted: list[tuple[float, int]] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)

    def replicas(self, servers: Sequence[Any], now: float) -> int:
        """How many servers there should be, with these that are not being stopped. They have a `load` and a time
        `ready_at`."""
        there = len(servers)
        ratio = sum(each.load for each in servers if each.ready_at <= now) / there / TARGET
        wanted = there if abs(ratio - 1) <= TOLERANCE else math.ceil(there * ratio)
        wanted = min(max(wanted, SPEC["minReplicas"]), SPEC["maxReplicas"])
        window = SPEC["behavior"]["scaleDown"]["stabilizationWindowSeconds"]
        self.wanted = [(at, each) for at, each in self.wanted if at > now - window] + [(now, wanted)]
        if wanted < there:
            wanted = min(there, max(each for _, each in self.wanted))
        steps = []
        for policy in SPEC["behavior"]["scaleUp" if wanted > there else "scaleDown"]["policies"]:
            done = sum(change for at, change in self.changes if at > now - policy["periodSeconds"])
            part = (there - done) / 100 if policy["type"] == "Percent" else 1
            steps.append(math.ceil(policy["value"] * part) - abs(done))
        step = max(0, *steps)
        wanted = min(max(wanted, there - step), there + step)
        if wanted != there:
            self.changes.append((now, wanted - there))
        return wanted
