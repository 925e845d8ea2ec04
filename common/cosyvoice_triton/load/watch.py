"""Monitors of a run: whether the servers are live, how late this process is, and interruptions."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from cosyvoice_triton.load.doors import Door

WATCH_SECONDS = 1.0  # between two probes of a server
PROBE_SECONDS = 2.0  # for its answer; after two probes without one it is lost
LAG_SECONDS = 0.02  # between two measurements of this process's own delay


class ServerWatch:
    """Probe servers. lost: those that do not answer, and why; `on_loss` is called for each."""

    def __init__(self, doors: Mapping[str, Door], on_loss: Callable[[str], None]) -> None:
        self.lost: dict[str, str] = {}
        self._doors = doors
        self._on_loss = on_loss

    async def run(self) -> None:
        """Probe every server regularly, until all are lost."""
        await asyncio.gather(*(self._watch(server) for server in self._doors))

    async def check(self, server: str) -> None:
        """Probe at once after a failure, so that a dead server does not fail all remaining requests one by one."""
        if server not in self.lost and (reason := await self._doors[server].silence(PROBE_SECONDS)):
            self._lose(server, reason)

    async def _watch(self, server: str) -> None:
        silent = 0
        while server not in self.lost:
            await asyncio.sleep(WATCH_SECONDS)
            reason = await self._doors[server].silence(PROBE_SECONDS)
            silent = silent + 1 if reason else 0
            if silent == 2:
                self._lose(server, reason)

    def _lose(self, server: str, reason: str) -> None:
        if server not in self.lost:
            self.lost[server] = f"{server} stopped answering: {reason}"
            self._on_loss(server)


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
