"""Plays the autoscaler of deploy/k8s with real servers behind the real gateway, on this machine without a GPU.

    python -m tests.deployment.autoscaling MODELS            # as of `cosyvoice-triton prepare demo MODELS`

Prints a line whenever the number of servers changes, and at the end how the answers ended. Times are those of the
manifest divided by HURRY; a server takes PLACES listeners, because more servers do not make one machine faster.
"""

import asyncio
import math
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import tritonclient.grpc.aio as triton
from cosyvoice_triton.errors import is_overloaded
from cosyvoice_triton.monitoring.metrics import LOAD, sum_of
from cosyvoice_triton.server.tritonserver import free_port

from tests.support.autoscaler import PERIOD_SECONDS, Autoscaler
from tests.support.gateway import Gateway, Ports, gateway, wait_for
from tests.support.serve_process import ServeProcess, StreamResult, rendered, serve_process, synthesize

HURRY, PLACES, SERVERS = 5, 2, 4
PHASES = [(10, 1), (120, 4), (70, 1)]  # seconds, listeners who speak one text after another


class Pod:
    """A place for a server, with the ports that the gateway knows."""

    def __init__(self, repository: Path, directory: Path, threads: ThreadPoolExecutor) -> None:
        self._arguments = repository, directory / f"log-{id(self)}", "--notice-seconds", "2", "--drain-seconds", "60"
        self._ports = (free_port(), free_port(), free_port(), free_port())
        self._threads = threads
        self._stack = ExitStack()
        self._started: Future[ServeProcess] | None = None

    @property
    def ports(self) -> Ports:
        return Ports(self._ports[0], self._ports[1], self._ports[3])

    @property
    def ready_at(self) -> float:
        return 0.0 if self._started is not None and self._started.done() else math.inf

    @property
    def load(self) -> float:
        assert self._started is not None
        return sum_of(self._started.result().page(), LOAD.name)

    def start(self) -> None:
        running = serve_process(*self._arguments, ports=self._ports)
        self._started = self._threads.submit(self._stack.enter_context, running)

    def stop(self) -> "Future[int]":
        """Send SIGTERM; return its exit code once its streams have ended."""
        assert self._started is not None
        server, self._started = self._started.result(), None
        server.terminate()

        def end() -> int:
            with self._stack:
                return server.process.wait(120)

        return self._threads.submit(end)


async def speak(address: str, outcomes: Counter[str], ended: asyncio.Event) -> None:
    """Ask for one text after another; again after a second where there is no place."""
    async with triton.InferenceServerClient(address) as connection:
        while not ended.is_set():
            outcome = await synthesize(connection, "A short sentence.", StreamResult())
            refused = outcome.error is not None and is_overloaded(outcome.error)
            outcomes["refused" if refused else "failed" if outcome.error else "whole"] += 1
            if outcome.error and not refused:
                print(f"failed: {outcome.error}", flush=True)
            await asyncio.sleep(1.0 if refused else 0.0)


async def play(pods: list[Pod], running: Gateway) -> Counter[str]:
    """Scale until the phases are over; the first pod has started."""
    autoscaler = Autoscaler(least=1, most=len(pods), hurry=HURRY)
    idle, used, stopping = pods[1:], pods[:1], list["Future[int]"]()
    outcomes, listeners, begun = Counter[str](), list[tuple[asyncio.Event, asyncio.Task[None]]](), time.monotonic()
    for seconds, count in PHASES:
        while len(listeners) < count:
            ended = asyncio.Event()
            task = asyncio.create_task(speak(f"127.0.0.1:{running.grpc}", outcomes, ended))
            listeners.append((ended, task))
        while len(listeners) > count:
            ended, task = listeners.pop()
            ended.set()
            await task
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            loads = [f"{pod.load:.2f}" if pod.ready_at < now else "loading" for pod in used]
            wanted = autoscaler.replicas(used, now)
            if wanted != len(used):
                print(f"| {now - begun:.0f} s | {count} | {', '.join(loads)} | {len(used)} to {wanted} |", flush=True)
            while len(used) < wanted:
                used.append(idle.pop())
                used[-1].start()
            while len(used) > wanted and used[-1].ready_at < now:
                idle.append(used.pop())
                stopping.append(idle[-1].stop())
            await asyncio.sleep(PERIOD_SECONDS / HURRY)
    for ended, task in listeners:
        ended.set()
        await task
    codes = [await asyncio.wrap_future(code) for code in stopping]
    assert codes == [0] * len(codes), codes
    return outcomes


def main(models: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as work,
        ThreadPoolExecutor() as threads,
        ExitStack() as stack,
    ):
        directory = Path(work)
        repository = rendered(models, directory / "repository", max_streams=str(PLACES), token_timeout="60")
        pods = [Pod(repository, directory, threads) for _ in range(SERVERS)]
        for pod in pods:
            stack.enter_context(pod._stack)
        running = stack.enter_context(gateway(directory, [pod.ports for pod in pods]))
        pods[0].start()
        wait_for(lambda: running.servers() == 1, 300)
        print(dict(asyncio.run(play(pods, running))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
