"""One soak: the load, the faults and the samples at the same time, and what is left when they have ended."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

from cosyvoice_triton.load.plan import Load
from cosyvoice_triton.load.runner import interruptible, run
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.monitoring.metrics import LIVE, STREAMS, sum_of
from cosyvoice_triton.tasks import TaskScope

from tests.soak.cases import SoakPlan
from tests.soak.faults import FaultKind, InjectedFault, Injector
from tests.soak.outcomes import Lines, Settled, settled
from tests.soak.routes import VoicesDoor
from tests.soak.sampling import Growth, ProcessHistory, Sampler, regions
from tests.soak.stack import Life, LocalStack, local_stack
from tests.support.serve_process import get

PAUSE_SECONDS = 5.0  # after an error or a refusal, so that a server that is down or full does not get thousands
TASKS = 6  # requests at a time
PATIENCE_SECONDS = 60.0  # without any part of an answer, which are a hang
QUIET_SECONDS = 30.0  # after the last request, for the servers to end all work
LIMIT = 300.0  # seconds for a whole answer; a silent server is given up much earlier
METRICS = LIVE.name, STREAMS.name, "speech_live_streams", "speech_live_sessions"  # what the servers work at


@dataclass
class SoakResult:
    """All that a run has found; times are seconds since its start. loaded, seconds: the load's start and end. left:
    what the servers still had when all requests had ended, one line each.
    """

    loaded: float
    seconds: float = 0.0
    requests: list[Settled] = field(default_factory=list)
    faults: list[InjectedFault] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    processes: list[ProcessHistory] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    interrupted: bool = False

    def problems(self) -> list[str]:
        """One line for each loss, hang, growth and whatever else must not be; the run is good without any."""
        found = [
            f"{each.outcome}: request {each.answer.id}, {each.answer.server}, begun at {each.answer.begun:.1f} s, "
            f"ended at {each.answer.ended:.1f} s: {each.answer.error}"
            for each in self.requests
            if each.outcome in ("lost", "hung")
        ]
        found += [
            f"growth: {each.process} (process {each.pid}), {each.measure} {each.middle:.1f} -> {each.last:.1f} "
            f"within {each.seconds:.0f} s, more than {each.limit:.1f}"
            for each in self.growths
            if each.grows
        ]
        found += [
            f"ended by itself: {each.service} (process {each.pid}) at {each.ended:.1f} s with code {each.code}: "
            f"{each.last_words}"
            for each in self.lives
            if each.ended is not None and not each.fault
        ]
        found += [f"fault {each.name} at {each.begun:.1f} s: {each.note}" for each in self.faults if each.failed]
        return found + [f"left behind: {line}" for line in self.left]


async def soak(
    seconds: float, seed: int, kinds: Sequence[FaultKind] | None, samples: Sequence[Sample], models: Path, work: Path
) -> SoakResult:
    """The whole run. ClientError, RuntimeError or OSError if it cannot begin.

    seconds: of load. kinds: of the faults, all of them if empty; None for no faults. models: the checkpoint. work: a
    directory for the servers' files. Ctrl-C and SIGTERM end the load early; what was seen so far is the result. Before
    and after the load they raise CancelledError. The servers are stopped in any case.
    """
    started = time.monotonic()

    def clock() -> float:
        return time.monotonic() - started

    with interruptible():
        async with local_stack(models, work, clock) as local:
            plan = SoakPlan(seed, list(local.doors), samples)
            injector = None if kinds is None else Injector(local, clock, clock() + seconds, kinds, seed)
            result = await _soak(local, plan, seconds, clock, injector)
    services = local.services.values()
    result.lives = [life for service in services for life in service.lives]
    # uvicorn sends itself the signal again when it has ended its work
    badly = [each for each in services if each.code not in (0, -signal.SIGTERM)]
    result.left += [f"{each.name} ended with code {each.code} at SIGTERM" for each in badly]
    prefixes = {process.prefix for process in result.processes if process.prefix}
    result.left += [str(path) for prefix in sorted(prefixes) for path in regions(prefix)]
    return result


async def _soak(
    local: LocalStack, plan: SoakPlan, seconds: float, clock: Callable[[], float], injector: Injector | None
) -> SoakResult:
    load = Load(
        servers=plan.routes,
        model="",
        mode="streaming",
        jobs=plan,
        tasks=TASKS,
        seconds=seconds,
        timeout=LIMIT,
        patience=PATIENCE_SECONDS,
        persistent=True,
        pause=PAUSE_SECONDS,
    )
    sampler, lines = Sampler(local.roots, clock), Lines(clock, seconds)
    injected = [] if injector is None else injector.injected
    async with aclosing(VoicesDoor(local.speech)) as voices, TaskScope() as tasks:
        before = await voices.names()
        beside = [tasks.spawn(work.run()) for work in (sampler, injector) if work is not None]
        loading = tasks.spawn(run(load, lines, local.doors))
        try:
            await tasks.result(loading)
        except asyncio.CancelledError:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        ended = clock()
        for task in beside:  # of the samples because idle servers need less
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await local.wait_ready()
        left = await _unfinished(local) + await _voices_left(voices, before)
    answers = [replace(each, begun=each.begun + lines.loaded) for each in loading.result().outcomes]
    return SoakResult(
        loaded=lines.loaded,
        seconds=ended,
        requests=settled(answers, injected),
        faults=injected,
        processes=list(sampler.processes.values()),
        growths=sampler.growths(),
        left=left,
        interrupted=loading.result().interrupted,
    )


async def _unfinished(local: LocalStack) -> list[str]:
    """What the servers still work at, QUIET_SECONDS after all requests have ended."""
    addresses = [f"{service.page.rpartition('/')[0]}/metrics" for service in local.services.values()]
    deadline = time.monotonic() + QUIET_SECONDS
    while True:
        pages = [(await asyncio.to_thread(get, address))[1] for address in addresses]
        left = [f"{name} is {value:g}" for name in METRICS if (value := sum(sum_of(page, name) for page in pages))]
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(1.0)


async def _voices_left(door: VoicesDoor, before: set[str]) -> list[str]:
    """Voices that were registered and not deleted, because a fault hit the request that should delete them, are
    deleted now; afterwards there must be none."""
    for name in await door.names() - before:
        await door.delete(name)
    return [f"the voice {name}" for name in sorted(await door.names() - before)]
