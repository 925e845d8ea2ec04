"""Memory, threads, open files and shared memory of every process of a stack over time, and whether they grow."""

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import psutil

SAMPLE_SECONDS = 5.0
WARM_UP_SECONDS = 180.0  # of each process, in which caches fill and pools start
JUDGED_SECONDS = 240.0  # a process is judged if it has lived for this long after its warm-up
LONG_SECONDS = 900.0  # after its warm-up, within which a process meets its largest work
SHORT_FACTOR = 4.0  # of the tolerances, for a process that has lived for less

Measure = Literal["memory", "threads", "files", "shared"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
# By how much the last third of a life may exceed the middle one: a share, and an amount in the measure's unit.
TOLERANCES: Mapping[Measure, tuple[float, float]] = {
    "memory": (0.02, 12.0),  # MiB
    "threads": (0.0, 8.0),
    "files": (0.0, 8.0),
    "shared": (0.05, 8.0),  # MiB
}

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = re.compile(r"shm-region-prefix-name=(\w+)")
_MODEL = re.compile(r"/(\w+)/1/model\.py")
_MEMORY = re.compile(r"^Pss_Anon: +(\d+) kB", re.MULTILINE)


@dataclass
class ProcessHistory:
    """The measures of one process. at: seconds of the run's clock.

    memory: anonymous memory in MiB, that is, without files and shared memory, which would depend on the other processes
    that map them. shared: MiB in /dev/shm in files that begin with `prefix`, which tritonserver and its models share.
    """

    name: str
    pid: int
    prefix: str = ""
    at: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)
    files: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)

    def add(self, now: float, process: psutil.Process) -> None:
        """Read all measures. psutil.Error, OSError or LookupError if the process has ended."""
        memory = int(_MEMORY.findall(Path(f"/proc/{self.pid}/smaps_rollup").read_text())[0]) / 1024
        threads, files = process.num_threads(), process.num_fds()
        self.at.append(now)
        self.memory.append(memory)
        self.threads.append(threads)
        self.files.append(files)
        self.shared.append(shared_memory(self.prefix) if self.prefix else 0.0)

    def growth(self, measure: Measure) -> "Growth | None":
        """The last third of the life after the warm-up against the middle one; None if it was too short to be judged.

        The first third is for steps: a process gets larger when it first meets its largest work. Of memory the minima:
        what stays when a model gives back what it has freed (monitoring/health.py), without the work under way. Of
        shared memory the maxima, because Triton's python backend never gives any back. Otherwise medians, so that a
        moment of a fault does not count.
        """
        begin = self.at[0] + WARM_UP_SECONDS if self.at else 0.0
        judged = self.at[-1] - begin if self.at else 0.0
        if judged < JUDGED_SECONDS:
            return None
        values = np.array(getattr(self, measure))
        thirds = np.floor(3 * (np.array(self.at) - begin) / judged)
        middle, last = values[thirds == 1], values[thirds >= 2]
        return Growth(self.name, self.pid, measure, judged, _level(measure, middle), _level(measure, last))


@dataclass(frozen=True)
class Growth:
    """A measure of one process in the middle and the last third of `seconds`."""

    process: str
    pid: int
    measure: Measure
    seconds: float
    middle: float
    last: float

    @property
    def limit(self) -> float:
        """The largest value of `last` that is no growth."""
        share, amount = TOLERANCES[self.measure]
        factor = SHORT_FACTOR if self.seconds < LONG_SECONDS else 1.0
        return self.middle + factor * max(share * self.middle, amount)

    @property
    def grows(self) -> bool:
        return self.last > self.limit


def _level(measure: Measure, values: np.ndarray) -> float:
    """What a process has of a measure within some time, see `ProcessHistory.growth`."""
    return float(np.percentile(values, {"memory": 0, "shared": 100}.get(measure, 50)))


@dataclass
class Sampler:
    """Samples the processes below `roots`, which returns process ids by name."""

    roots: Callable[[], Mapping[str, int]]
    clock: Callable[[], float]
    processes: dict[psutil.Process, ProcessHistory] = field(default_factory=dict)  # which are told apart by their start

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.to_thread(self.sample)
            await asyncio.sleep(SAMPLE_SECONDS)

    def sample(self) -> None:
        """Once."""
        for process, name in family(self.roots()).items():
            with suppress(psutil.Error, OSError, LookupError):  # it has ended in the meantime
                if process not in self.processes:
                    prefix = _PREFIX.search(" ".join(process.cmdline()))
                    self.processes[process] = ProcessHistory(name, process.pid, prefix[1] if prefix else "")
                self.processes[process].add(self.clock(), process)

    def growths(self) -> list[Growth]:
        """All that could be judged."""
        found = (each.growth(measure) for each in self.processes.values() for measure in MEASURES)
        return [growth for growth in found if growth is not None]


def regions(prefix: str) -> list[Path]:
    """The files of a server's shared memory, which has a prefix of its own."""
    return sorted(_SHARED_MEMORY.glob(f"{prefix}*"))


def family(roots: Mapping[str, int]) -> dict[psutil.Process, str]:
    """The processes of the roots and all their descendants that are tritonserver or a model, with their names."""
    found: dict[psutil.Process, str] = {}
    for root, pid in roots.items():
        with suppress(psutil.Error):  # it has ended
            process = psutil.Process(pid)
            found[process] = root
            for child in process.children(recursive=True):
                with suppress(psutil.Error):
                    command = " ".join(child.cmdline())
                    if model := _MODEL.search(command):
                        found[child] = model[1]
                    elif _PREFIX.search(command):
                        found[child] = "tritonserver"
    return found


def shared_memory(prefix: str) -> float:
    """MiB of the shared memory of a server."""
    total = 0
    for path in regions(prefix):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total / 2**20
