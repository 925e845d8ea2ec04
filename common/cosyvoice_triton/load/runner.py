"""Sends many requests concurrently and records how each of them ended.

Closed loop: each of `tasks` tasks sends its next request when the previous one is answered, or with `listening` when
its audio has been played. Open loop: requests are sent at random times (Poisson) at `rate`, whether earlier ones are
answered or not; latencies are measured from the time a request was due. A failing request does not delay others, and a
server that stops answering is given up within seconds, unless it is expected to come back.
"""

import asyncio
import logging
import re
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from typing import Any, Protocol

import numpy as np
from async_timeout import timeout
from tqdm import tqdm

from cosyvoice_triton.audible import leading_silence
from cosyvoice_triton.client.answer import Recorder, SpeechResult
from cosyvoice_triton.client.failures import ClientError, one_line
from cosyvoice_triton.load.doors import Door, opened
from cosyvoice_triton.load.measure import CANCELLED, HUNG, ModelTimes, RequestOutcome, Run, between
from cosyvoice_triton.load.plan import Load, LoadJob
from cosyvoice_triton.tasks import TaskScope

RECENT = 1000  # latest requests, over which the shown percentiles are computed
SHOWN_ERRORS = 5  # the rest are in the report
WATCH_SECONDS = 1.0  # between two probes of a server
PROBE_SECONDS = 2.0  # for its answer; after two probes without one it is lost
LAG_SECONDS = 0.02  # between two measurements of this process's own delay
logger = logging.getLogger(__name__)

LISTENERS_SPREAD = 8.0  # seconds within which listeners start: about the length of an utterance
START_SPACING = 0.004  # seconds between the tasks' first requests: real callers do not arrive at the same instant
NO_DOORS: Mapping[str, Door] = {}
MAX_SHARED_CONNECTIONS = 8  # asyncio connections to one server; each carries many requests
MAX_IN_FLIGHT = 2048  # at a given rate: with more the server is overloaded, and memory is limited


class Progress:
    """Show how many requests have ended, and when the latest were heard."""

    def __init__(self, total: int, title: str) -> None:
        self._total = total
        self._title = title
        self._bar: tqdm[None] | None = None
        self._audible: deque[float] = deque(maxlen=RECENT)
        self._endings: Counter[str] = Counter()

    def begins(self, phase: str) -> None:
        """Begins a new bar, because the warm-up or the measurement starts."""
        self.close()
        self._bar = tqdm(total=self._total, desc=f"{self._title}, {phase}", unit="request", leave=phase == "measuring")

    def ended(self, outcome: RequestOutcome, live: int) -> None:
        """Counts a request that has ended; `live` others are in flight."""
        assert self._bar is not None, "call begins() first"
        self._endings["failed" if outcome.failed else outcome.ending] += 1
        if outcome.failed and self._endings["failed"] <= SHOWN_ERRORS:
            more = "; further ones are in the report" if self._endings["failed"] == SHOWN_ERRORS else ""
            self._bar.write(f"failed: {outcome.id}: {outcome.error}{more}", file=sys.stderr)
        if not outcome.error and (audible := outcome.audible()) is not None:
            self._audible.append(1000 * audible)
        shown = f"{live} in flight, {self._endings['refused']} refused, {self._endings['failed']} failed"
        if self._audible:
            p50, p95 = np.percentile(self._audible, (50, 95))
            shown = f"first audible p50 {p50:.0f} p95 {p95:.0f} ms, {shown}"
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


async def measure_lags(measured: list[float]) -> None:
    """Add the delays of this process's timers, in seconds, until it is cancelled."""
    while True:
        due = time.perf_counter() + LAG_SECONDS
        await asyncio.sleep(LAG_SECONDS)
        measured.append(max(0.0, time.perf_counter() - due))


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM cancel the running task once; a second one ends the process as usual."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()

    def cancel() -> None:
        release()
        task.cancel()

    def release() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, cancel)
    try:
        yield
    finally:
        release()


class Observer(Protocol):
    """What is told how a run gets on."""

    def begins(self, phase: str) -> None:
        """Note that the warm-up or the measurement begins."""

    def ended(self, outcome: RequestOutcome, live: int) -> None:
        """Note that a request has ended while `live` others are in flight."""


def measured(load: Load, title: str, doors: Mapping[str, Door] = NO_DOORS) -> Run:
    """Run a load with a progress bar.

    doors, ClientError: as in `run`. Ctrl-C and SIGTERM end the run early; what was measured so far is returned.
    """
    progress = Progress(len(load.jobs), title)

    async def work() -> Run:
        with interruptible():
            return await run(load, progress, doors)

    try:
        return asyncio.run(work())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        progress.close()


async def run(load: Load, observer: Observer, doors: Mapping[str, Door] = NO_DOORS) -> Run:
    """Run a load and return its results, also if it is cancelled after its beginning.

    doors: of the names in `load.servers` that are no addresses; they stay open.
    ClientError if a server is not ready at the start or an audio file cannot be written.
    """
    if load.audio_dir is not None:
        try:
            load.audio_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ClientError(f"cannot write to {load.audio_dir}: {error}; choose another with --log-dir") from None
    async with AsyncExitStack() as stack:
        share = MAX_SHARED_CONNECTIONS if load.rate else -(-load.tasks // len(load.servers))
        all_doors = dict(doors)
        for server in load.servers:
            if server not in doors:
                door = opened(server, load.model, load.mode, min(share, MAX_SHARED_CONNECTIONS))
                stack.push_async_callback(door.aclose)
                await door.require()
                all_doors[server] = door
        return await _Runner(load, all_doors, observer).run()


class _Runner:
    def __init__(self, load: Load, doors: Mapping[str, Door], observer: Observer) -> None:
        self._load = load
        self._doors = doors
        self._observer = observer
        self._lost: dict[str, str] = {}  # servers that do not answer, and how they stopped
        self._tasks: dict[asyncio.Task[object], str] = {}  # by task: its server
        self._live = 0
        self._taken = 0  # jobs of this phase
        self._outcomes: list[RequestOutcome] = []
        self._counts = False  # whether outcomes count, as they do after the warm-up
        self._begun = 0.0
        self._models: list[ModelTimes] = []  # the servers' counters before the measurement

    async def run(self) -> Run:
        load, interrupted = self._load, False
        late: list[float] = []
        async with TaskScope() as tasks:
            tasks.spawn(measure_lags(late))
            for server in () if load.persistent else self._doors:
                tasks.spawn(self._watch(server))
            try:
                await tasks.result(self._phases(late))
            except asyncio.CancelledError:
                interrupted = True
        return Run(
            outcomes=self._outcomes,
            elapsed=max((outcome.ended for outcome in self._outcomes), default=0.0),
            unsent=len(load.jobs) - len(self._outcomes),
            lost=self._lost,
            interrupted=interrupted,
            client_lag=float(np.percentile(late, 95)) if late else 0.0,
            models=between(self._models, await self._model_times()) if self._counts else [],
        )

    async def _phases(self, late: list[float]) -> None:
        """Warm up, then measure. late: this process's delays, of which those of the warm-up are dropped."""
        load = self._load
        self._observer.begins("warming up")
        await self._closed(load.warmup)
        self._models = await self._model_times()
        late.clear()
        self._observer.begins("measuring")
        self._counts, self._begun = True, time.perf_counter()
        await (self._closed(load.jobs) if load.rate is None else self._open(load.jobs, load.rate))

    # --- when requests are sent -----------------------------------------------------------------------------------

    async def _closed(self, jobs: Sequence[LoadJob]) -> None:
        self._taken, spread = 0, np.random.default_rng(0)
        for index in range(min(self._load.tasks, len(jobs))):
            server = self._load.servers[index % len(self._load.servers)]
            delay = spread.uniform(0, LISTENERS_SPREAD) if self._load.listening else index * START_SPACING
            self._start(self._work(jobs, server, delay), server)
        await self._finish()

    async def _work(self, jobs: Sequence[LoadJob], server: str, delay: float) -> None:
        load, last = self._load, time.perf_counter() + self._load.seconds
        await asyncio.sleep(delay)
        while self._taken < len(jobs) and server not in self._lost and (start := time.perf_counter()) < last:
            self._taken += 1
            job = jobs[self._taken - 1]
            outcome = await self._request(job, job.door or server, start)
            if outcome.ending == "refused" or outcome.ending == "failed" and load.persistent:
                await asyncio.sleep(load.pause)
            elif load.listening and self._taken < len(jobs) and outcome.arrivals:
                await asyncio.sleep(start + outcome.arrivals[0] + outcome.seconds - time.perf_counter())

    async def _open(self, jobs: Sequence[LoadJob], rate: float) -> None:
        due = self._begun + np.cumsum(np.random.default_rng(0).exponential(1 / rate, len(jobs)))
        try:
            for index, (job, at) in enumerate(zip(jobs, due.tolist(), strict=True)):
                await asyncio.sleep(at - time.perf_counter())
                if not (servers := [server for server in self._load.servers if server not in self._lost]):
                    break
                server = servers[index % len(servers)]
                if self._live >= MAX_IN_FLIGHT:
                    refusal = f"not sent: {MAX_IN_FLIGHT} requests are unanswered; the rate is too high for the server"
                    self._note(RequestOutcome(job.id, server, at - self._begun, (), (), 0.0, refusal))
                else:
                    self._start(self._request(job, job.door or server, at), server)
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            raise
        finally:
            await self._finish()

    def _start(self, work: Coroutine[Any, Any, object], server: str) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = server
        task.add_done_callback(self._tasks.pop)

    async def _finish(self) -> None:
        """Wait for all tasks; if cancelled, they are cancelled too."""
        tasks = list(self._tasks)
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        for result in results:
            if isinstance(result, Exception):
                raise result

    # --- servers that stop answering ------------------------------------------------------------------------------

    async def _watch(self, server: str) -> None:
        """Probe a server regularly, until it is lost."""
        silent = 0
        while server not in self._lost:
            await asyncio.sleep(WATCH_SECONDS)
            reason = await self._doors[server].silence(PROBE_SECONDS)
            silent = silent + 1 if reason else 0
            if silent == 2:
                self._lose(server, reason)

    async def _check(self, server: str) -> None:
        """Probe at once after a failure, so that a dead server does not fail all remaining requests one by one."""
        if server not in self._lost and (reason := await self._doors[server].silence(PROBE_SECONDS)):
            self._lose(server, reason)

    def _lose(self, server: str, reason: str) -> None:
        """Give a server up, and cancel the tasks that wait for it."""
        if server in self._lost:
            return
        self._lost[server] = f"{server} stopped answering: {reason}"
        for task, used in self._tasks.items():
            if used == server and task is not asyncio.current_task():
                task.cancel()

    # --- one request ---------------------------------------------------------------------------------------------

    async def _request(self, job: LoadJob, server: str, start: float) -> RequestOutcome:
        load, recorder, error, silence = self._load, Recorder(start), "", None
        speech: SpeechResult | None = None
        self._live += 1
        try:
            if await self._record(job, server, recorder):
                speech = recorder.finish()
                silence = leading_silence(speech.waveform)
            else:
                error = CANCELLED
        except ClientError as problem:
            error = str(problem)
        except asyncio.CancelledError:
            if server not in self._lost:
                raise
            error = self._lost[server]
        except Exception as bug:  # of the door's: it must not end the other requests
            error = one_line(f"{type(bug).__name__}: {bug}")
        finally:
            self._live -= 1
        rejected = bool(error and job.expected and re.search(job.expected, error))
        if job.expected and not rejected:
            error = f"{error or 'an answer'} instead of the error /{job.expected}/"
        outcome = RequestOutcome(
            id=job.id,
            server=server,
            begun=start - self._begun,
            arrivals=tuple(recorder.arrivals),
            samples=tuple(recorder.samples),
            total=recorder.elapsed,
            error=error,
            timeline=tuple(recorder.timeline),
            silence=silence,
            rejected=rejected,
        )
        self._note(outcome)
        if outcome.failed and not load.persistent:
            await self._check(server)
        elif speech is not None and self._counts and load.audio_dir is not None:
            await asyncio.to_thread(speech.save, load.audio_dir / f"{job.id}.wav")
        return outcome

    async def _record(self, job: LoadJob, server: str, recorder: Recorder) -> bool:
        """Send a request and record its answer; return False if its caller has left before the end. ClientError."""
        parts, loop, load = 0, asyncio.get_running_loop(), self._load
        leaving, patience = timeout(job.cancel_after), timeout(load.patience)
        try:
            async with leaving, patience, aclosing(self._doors[server].stream(job.utterance(), load.timeout)) as answer:
                async for part in answer:
                    recorder.add(part)
                    parts += 1
                    if parts == job.cancel_after_parts:
                        return False
                    if load.patience is not None:
                        patience.update(loop.time() + load.patience)
        except asyncio.TimeoutError:
            if leaving.expired:
                return False
            raise ClientError(f"{HUNG}{load.patience:g} s, after {parts} parts") from None
        return True

    def _note(self, outcome: RequestOutcome) -> None:
        if self._counts:
            self._outcomes.append(outcome)
            self._observer.ended(outcome, self._live)
        elif outcome.error:
            logger.warning("warm-up, %s: %s", outcome.id, outcome.error)

    async def _model_times(self) -> list[ModelTimes]:
        servers = [server for server in self._load.servers if server not in self._lost]
        return [model for server in servers for model in await self._doors[server].model_times()]
