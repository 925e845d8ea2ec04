"""How many servers the autoscaler of deploy/k8s runs, by the load that the real admission reports.

Simulated: listeners (tests/support/listeners.py), a balancer that sends each to the server with the fewest, and the
algorithm of Kubernetes' HorizontalPodAutoscaler with the numbers of its manifest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from cosyvoice_triton.monitoring.metrics import LOAD

from tests.conftest import ROOT
from tests.support.listeners import Listeners, arrivals, batch_seconds
from tests.token2wav.test_scheduler import admission

SPEC = yaml.safe_load((ROOT / "deploy/k8s/components/hpa/hpa.yaml").read_text())["spec"]
TARGET = float(SPEC["metrics"][0]["pods"]["target"]["averageValue"].removesuffix("m")) / 1000
PERIOD_SECONDS, TOLERANCE = 15, 0.1  # Kubernetes' own defaults
TRIES = 2  # the balancer sends to another server whom one refuses
LOAD_SECONDS = 60.0  # until a new pod is ready, its image being there
# Minutes, and listeners in them as a multiple of what one server can take.
MORNING = [(3.0, 1.2), (8.0, 4.0), (16.0, 1.2)]
HIGH_SECONDS = 60 * (MORNING[0][0] + MORNING[1][0])  # until there are fewer again
LATE_SECONDS = 60 * (MORNING[0][0] + 4)  # when new servers could have been there long since


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


class Server:
    """A pod on a GPU that is so many times slower than an H200."""

    def __init__(self, slower: float, token_rate: float, ready_at: float) -> None:
        self.admission = admission(slower)
        cost: Callable[[int, float], float] = lambda tokens, _: slower * batch_seconds(tokens)  # noqa: E731
        self.listeners = Listeners([], token_rate, cost=cost, admission=self.admission)
        self.ready_at, self.stopped_at, self.empty_at = ready_at, math.inf, math.inf

    @property
    def live(self) -> int:
        return len(self.listeners.live)

    @property
    def load(self) -> float:
        return self.admission.values(self.live)[LOAD]

    def takes(self, begin: float) -> bool:
        """Whether a listener is admitted."""
        self.listeners.add(begin)
        self.simulate(begin)
        return self.listeners.admitted[-1:] == [len(self.listeners.begins) - 1]

    def simulate(self, now: float) -> None:
        self.listeners.simulate(now)
        if now >= self.stopped_at and not self.live:
            self.empty_at = min(self.empty_at, now)


class Cluster:
    """Servers, those that are being stopped, and what became of the listeners. listeners: what one server can take."""

    def __init__(self, slower: float, token_rate: float, listeners: float) -> None:
        self._new = lambda ready_at: Server(slower, token_rate, ready_at)
        self._autoscaler = Autoscaler()
        self._refused: list[float] = []
        self.begins: list[float] = []
        self.end = 0.0
        for number, (minutes, times) in enumerate(MORNING):
            self.begins += [self.end + at for at in arrivals(times * listeners, 60 * minutes, seed=number)]
            self.end += 60 * minutes
        self.servers = [self._new(0.0) for _ in range(SPEC["minReplicas"])]
        self.stopped: list[Server] = []
        self.counts: list[int] = []  # servers in each period

    @property
    def every(self) -> list[Server]:
        return [*self.servers, *self.stopped]

    def simulate(self) -> "Cluster":
        coming = iter([*self.begins, math.inf])
        begin = next(coming)
        for now in range(PERIOD_SECONDS, int(self.end) + 1, PERIOD_SECONDS):
            while begin < now:
                for server in self.servers:
                    server.simulate(begin)
                ready = [server for server in self.servers if server.ready_at <= begin]
                if not any(server.takes(begin) for server in sorted(ready, key=lambda server: server.live)[:TRIES]):
                    self._refused.append(begin)
                begin = next(coming)
            for server in self.every:
                server.simulate(now)
            self._scale(now)
        for server in self.every:
            server.simulate(self.end + 60)
        return self

    def _scale(self, now: float) -> None:
        wanted = self._autoscaler.replicas(self.servers, now)
        while len(self.servers) > wanted:  # the newest first
            self.stopped.append(self.servers.pop())
            self.stopped[-1].stopped_at = now
        self.servers += [self._new(now + LOAD_SECONDS) for _ in range(wanted - len(self.servers))]
        self.counts.append(len(self.servers))

    def refused(self, begin: float, end: float) -> float:
        """The share of those who came then."""
        refused = sum(begin <= at < end for at in self._refused)
        return refused / sum(begin <= at < end for at in self.begins)

    def without_gap(self) -> float:
        gaps = [each.listeners.gaps[stream] for each in self.every for stream in each.listeners.admitted]
        return sum(gap <= 0 for gap in gaps) / len(gaps)


def test_servers_come_with_the_listeners_and_go_after_them_without_one_lost() -> None:
    cluster = Cluster(4, 50, 20).simulate()
    assert cluster.counts[0] == cluster.counts[-1] == SPEC["minReplicas"] and max(cluster.counts) >= 4
    assert cluster.refused(0.0, cluster.end) < 0.1 and cluster.refused(LATE_SECONDS, HIGH_SECONDS) < 0.03
    assert cluster.without_gap() > 0.99
    after = cluster.counts[cluster.counts.index(max(cluster.counts)) :]
    assert after == sorted(after, reverse=True), "none is stopped that would be missed"
    assert all(each.empty_at < math.inf for each in cluster.stopped) and not any(each.live for each in cluster.every)
