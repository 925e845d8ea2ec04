"""One soak: the load, the faults and the samples at the same time, and what is left when they have ended."""

import asyncio
import dataclasses
import itertools
import re
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from cosyvoice_triton import stacks
from cosyvoice_triton.client.grpc_client import AsyncConnection
from cosyvoice_triton.client.requests import ClientError, one_line, unreachable
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE
from cosyvoice_triton.load.samples import Sample
from cosyvoice_triton.load.watch import interruptible
from cosyvoice_triton.monitoring.metrics import LIVE, STREAMS, sum_of
from cosyvoice_triton.tasks import TaskScope
from cosyvoice_triton.voice.audio import at_rate
from tritonclient.utils import InferenceServerException

from tests.soak.cases import SoakCase, SoakPlan
from tests.soak.faults import FaultKind, InjectedFault, Injector
from tests.soak.ledger import Ledger, Outcome, Request
from tests.soak.routes import Addresses, Client, Parts, wav
from tests.soak.sampling import Growth, ProcessHistory, Sampler, regions
from tests.soak.stack import Life, LocalStack, local_stack

PAUSE_SECONDS = 5.0  # after an error or a refusal, so that a server that is down or full does not get thousands
QUIET_SECONDS = 30.0  # after the last request, for the servers to end all work
UNKNOWN_VOICE = "HTTP 400 .*unknown speaker"


Observe = Callable[[float, Ledger, str], None]  # seconds of load, the requests so far, the fault that lasts


@dataclass(frozen=True)
class SoakSettings:
    """faults: whether to inject any; chosen: these kinds instead of all. addresses: of running servers; None: a stack
    of our own, on the checkpoint in `models`. work: a directory for its files.
    """

    minutes: float
    seed: int
    tasks: int
    patience: float
    faults: bool
    models: Path
    work: Path
    chosen: Sequence[FaultKind] = ()
    addresses: Addresses | None = None


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
            f"{each.outcome}: request {each.number}, {each.route}, {each.what}, begun at {each.begun:.1f} s, "
            f"ended at {each.ended or self.seconds:.1f} s: {each.reason}"
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


class MixedLoad:
    """Sends the cases of a plan with `tasks` requests at a time."""

    def __init__(
        self, plan: SoakPlan, client: Client, ledger: Ledger, patience: float, clock: Callable[[], float]
    ) -> None:
        self._plan = plan
        self._client = client
        self._ledger = ledger
        self._patience = patience
        self._clock = clock
        self._numbers = itertools.count(1)

    async def run(self, tasks: int, seconds: float) -> None:
        """Begin requests for so many seconds; return when the last has ended."""
        await asyncio.gather(*(self._work(seconds) for _ in range(tasks)))

    async def _work(self, seconds: float) -> None:
        while self._clock() < seconds:
            case = self._plan.case(next(self._numbers))
            good = await (self._voice(case) if case.route == "voices" else self._case(case))
            if not good:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _case(self, case: SoakCase) -> bool:
        expected = None if case.bad is None else case.bad.answer
        request = await self.request(case, case.what, lambda parts: self._client.send(case, parts), expected)
        return request.answered

    async def _voice(self, case: SoakCase) -> bool:
        """The life of a voice: registered, used, deleted, unknown."""
        name, sample = f"soak-{case.number}", self._plan.samples[case.choice % len(self._plan.samples)]
        assert sample.prompt_audio is not None
        audio = wav(at_rate(sample.prompt_audio, PROMPT_SAMPLE_RATE))
        if case.bad is not None:
            given = {"name": name, "audio": audio, "transcript": "", **case.bad.change}
            added = await self._step(case, case.what, lambda _: self._client.add_voice(**given), case.bad.answer)
            return added.answered
        client = self._client
        added = await self._step(case, "add", lambda _: client.add_voice(name, audio, sample.prompt_text))
        said = None
        if added.outcome == "done":
            said = await self.request(case, f"{case.kind}: say", lambda parts: client.say(name, parts))
        deleted = await self._step(case, "delete", lambda _: client.delete_voice(name, added.outcome != "done"))
        if said is None or deleted.outcome != "done":
            return False
        unknown = await self._step(case, "say deleted", lambda parts: client.say(name, parts), UNKNOWN_VOICE)
        return said.answered and unknown.answered

    async def _step(
        self, case: SoakCase, what: str, send: Callable[[Parts], Awaitable[None]], expected: str | None = None
    ) -> Request:
        """A request that is never cancelled."""
        return await self.request(case, what, send, expected, cancel=False)

    async def request(
        self,
        case: SoakCase,
        what: str,
        send: Callable[[Parts], Awaitable[None]],
        expected: str | None = None,
        cancel: bool = True,
    ) -> Request:
        """Send one request and account for it. expected: pattern of the error that must be the answer."""
        request = self._ledger.open(case.number, case.route, what, self._clock())
        changed = asyncio.Event()
        parts = Parts(changed.set)
        task = asyncio.create_task(_sent(send, parts))
        cancels = cancel and case.kind == "cancel" and not case.barge_in
        try:
            outcome, reason = await self._watch(task, parts, changed, request, case if cancels else None)
        except asyncio.CancelledError:
            self._ledger.close(request, "cancelled", "the run was interrupted", self._clock())
            raise
        finally:
            task.cancel()
        if outcome is None:
            outcome, reason = _judged(task, expected)
        if outcome == "done" and case.barge_in:
            outcome = "cancelled"
        self._ledger.close(request, outcome, reason, self._clock())
        return request

    async def _watch(
        self, task: "asyncio.Task[None]", parts: Parts, changed: asyncio.Event, request: Request, case: SoakCase | None
    ) -> tuple[Outcome | None, str]:
        """Until the request has ended by itself (None), is cancelled as `case` says, or has been silent too long."""
        begun = last = self._clock()
        while not task.done():
            silent = self._patience - (self._clock() - last)
            early = case is not None and not case.cancel_after
            wait = min(silent, begun + case.pause - self._clock()) if early and case is not None else silent
            await _first_of(task, changed, max(0.0, wait))
            now = self._clock()
            if changed.is_set():
                changed.clear()
                last, request.first = now, now if request.first is None and parts.count else request.first
            if task.done():
                break
            if case is not None and (parts.count >= case.cancel_after > 0 or early and now >= begun + case.pause):
                return await self._cancelled(task)
            if now - last >= self._patience:
                task.cancel()
                return "hung", f"nothing for {self._patience:g} s, after {parts.count} parts"
        return None, ""

    async def _cancelled(self, task: "asyncio.Task[None]") -> tuple[Outcome, str]:
        task.cancel()
        await asyncio.wait({task}, timeout=self._patience)
        return ("cancelled", "") if task.done() else ("hung", "the cancelled request does not end")


async def _sent(send: Callable[[Parts], Awaitable[None]], parts: Parts) -> None:
    await send(parts)


async def _first_of(task: "asyncio.Task[None]", changed: asyncio.Event, seconds: float) -> None:
    """Wait for the end of the task or the event."""
    waiting: asyncio.Future[Any] = asyncio.ensure_future(changed.wait())
    await asyncio.wait({task, waiting}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _judged(task: "asyncio.Task[None]", expected: str | None) -> tuple[Outcome | None, str]:
    """The outcome of a request that has ended by itself; None for an error."""
    error = task.exception()
    reason = (
        "" if error is None else str(error) if isinstance(error, ClientError) else f"{type(error).__name__}: {error}"
    )
    reason = one_line(reason)[:500]
    if expected is None:
        return (None, reason) if error is not None else ("done", "")
    if error is None:
        return None, f"an answer instead of the error /{expected}/"
    return ("rejected", reason) if re.search(expected, reason) else (None, f"{reason} (expected /{expected}/)")


async def soak(settings: SoakSettings, samples: Sequence[Sample], observe: Observe) -> SoakResult:
    """The whole run. ClientError, RuntimeError or OSError if it cannot begin.

    Ctrl-C and SIGTERM end the load early; what was seen so far is the result. Before and after the load they raise
    CancelledError. The servers are stopped in any case.
    """
    started = time.monotonic()

    def clock() -> float:
        return time.monotonic() - started

    with interruptible():
        if settings.addresses is not None:
            return await _soak(settings, samples, observe, clock, settings.addresses, None)
        async with local_stack(settings.models, settings.work, clock) as local:
            result = await _soak(settings, samples, observe, clock, local.addresses, local)
    result.lives = [life for service in local.services for life in service.lives]
    # uvicorn sends itself the signal again when it has ended its work
    badly = [each for each in local.services if each.code not in (0, -signal.SIGTERM)]
    result.left += [f"{each.name} ended with code {each.code} at SIGTERM" for each in badly]
    prefixes = {process.prefix for process in result.processes if process.prefix}
    result.left += [str(path) for prefix in sorted(prefixes) for path in regions(prefix)]
    return result


async def _soak(
    settings: SoakSettings,
    samples: Sequence[Sample],
    observe: Observe,
    clock: Callable[[], float],
    addresses: Addresses,
    local: LocalStack | None,
) -> SoakResult:
    sampler = Sampler(dict if local is None else local.roots, clock)
    result = SoakResult(settings, Ledger(), loaded=clock())
    until = clock() + 60 * settings.minutes
    injector = None
    if local is not None and settings.faults:
        injector = Injector(local, clock, until, settings.chosen, settings.seed)
    async with Client(await with_models(addresses)) as client:
        plan = SoakPlan(settings.seed, client.addresses.routes, samples)
        load = MixedLoad(plan, client, result.ledger, settings.patience, clock)
        before = await client.voices() if addresses.speech else []
        async with TaskScope() as tasks:
            sampling = tasks.spawn(sampler.run())
            tasks.spawn(_observing(observe, result, clock, until, injector))
            injecting = None if injector is None else tasks.spawn(injector.run())
            loading = tasks.spawn(load.run(settings.tasks, until))
            try:
                await tasks.result(loading)
            except asyncio.CancelledError:
                result.interrupted = True
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
            result.seconds = clock()
            sampling.cancel()  # idle servers need less
            if injecting is not None and injector is not None:
                injecting.cancel()
                await asyncio.gather(injecting, return_exceptions=True)
                injector.end()
                result.faults = injector.injected
            if local is not None:
                await local.wait_ready()
                result.left += await _unfinished(local)
            if addresses.speech:
                result.left += await _voices_left(client, before)
    result.ledger.settle(result.faults)
    result.processes, result.growths = list(sampler.processes.values()), sampler.growths()
    return result


async def _observing(
    observe: Observe, result: SoakResult, clock: Callable[[], float], until: float, injector: Injector | None
) -> None:
    while True:
        observe(clock() - result.loaded, result.ledger, "" if injector is None else injector.present)
        await asyncio.sleep(1.0)


async def with_models(addresses: Addresses) -> Addresses:
    """The addresses with the models that Triton serves, streamed and offline. ClientError if it does not answer."""
    if not addresses.grpc:
        return addresses
    found = {True: "", False: ""}  # by whether it is decoupled
    async with AsyncConnection(addresses.grpc) as connection:
        try:
            for model in stacks.orchestrators():
                if await connection.client.is_model_ready(model):
                    config = (await connection.client.get_model_config(model)).config
                    decoupled = bool(config.model_transaction_policy.decoupled)
                    found[decoupled] = found[decoupled] or model
        except InferenceServerException as error:
            raise unreachable(addresses.grpc, error.message()) from None
    return dataclasses.replace(addresses, streaming=found[True], offline=found[False])


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


async def _voices_left(client: Client, before: Sequence[str]) -> list[str]:
    """Voices that were registered and not deleted, because a fault hit the request that should delete them, are
    deleted now; afterwards there must be none."""
    for name in set(await client.voices()) - set(before):
        await client.delete_voice(name)
    return [f"the voice {name}" for name in sorted(set(await client.voices()) - set(before))]
