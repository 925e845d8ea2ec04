"""One soak: the load, the faults and the samples at the same time, and what is left when they have ended."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from cosyvoice_triton.load.plan import Load
from cosyvoice_triton.load.runner import interruptible, run
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.monitoring.metrics import LIVE, STREAMS, sum_of
from cosyvoice_triton.tasks import TaskScope

from tests.soak.cases import SoakPlan
from tests.soak.faults import FaultKind, InjectedFault, Injector
from tests.soak.ledger import Ledger
from tests.soak.routes import VoicesDoor
from tests.soak.sampling import Growth, ProcessHistory, Sampler, regions
from tests.soak.stack import Life, LocalStack, local_stack

PAUSE_SECONDS = 5.0  # after an error or a refusal, so that a server that is down or full does not get thousands
TASKS = 6  # requests at a time
PATIENCE_SECONDS = 60.0  # without any part of an answer, which are a hang
QUIET_SECONDS = 30.0  # after the last request, for the servers to end all work
LIMIT = 300.0  # seconds for a whole answer; a silent server is given up much earlier


@dataclass(frozen=True)
class SoakSettings:
    """faults: whether to inject any; chosen: these kinds instead of all. models: the checkpoint. work: a directory for
    the servers' files.
    """

    minutes: float
    seed: int
    faults: bool
    models: Path
    work: Path
    chosen: Sequence[FaultKind] = ()


@dataclass
class SoakResult:
    """All that a run has found; times are seconds since its start. loaded, seconds: the load's start and end. left:
    what the servers still had when all requests had ended, one line each.
    """

    settings: SoakSettings
    ledger: Ledger
    loaded: float
    seconds: float = 0.0
    faults: list[InjectedFault] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    processes: list[ProcessHistory] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    interrupted: bool = False

    def problems(self) -> list[str]:
        """One line for each loss, hang, growth and whatever else must not be; the run is good without any."""
        found = [
            f"{each.outcome}: request {each.answer.id}, {each.route}, begun at {each.begun:.1f} s, "
            f"ended at {each.ended:.1f} s: {each.answer.error}"
            for each in self.ledger.offenders()
        ]
        found += [
            f"growth: {each.process} (process {each.pid}), {each.measure} {each.middle:.1f} -> {each.last:.1f} "
            f"within {each.seconds:.0f} s, more than {each.limit:.1f}"
            for each in self.growths
            if each.grows
        ]
        found += [
            f"ended by itself: {each.name} at {each.ended:.1f} s with code {each.code}: {each.last_words}"
            for each in self.lives
            if each.ended is not None and not each.fault
        ]
        found += [f"fault {each.name} at {each.begun:.1f} s: {each.note}" for each in self.faults if each.failed]
        return found + [f"left behind: {line}" for line in self.left]


async def soak(settings: SoakSettings, samples: Sequence[Sample]) -> SoakResult:
    """The whole run. ClientError, RuntimeError or OSError if it cannot begin.

    Ctrl-C and SIGTERM end the load early; what was seen so far is the result. Before and after the load they raise
    CancelledError. The servers are stopped in any case.
    """
    started = time.monotonic()

    def clock() -> float:
        return time.monotonic() - started

    with interruptible():
        async with local_stack(settings.models, settings.work, clock) as local:
            result = await _soak(settings, samples, clock, local)
    result.lives = [life for service in local.services for life in service.lives]
    # uvicorn sends itself the signal again when it has ended its work
    badly = [each for each in local.services if each.code not in (0, -signal.SIGTERM)]
    result.left += [f"{each.name} ended with code {each.code} at SIGTERM" for each in badly]
    prefixes = {process.prefix for process in result.processes if process.prefix}
    result.left += [str(path) for prefix in sorted(prefixes) for path in regions(prefix)]
    return result


async def _soak(
    settings: SoakSettings, samples: Sequence[Sample], clock: Callable[[], float], local: LocalStack
) -> SoakResult:
    sampler, seconds = Sampler(local.roots, clock), 60 * settings.minutes
    result = SoakResult(settings, Ledger(clock, seconds), loaded=clock())
    injector = Injector(local, clock, clock() + seconds, settings.chosen, settings.seed)
    doors, voices = local.addresses.doors(), VoicesDoor(local.addresses.speech)
    load = Load(
        servers=list(doors),
        model="",
        mode="streaming",
        jobs=SoakPlan(settings.seed, list(doors), samples),
        tasks=TASKS,
        seconds=seconds,
        timeout=LIMIT,
        patience=PATIENCE_SECONDS,
        persistent=True,
        pause=PAUSE_SECONDS,
    )
    async with AsyncExitStack() as stack:
        for door in (voices, *doors.values()):
            stack.push_async_callback(door.aclose)
        before = await voices.names()
        tasks = await stack.enter_async_context(TaskScope())
        beside = [tasks.spawn(sampler.run()), *([tasks.spawn(injector.run())] if settings.faults else [])]
        loading = tasks.spawn(run(load, result.ledger, doors))
        try:
            await tasks.result(loading)
        except asyncio.CancelledError:
            result.interrupted = True
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        result.seconds = clock()
        for task in beside:  # of the samples because idle servers need less
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        injector.end()
        result.faults = injector.injected
        await local.wait_ready()
        result.left += await _unfinished(local)
        result.left += await _voices_left(voices, before)
    result.ledger.settle(result.faults)
    result.processes, result.growths = list(sampler.processes.values()), sampler.growths()
    return result


async def _unfinished(local: LocalStack) -> list[str]:
    """What the servers still work at, QUIET_SECONDS after all requests have ended."""
    wanted = {
        f"{local.serve.page.rpartition('/')[0]}/metrics": (LIVE.name, STREAMS.name),
        f"{local.addresses.speech}/metrics": ("speech_live_streams", "speech_live_sessions"),
    }
    deadline = time.monotonic() + QUIET_SECONDS
    while True:
        left = []
        async with aiohttp.ClientSession() as http:
            for page, names in wanted.items():
                async with http.get(page) as answer:
                    text = await answer.text()
                left += [f"{name} is {value:g}" for name in names if (value := sum_of(text, name))]
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(1.0)


async def _voices_left(door: VoicesDoor, before: set[str]) -> list[str]:
    """Voices that were registered and not deleted, because a fault hit the request that should delete them, are
    deleted now; afterwards there must be none."""
    for name in await door.names() - before:
        await door.delete(name)
    return [f"the voice {name}" for name in sorted(await door.names() - before)]
