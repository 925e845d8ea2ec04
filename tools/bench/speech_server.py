"""What the speech service adds to a stream, and whether it keeps what it should forget: against a stub of Triton.

    python -m tools.bench.speech_server --output out/bench_speech_server      200 streams at a time, 5,000 requests

Three processes: the stub, the service, and this one, which listens to the same load twice: straight at the stub and
through the service. What the service adds to the first byte is the difference of the two.
Writes OUTPUT.json, OUTPUT.png.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import tritonclient.grpc.aio as triton
from tqdm import tqdm

from common import stacks
from common.client.grpc_client import chunks
from common.client.requests import Utterance
from common.server.tritonserver import free_port
from tools.arguments import positive_int

MODEL = stacks.DEFAULT.orchestrator
PAUSE, FIRST = 0.5, 0.1  # between chunks, before the first: speech in real time
AT_ONCE = 16  # requests of the memory's measurement

Listen = Callable[[], AsyncGenerator[bytes | None, None]]


@dataclass
class Heard:
    """One stream: seconds to its first byte, and the longest wait for another."""

    first: float
    gap: float


@dataclass
class Result:
    """All figures; latencies in ms, one per stream, memory in MiB, one per look."""

    streams: int = 0
    direct_ms: list[float] = field(default_factory=list)
    service_ms: list[float] = field(default_factory=list)
    longest_gap_s: float = 0.0
    cores: float = 0.0  # that the service kept busy meanwhile
    requests: list[int] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)

    def added_ms(self, percent: float) -> float:
        """What the service adds to the first byte, at a percentile."""
        return float(np.percentile(self.service_ms, percent) - np.percentile(self.direct_ms, percent))


@contextlib.contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program of ours, its output readable; ended with the block."""
    running = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(40)
        assert running.stdout is not None
        running.stdout.close()


@contextlib.contextmanager
def stub(length: float) -> Iterator[str]:
    """The address of a stub that speaks so many seconds in real time, in a process of its own."""
    options = ("--chunks", str(round(length / PAUSE)), "--pause", str(PAUSE), "--first", str(FIRST))
    with process("tools.bench.triton_stub", *options) as running:
        assert running.stdout is not None
        yield running.stdout.readline().strip()


@contextlib.contextmanager
def service(address: str) -> Iterator[tuple[str, int]]:
    """The URL and the process id of a service in a process of its own, ready."""
    port = free_port()
    options = ("--url", address, "--port", str(port), "--max_streams", "1000")
    with process("scripts.speech_server", *options) as running:
        asyncio.run(_ready(f"http://127.0.0.1:{port}/health"))
        yield f"http://127.0.0.1:{port}/v1/audio/speech", running.pid


async def _ready(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} was not ready after a minute")


@dataclass(frozen=True)
class Load:
    """`streams` at a time, each of `length` seconds and begun evenly; `seconds`: how long, once there are so many."""

    streams: int
    length: float
    seconds: float


async def play(load: Load, listen: Listen, name: str) -> list[Heard]:
    """The streams that were begun while as many as wanted were live."""
    between = load.length / load.streams
    count = int((load.length + load.seconds) / between)
    begun = time.perf_counter()
    tasks = []
    for index in tqdm(range(count), desc=name, unit="stream"):
        await asyncio.sleep(max(0.0, begun + index * between - time.perf_counter()))
        tasks.append(asyncio.create_task(_hear(listen())))
    heard = await asyncio.gather(*tasks)
    return heard[load.streams :]


async def _hear(stream: AsyncGenerator[Any, None]) -> Heard:
    last = begun = time.perf_counter()
    first, gap = 0.0, 0.0
    async with contextlib.aclosing(stream) as parts:
        async for _ in parts:
            now = time.perf_counter()
            if first:
                gap = max(gap, now - last)
            else:
                first = now - begun
            last = now
    if not first:
        raise RuntimeError("a stream ended without audio")
    return Heard(first, gap)


async def over_grpc(load: Load, address: str) -> list[Heard]:
    """The load straight at the stub."""
    async with triton.InferenceServerClient(address) as connection:

        def listen() -> AsyncGenerator[Any, None]:
            return chunks(connection, MODEL, Utterance("load", speaker="zoe"), 60.0)

        return await play(load, listen, "straight ")


async def over_http(load: Load, url: str) -> list[Heard]:
    """The same load through the service."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def listen() -> AsyncGenerator[bytes, None]:
            body = {"input": "load", "voice": "zoe", "response_format": "pcm"}
            async with session.post(url, json=body) as answer:
                answer.raise_for_status()
                async for part in answer.content.iter_any():
                    yield part

        return await play(load, listen, "by service")


async def memory(url: str, pid: int, requests: int, looks: int, result: Result) -> None:
    """Ask `requests` times, in every other format, and look at the service's memory from time to time."""
    formats = ("pcm", "mp3", "wav", "opus")
    async with aiohttp.ClientSession() as session:

        async def ask(index: int) -> None:
            body = {"input": "quick", "voice": "zoe", "response_format": formats[index % len(formats)]}
            async with session.post(url, json=body) as answer:
                answer.raise_for_status()
                assert await answer.read()

        each = max(1, requests // looks)
        for done in tqdm(range(0, requests, each), desc="memory", unit="look"):
            for begin in range(done, done + each, AT_ONCE):
                await asyncio.gather(*(ask(index) for index in range(begin, min(begin + AT_ONCE, done + each))))
            result.requests.append(done + each)
            result.memory_mib.append(resident_mib(pid))


def resident_mib(pid: int) -> float:
    """Memory of a process, with its children's left out."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(load: Load, requests: int, looks: int = 25) -> Result:
    """Both measurements; RuntimeError or aiohttp.ClientError when a stream fails."""
    result = Result(load.streams)
    with stub(load.length) as address, service(address) as (url, pid):
        result.direct_ms = [1000 * heard.first for heard in asyncio.run(over_grpc(load, address))]
        used, begun = cpu_seconds(pid), time.perf_counter()
        through = asyncio.run(over_http(load, url))
        result.cores = (cpu_seconds(pid) - used) / (time.perf_counter() - begun)
        result.service_ms = [1000 * heard.first for heard in through]
        result.longest_gap_s = max(heard.gap for heard in through)
        asyncio.run(memory(url, pid, requests, looks, result))
    return result


def plot(result: Result, path: Path) -> None:
    """First bytes as distributions, memory over requests."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, values in (("straight at the stub", result.direct_ms), ("through the service", result.service_ms)):
        left.plot(np.sort(values), np.linspace(0, 100, len(values)), label=name)
    left.axhline(95, color="grey", linewidth=0.8, linestyle=":")
    left.set(xlabel="first byte, ms", ylabel="streams, %", title=f"First byte, {result.streams} streams at a time")
    left.legend(loc="lower right")
    right.plot(result.requests, result.memory_mib, marker=".")
    right.set(xlabel="requests answered", ylabel="resident memory, MiB", title="Memory of the service")
    right.set_ylim(0, 1.3 * max(result.memory_mib))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def summary(result: Result) -> str:
    """The figures in words."""
    lines = [f"{'first byte, ms':24}{'p50':>9}{'p95':>9}{'p99':>9}"]
    for name, values in (("straight at the stub", result.direct_ms), ("through the service", result.service_ms)):
        lines.append(f"{name:24}" + "".join(f"{np.percentile(values, percent):9.1f}" for percent in (50, 95, 99)))
    lines.append(f"{'added':24}" + "".join(f"{result.added_ms(percent):9.1f}" for percent in (50, 95, 99)))
    lines.append(
        f"{len(result.service_ms)} streams, {result.streams} at a time, none failed; chunks come every {PAUSE} s,"
    )
    lines.append(
        f"the longest wait for one was {result.longest_gap_s:.2f} s, the service used {result.cores:.2f} cores"
    )
    after = result.requests[len(result.requests) // 5]
    lines.append(
        f"memory {result.memory_mib[len(result.requests) // 5]:.0f} MiB after {after} requests, "
        f"{result.memory_mib[-1]:.0f} MiB after {result.requests[-1]}"
    )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200, help="at a time")
    parser.add_argument("--length", type=float, default=10.0, help="of a stream, in seconds")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the load, once it is there")
    parser.add_argument("--requests", type=positive_int, default=5000, help="of the memory's measurement")
    parser.add_argument("--output", type=Path, default=Path("out/bench_speech_server"))
    args = parser.parse_args(argv)
    result = measure(Load(args.streams, args.length, args.seconds), args.requests)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".json").write_text(json.dumps(asdict(result)))
    plot(result, args.output.with_suffix(".png"))
    print(summary(result))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes of the load end too
    raise SystemExit(main())
