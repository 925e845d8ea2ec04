"""Asks for many utterances at once and notes how each request ended.

Closed loop: `tasks` tasks, each of which sends its next request when the one before is answered. Open loop: requests
leave at `rate`, at random (Poisson), whether the ones before are answered or not; their times count from when they
should have left. No request waits for another's failure, and a server that stops answering is given up in seconds.
"""

import argparse
import asyncio
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from common.client import ClientError, Recorder, Speech, one_line
from common.grpc_client import AsyncConnection, Connection, ThreadConnection, require_model
from scripts.load.jobs import Job, Jobs
from scripts.load.measure import Outcome, Run
from scripts.load.statistics import ModelTimes, between, model_times

logger = logging.getLogger(__name__)

START_SPACING = 0.004  # seconds between the tasks' first requests: real callers do not come in one instant
MAX_SHARED_CONNECTIONS = 8  # asyncio connections to one server; each carries many requests
MAX_IN_FLIGHT = 1024  # at a given rate: beyond this the server is overrun, and memory is finite
WATCH_SECONDS = 1.0  # between two looks at a server
PROBE_SECONDS = 3.0  # for its answer; two without one end its requests
LAG_SECONDS = 0.02  # between two looks at this process's own lateness
UNWRITTEN = 64  # audio files that may wait to be written


@dataclass(frozen=True)
class Load:
    """What to ask of whom.

    servers: host:port each; tasks and requests are dealt out to them in turn. tasks: of the closed loop, in all.
    rate: requests per second of the open loop, None for the closed one. warmup: jobs that are done first and not
    counted. audio_dir: where the audio goes, None to drop it.
    """

    servers: Sequence[str]
    model: str
    mode: Literal["streaming", "offline"]
    jobs: Sequence[Job]
    warmup: Sequence[Job] = ()
    tasks: int = 1
    rate: float | None = None
    timeout: float = 120.0
    client: Literal["asyncio", "sync"] = "asyncio"
    audio_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and self.client == "sync":
            raise ClientError("the thread client has one request per thread: use --client asyncio with a request rate")

    @classmethod
    def from_arguments(
        cls,
        args: argparse.Namespace,
        servers: Sequence[str],
        jobs: Jobs,
        count: int,
        tasks: int,
        rate: float | None,
        audio_dir: Path | None,
    ) -> "Load":
        """`count` of the jobs after the warm-up; the other settings as `add_load_arguments` parsed them."""
        warmup = args.warmup_requests if args.warmup_requests is not None else tasks
        return cls(
            servers=servers,
            model=args.model_name,
            mode=args.mode,
            jobs=jobs.take(count),
            warmup=jobs.take(warmup, first_voice=count),
            tasks=tasks,
            rate=rate,
            timeout=args.timeout,
            client=args.client,
            audio_dir=audio_dir,
        )

    def settings(self) -> dict[str, Any]:
        """What was asked of whom, JSON-ready."""
        return {
            "servers": list(self.servers),
            "model": self.model,
            "mode": self.mode,
            "num_tasks": None if self.rate is not None else self.tasks,
            "request_rate": self.rate,
            "warmup_requests": len(self.warmup),
            "timeout_seconds": self.timeout,
            "client": self.client,
        }

    def shape(self) -> str:
        """The load in words."""
        return f"{self.tasks} at once" if self.rate is None else f"{self.rate:g} requests per second"


def add_load_arguments(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """How many requests are asked; the caller adds how many at once."""
    group = parser.add_argument_group("measuring")
    group.add_argument("--warmup-requests", type=int, help="made first and not counted (default: one per task)")
    group.add_argument("--log-interval", type=int, default=5, help="requests between two looks at the percentiles")
    group.add_argument(
        "--client", choices=("asyncio", "sync"), default="asyncio", help="tritonclient's asyncio or thread client"
    )
    return group


async def run(load: Load, on_outcome: Callable[[Outcome, int], None]) -> Run:
    """Do it all. ClientError where a server is not there to begin with or an audio file cannot be written.

    on_outcome: told each counted outcome as it comes, and how many requests are under way. Ctrl-C and SIGTERM end the
    run early; what was measured until then is returned.
    """
    async with AsyncExitStack() as stack:
        runner = _Runner(load, on_outcome)
        await runner.connect(stack)
        return await runner.run()


class _Runner:
    def __init__(self, load: Load, on_outcome: Callable[[Outcome, int], None]) -> None:
        self._load = load
        self._on_outcome = on_outcome
        self._connections: dict[str, list[Connection]] = {}
        self._probes: dict[str, triton.InferenceServerClient] = {}
        self._lost: dict[str, str] = {}
        self._tasks: dict[asyncio.Task[None], str] = {}  # what asks, and which server
        self._live = 0
        self._outcomes: list[Outcome] = []
        self._counts = False  # whether outcomes are of the run, not of its warm-up
        self._begun = 0.0
        self._writer = AudioWriter(load.audio_dir)

    async def connect(self, stack: AsyncExitStack) -> None:
        load = self._load
        stack.push_async_callback(self._writer.aclose)
        share = -(-load.tasks // len(load.servers))
        for server in load.servers:
            probe = self._probes[server] = await stack.enter_async_context(triton.InferenceServerClient(server))
            await require_model(probe, server, load.model, load.mode)
            if load.client == "sync":
                self._connections[server] = [ThreadConnection(server) for _ in range(share)]
            else:
                count = MAX_SHARED_CONNECTIONS if load.rate is not None else min(share, MAX_SHARED_CONNECTIONS)
                self._connections[server] = [AsyncConnection(server) for _ in range(count)]
            for connection in self._connections[server]:
                stack.push_async_callback(connection.aclose)

    async def run(self) -> Run:
        load, interrupted = self._load, False
        before: list[ModelTimes] = []
        async with self._watched() as lags:
            try:
                with _interruptible():
                    await self._closed(load.warmup)
                    before = await self._counters()
                    lags.clear()
                    self._counts, self._begun = True, time.perf_counter()
                    await (self._closed(load.jobs) if load.rate is None else self._open(load.jobs, load.rate))
            except asyncio.CancelledError:
                interrupted = True
        await self._writer.finish()
        return Run(
            outcomes=self._outcomes,
            elapsed=max((outcome.begun + outcome.total for outcome in self._outcomes), default=0.0),
            unsent=len(load.jobs) - len(self._outcomes),
            lost=self._lost,
            interrupted=interrupted,
            client_lag=float(np.percentile(lags, 95)) if lags else 0.0,
            models=between(before, await self._counters()),
        )

    # --- who asks when -------------------------------------------------------------------------------------------

    async def _closed(self, jobs: Sequence[Job]) -> None:
        left = deque(jobs)
        for index in range(min(self._load.tasks, len(jobs))):
            server, connection = self._way(self._load.servers, index)
            self._start(self._work(left, server, connection, index * START_SPACING), server)
        await self._finish()

    async def _work(self, jobs: deque[Job], server: str, connection: Connection, delay: float) -> None:
        await asyncio.sleep(delay)
        while jobs and server not in self._lost:
            await self._request(jobs.popleft(), server, connection, time.perf_counter())

    async def _open(self, jobs: Sequence[Job], rate: float) -> None:
        due = self._begun + np.cumsum(np.random.default_rng(0).exponential(1 / rate, len(jobs)))
        try:
            for index, (job, at) in enumerate(zip(jobs, due.tolist(), strict=True)):
                await asyncio.sleep(at - time.perf_counter())
                if not (servers := [server for server in self._load.servers if server not in self._lost]):
                    break
                server, connection = self._way(servers, index)
                if self._live >= MAX_IN_FLIGHT:
                    refusal = f"not sent: {MAX_IN_FLIGHT} requests are unanswered; the rate is beyond the server"
                    self._note(Outcome(job.id, server, at - self._begun, (), (), 0.0, refusal))
                else:
                    self._start(self._request(job, server, connection, at), server)
        finally:
            await self._finish()

    def _way(self, servers: Sequence[str], index: int) -> tuple[str, Connection]:
        """Servers in turn, and each one's connections in turn."""
        server = servers[index % len(servers)]
        connections = self._connections[server]
        return server, connections[index // len(servers) % len(connections)]

    def _start(self, work: Coroutine[Any, Any, None], server: str) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = server
        task.add_done_callback(self._tasks.pop)

    async def _finish(self) -> None:
        """Wait for what was started; cancelled, take it along."""
        tasks = list(self._tasks)
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        for result in results:
            if isinstance(result, Exception):
                raise result

    # --- one request ---------------------------------------------------------------------------------------------

    async def _request(self, job: Job, server: str, connection: Connection, start: float) -> None:
        load, recorder, error = self._load, Recorder(start=start), ""
        self._live += 1
        try:
            await connection.record(load.model, job.utterance(), load.mode, load.timeout, recorder)
            speech = recorder.finish()
        except ClientError as problem:
            error = str(problem)
        except asyncio.CancelledError:
            if server not in self._lost:
                raise
            error = self._lost[server]
        finally:
            self._live -= 1
        self._note(
            Outcome(
                id=job.id,
                server=server,
                begun=start - self._begun,
                arrivals=tuple(recorder.arrivals),
                samples=tuple(recorder.samples),
                total=recorder.elapsed,
                error=error,
                timeline=tuple(recorder.timeline),
            )
        )
        if error:
            await self._require_alive(server)
        elif self._counts:
            await self._writer.write(job.id, speech)

    def _note(self, outcome: Outcome) -> None:
        if self._counts:
            self._outcomes.append(outcome)
            self._on_outcome(outcome, self._live)
        elif outcome.error:
            logger.warning("warm-up, %s: %s", outcome.id, outcome.error)

    # --- are the servers there, is this process in time ----------------------------------------------------------

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[list[float]]:
        """Looks after the servers; the list fills with how late this process is."""
        lags: list[float] = []
        watches = [asyncio.ensure_future(self._watch(server)) for server in self._load.servers]
        watches.append(asyncio.ensure_future(_measure_lag(lags)))
        try:
            yield lags
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, server: str) -> None:
        silent = 0
        while server not in self._lost:
            await asyncio.sleep(WATCH_SECONDS)
            reason = await self._silence(server)
            silent = silent + 1 if reason else 0
            if silent == 2:
                self._lose(server, reason)

    async def _require_alive(self, server: str) -> None:
        """After a failure: a server that is gone must not fail every request that is left, one by one."""
        if server not in self._lost and (reason := await self._silence(server)):
            self._lose(server, reason)

    async def _silence(self, server: str) -> str:
        """Why a server does not answer; "" when it does."""
        try:
            if await self._probes[server].is_server_live(client_timeout=PROBE_SECONDS):
                return ""
            return "it says that it is not live"
        except InferenceServerException as error:
            return one_line(error.message())

    def _lose(self, server: str, reason: str) -> None:
        self._lost[server] = f"{server} stopped answering: {reason}"
        for task, asked in self._tasks.items():
            if asked == server and task is not asyncio.current_task():
                task.cancel()

    async def _counters(self) -> list[ModelTimes]:
        servers = [server for server in self._load.servers if server not in self._lost]
        return [model for server in servers for model in await model_times(self._probes[server], server)]


async def _measure_lag(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + LAG_SECONDS
        await asyncio.sleep(LAG_SECONDS)
        lags.append(max(0.0, time.perf_counter() - due))


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM cancel the running task once; a second one ends the process as usual."""
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


class AudioWriter:
    """Writes audio files in a thread of its own; `UNWRITTEN` of them may wait."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audio")
        self._places = asyncio.Semaphore(UNWRITTEN)
        self._pending: set[asyncio.Future[None]] = set()
        self._error: BaseException | None = None

    async def write(self, name: str, speech: Speech) -> None:
        if self._directory is None:
            return
        await self._places.acquire()
        path = self._directory / f"{name}.wav"
        future = asyncio.get_running_loop().run_in_executor(self._thread, speech.save, path)
        self._pending.add(future)
        future.add_done_callback(self._written)

    def _written(self, future: asyncio.Future[None]) -> None:
        self._pending.discard(future)
        self._places.release()
        self._error = self._error or future.exception()

    async def finish(self) -> None:
        """Wait for the files; raises the first ClientError of them."""
        if self._pending:
            await asyncio.wait(self._pending)
        if self._error is not None:
            raise self._error

    async def aclose(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
