"""Sends many requests concurrently and records how each of them ended.

Closed loop: each of `tasks` tasks sends its next request when the previous one is answered, or with `listening` when
its audio has been played. Open loop: requests are sent at random times (Poisson) at `rate`, whether earlier ones are
answered or not; latencies are measured from the time a request was due. A failing request does not delay others, and a
server that stops answering is given up within seconds.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import numpy as np
import tritonclient.grpc.aio as triton
from async_timeout import timeout

from cosyvoice_triton.addresses import channel_options
from cosyvoice_triton.client.grpc_client import AsyncConnection, require_model
from cosyvoice_triton.client.requests import ClientError, Recorder
from cosyvoice_triton.load.audible import leading_silence
from cosyvoice_triton.load.jobs import LoadJob
from cosyvoice_triton.load.measure import CANCELLED, RequestOutcome, Run
from cosyvoice_triton.load.plan import Load
from cosyvoice_triton.load.progress import Progress
from cosyvoice_triton.load.speech_service import SpeechService
from cosyvoice_triton.load.statistics import ModelTimes, between, model_times, token2wav_counters, token2wav_figures
from cosyvoice_triton.load.watch import ServerWatch, interruptible, lags, memory_of

logger = logging.getLogger(__name__)

LISTENERS_SPREAD = 8.0  # seconds within which listeners start: about the length of an utterance
REFUSED_PAUSE = 1.0  # seconds until a task whose request was refused sends its next one
START_SPACING = 0.004  # seconds between the tasks' first requests: real callers do not arrive at the same instant
MAX_SHARED_CONNECTIONS = 8  # asyncio connections to one server; each carries many requests
MAX_IN_FLIGHT = 1024  # at a given rate: with more the server is overloaded, and memory is limited

Connection: TypeAlias = AsyncConnection | SpeechService
Probe: TypeAlias = triton.InferenceServerClient | SpeechService


def measured(load: Load, title: str, interval: int) -> Run:
    """Run a load with a progress bar. interval: requests between two updates of its percentiles. ClientError as in
    `run`."""
    progress = Progress(len(load.jobs), title, interval)
    try:
        return asyncio.run(run(load, progress))
    finally:
        progress.close()


async def run(load: Load, progress: Progress) -> Run:
    """Runs a load and returns its results.

    ClientError if a server is not ready at the start or an audio file cannot be written.

    Ctrl-C and SIGTERM end the run early; what was measured so far is returned.
    """
    if load.audio_dir is not None:
        try:
            load.audio_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ClientError(f"cannot write to {load.audio_dir}: {error}; choose another with --log-dir") from None
    async with AsyncExitStack() as stack:
        probes: dict[str, Probe] = {}
        connections: dict[str, Sequence[Connection]] = {}
        for server in load.servers:
            if server.startswith(("http://", "https://")):
                speech = SpeechService(server)
                stack.push_async_callback(speech.aclose)
                await speech.require()
                probes[server], connections[server] = speech, [speech]
                continue
            probes[server] = probe = await stack.enter_async_context(
                triton.InferenceServerClient(server, channel_args=channel_options(server))
            )
            await require_model(probe, server, load.model, load.mode)
            connections[server] = _connections(load, server)
            for connection in connections[server]:
                stack.push_async_callback(connection.aclose)
        return await _Runner(load, probes, connections, progress).run()


def _connections(load: Load, server: str) -> list[AsyncConnection]:
    share = -(-load.tasks // len(load.servers))
    most = share if load.rate is None else MAX_SHARED_CONNECTIONS
    return [AsyncConnection(server) for _ in range(min(most, MAX_SHARED_CONNECTIONS))]


class _Runner:
    def __init__(
        self,
        load: Load,
        probes: dict[str, Probe],
        connections: dict[str, Sequence[Connection]],
        progress: Progress,
    ) -> None:
        self._load = load
        self._probes = probes
        self._connections = connections
        self._progress = progress
        self._watch = ServerWatch(probes, self._give_up)
        self._tasks: dict[asyncio.Task[object], str] = {}  # by task: its server
        self._live = 0
        self._outcomes: list[RequestOutcome] = []
        self._counts = False  # whether outcomes count, as they do after the warm-up
        self._begun = 0.0

    async def run(self) -> Run:
        load, interrupted = self._load, False
        before: list[ModelTimes] = []
        token2wav_before: dict[str, float] = {}
        async with self._watch.running(), lags() as late, memory_of(load.metrics) as memory:
            try:
                with interruptible():
                    self._progress.begins("warming up")
                    await self._closed(load.warmup)
                    before, token2wav_before = await self._model_times(), await token2wav_counters(load.metrics)
                    late.clear()
                    self._progress.begins("measuring")
                    self._counts, self._begun = True, time.perf_counter()
                    await (self._closed(load.jobs) if load.rate is None else self._open(load.jobs, load.rate))
            except asyncio.CancelledError:
                interrupted = True
        return Run(
            memory=[(at - self._begun, read) for at, read in memory],
            outcomes=self._outcomes,
            elapsed=max((outcome.begun + outcome.total for outcome in self._outcomes), default=0.0),
            unsent=len(load.jobs) - len(self._outcomes),
            lost=self._watch.lost,
            interrupted=interrupted,
            client_lag=float(np.percentile(late, 95)) if late else 0.0,
            models=between(before, await self._model_times()) if self._counts else [],
            vocoder=token2wav_figures(token2wav_before, await token2wav_counters(load.metrics)),
        )

    # --- when requests are sent -----------------------------------------------------------------------------------

    async def _closed(self, jobs: Sequence[LoadJob]) -> None:
        left, spread = deque(jobs), np.random.default_rng(0)
        for index in range(min(self._load.tasks, len(jobs))):
            server, connection = self._connection(self._load.servers, index)
            delay = spread.uniform(0, LISTENERS_SPREAD) if self._load.listening else index * START_SPACING
            self._start(self._work(left, server, connection, delay), server)
        await self._finish()

    async def _work(self, jobs: deque[LoadJob], server: str, connection: Connection, delay: float) -> None:
        await asyncio.sleep(delay)
        while jobs and server not in self._watch.lost:
            outcome = await self._request(jobs.popleft(), server, connection, start := time.perf_counter())
            if outcome.refused:
                await asyncio.sleep(REFUSED_PAUSE)
            elif self._load.listening and jobs and outcome.arrivals:
                await asyncio.sleep(start + outcome.arrivals[0] + outcome.seconds - time.perf_counter())

    async def _open(self, jobs: Sequence[LoadJob], rate: float) -> None:
        due = self._begun + np.cumsum(np.random.default_rng(0).exponential(1 / rate, len(jobs)))
        try:
            for index, (job, at) in enumerate(zip(jobs, due.tolist(), strict=True)):
                await asyncio.sleep(at - time.perf_counter())
                if not (servers := [server for server in self._load.servers if server not in self._watch.lost]):
                    break
                server, connection = self._connection(servers, index)
                if self._live >= MAX_IN_FLIGHT:
                    refusal = f"not sent: {MAX_IN_FLIGHT} requests are unanswered; the rate is too high for the server"
                    self._note(RequestOutcome(job.id, server, at - self._begun, (), (), 0.0, refusal))
                else:
                    self._start(self._request(job, server, connection, at), server)
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            raise
        finally:
            await self._finish()

    def _connection(self, servers: Sequence[str], index: int) -> tuple[str, Connection]:
        """Chooses in turn among the servers, and among the connections of each."""
        server = servers[index % len(servers)]
        connections = self._connections[server]
        return server, connections[index // len(servers) % len(connections)]

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

    def _give_up(self, server: str) -> None:
        """Cancels the tasks that wait for a lost server."""
        for task, used in self._tasks.items():
            if used == server and task is not asyncio.current_task():
                task.cancel()

    # --- one request ---------------------------------------------------------------------------------------------

    async def _request(self, job: LoadJob, server: str, connection: Connection, start: float) -> RequestOutcome:
        load, recorder, error, silence = self._load, Recorder(start=start), "", None
        self._live += 1
        try:
            async with timeout(job.cancel_after):
                await connection.record(load.model, job.utterance(), load.mode, load.timeout, recorder)
            speech = recorder.finish()
            silence = leading_silence(speech.waveform)
        except ClientError as problem:
            error = str(problem)
        except asyncio.TimeoutError:
            error = CANCELLED
        except asyncio.CancelledError:
            if server not in self._watch.lost:
                raise
            error = self._watch.lost[server]
        finally:
            self._live -= 1
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
        )
        self._note(outcome)
        if error and not outcome.refused and not outcome.cancelled:
            await self._watch.check(server)
        elif not error and self._counts:
            if load.audio_dir is not None:
                await asyncio.to_thread(speech.save, load.audio_dir / f"{job.id}.wav")
        return outcome

    def _note(self, outcome: RequestOutcome) -> None:
        if self._counts:
            self._outcomes.append(outcome)
            self._progress.ended(outcome, self._live)
        elif outcome.error:
            logger.warning("warm-up, %s: %s", outcome.id, outcome.error)

    async def _model_times(self) -> list[ModelTimes]:
        servers = [server for server in self._load.servers if server not in self._watch.lost]
        return [model for server in servers for model in await model_times(self._probes[server], server)]
