"""Latency that the speech service adds to a stream, and growth of its memory, measured with a stub of Triton.

    python -m tools.bench.speech_server --output out/bench_speech_server      200 concurrent streams, 5,000 requests

Three processes: the stub, the service, and this one, which runs the same load twice: directly against the stub, and
through the service. The difference of the two is the time to first byte that the service adds.
Writes OUTPUT.json and OUTPUT.png.
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
from tools.bench.triton_stub import stub_process
from tools.load.plot import figure, save

MODEL = stacks.DEFAULT.orchestrator
PAUSE, FIRST = 0.5, 0.1  # seconds between chunks and before the first: speech in real time
CONCURRENT_REQUESTS = 16  # while memory is measured
READY_SECONDS = 60

OpenStream = Callable[[], AsyncGenerator[bytes | None, None]]


@dataclass
class StreamTiming:
    """One stream: seconds to its first byte, and the longest wait between two parts."""

    first: float
    gap: float


@dataclass
class ServiceFigures:
    """All figures: latencies in ms, one per stream; memory in MiB, one per sample."""

    streams: int = 0
    direct_ms: list[float] = field(default_factory=list)
    service_ms: list[float] = field(default_factory=list)
    longest_gap_s: float = 0.0
    cores: float = 0.0  # CPU time of the service per second of load
    requests: list[int] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)

    def added_ms(self, percent: float) -> float:
        """Latency of the first byte that the service adds, at a percentile."""
        return float(np.percentile(self.service_ms, percent) - np.percentile(self.direct_ms, percent))


@contextlib.contextmanager
def service(address: str) -> Iterator[tuple[str, int]]:
    """The URL and the process id of a speech service that is ready, in a separate process."""
    port = free_port()
    options = ("--url", address, "--port", str(port), "--max_streams", "1000")
    process = subprocess.Popen([sys.executable, "-m", "common.speech_service", *options], stdout=subprocess.DEVNULL)
    try:
        asyncio.run(_ready(f"http://127.0.0.1:{port}/health"))
        yield f"http://127.0.0.1:{port}/v1/audio/speech", process.pid
    finally:
        process.terminate()
        process.wait(40)


async def _ready(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(10 * READY_SECONDS):
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} was not ready after {READY_SECONDS} s")


@dataclass(frozen=True)
class StreamLoad:
    """`streams` concurrent streams of `length` seconds each, started at even intervals. seconds: how long the load
    lasts once all of them are running.
    """

    streams: int
    length: float
    seconds: float


async def run_load(load: StreamLoad, open_stream: OpenStream, name: str) -> list[StreamTiming]:
    """The streams that were started while `load.streams` were running."""
    between = load.length / load.streams
    count = int((load.length + load.seconds) / between)
    begun = time.perf_counter()
    tasks = []
    for index in tqdm(range(count), desc=name, unit="stream"):
        await asyncio.sleep(max(0.0, begun + index * between - time.perf_counter()))
        tasks.append(asyncio.create_task(_time(open_stream())))
    timings = await asyncio.gather(*tasks)
    return timings[load.streams :]


async def _time(stream: AsyncGenerator[Any, None]) -> StreamTiming:
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
    return StreamTiming(first, gap)


async def over_grpc(load: StreamLoad, address: str) -> list[StreamTiming]:
    """The load directly against the stub."""
    async with triton.InferenceServerClient(address) as connection:

        def open_stream() -> AsyncGenerator[Any, None]:
            return chunks(connection, MODEL, Utterance("load", speaker="zoe"), 60.0)

        return await run_load(load, open_stream, "direct ")


async def over_http(load: StreamLoad, url: str) -> list[StreamTiming]:
    """The same load through the service."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def open_stream() -> AsyncGenerator[bytes, None]:
            body = {"input": "load", "voice": "zoe", "response_format": "pcm"}
            async with session.post(url, json=body) as answer:
                answer.raise_for_status()
                async for part in answer.content.iter_any():
                    yield part

        return await run_load(load, open_stream, "service")


async def measure_memory(url: str, pid: int, requests: int, samples: int, figures: ServiceFigures) -> None:
    """Send `requests` requests in four formats in turn, and sample the service's memory `samples` times."""
    formats = ("pcm", "mp3", "wav", "opus")
    async with aiohttp.ClientSession() as session:

        async def request(index: int) -> None:
            body = {"input": "quick", "voice": "zoe", "response_format": formats[index % len(formats)]}
            async with session.post(url, json=body) as answer:
                answer.raise_for_status()
                assert await answer.read()

        each = max(1, requests // samples)
        for done in tqdm(range(0, requests, each), desc="memory", unit="sample"):
            for begin in range(done, done + each, CONCURRENT_REQUESTS):
                end = min(begin + CONCURRENT_REQUESTS, done + each)
                await asyncio.gather(*(request(index) for index in range(begin, end)))
            figures.requests.append(done + each)
            figures.memory_mib.append(resident_mib(pid))


def resident_mib(pid: int) -> float:
    """Resident memory of a process without its children."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(load: StreamLoad, requests: int, samples: int = 25) -> ServiceFigures:
    """Both measurements; RuntimeError or aiohttp.ClientError if a stream fails."""
    figures = ServiceFigures(load.streams)
    count = round(load.length / PAUSE) + 1  # the last chunk leaves `length` after the first
    with stub_process(count, PAUSE, FIRST) as stub, service(stub.address) as (url, pid):
        figures.direct_ms = [1000 * timing.first for timing in asyncio.run(over_grpc(load, stub.address))]
        used, begun = cpu_seconds(pid), time.perf_counter()
        timings = asyncio.run(over_http(load, url))
        figures.cores = (cpu_seconds(pid) - used) / (time.perf_counter() - begun)
        figures.service_ms = [1000 * timing.first for timing in timings]
        figures.longest_gap_s = max(timing.gap for timing in timings)
        asyncio.run(measure_memory(url, pid, requests, samples, figures))
    return figures


def plot(figures: ServiceFigures, path: Path) -> None:
    """Time to first byte as distributions, and memory over requests."""
    picture, [[left, right]] = figure(1, 2, 11, 4)
    for name, values in _first_bytes(figures):
        left.plot(np.sort(values), np.linspace(0, 100, len(values)), label=name)
    left.axhline(95, color="grey", linewidth=0.8, linestyle=":")
    left.set(xlabel="first byte, ms", ylabel="streams, %", title=f"First byte, {figures.streams} concurrent streams")
    left.legend(loc="lower right")
    right.plot(figures.requests, figures.memory_mib, marker=".")
    right.set(xlabel="requests answered", ylabel="resident memory, MiB", title="Memory of the service")
    right.set_ylim(0, 1.3 * max(figures.memory_mib))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save(picture, path)


def summary(figures: ServiceFigures) -> str:
    """The figures as text."""
    lines = [f"{'first byte, ms':24}{'p50':>9}{'p95':>9}{'p99':>9}"]
    for name, values in _first_bytes(figures):
        lines.append(f"{name:24}" + "".join(f"{np.percentile(values, percent):9.1f}" for percent in (50, 95, 99)))
    lines.append(f"{'added':24}" + "".join(f"{figures.added_ms(percent):9.1f}" for percent in (50, 95, 99)))
    lines.append(
        f"{len(figures.service_ms)} streams, {figures.streams} concurrent, none failed; a chunk every {PAUSE} s,"
    )
    lines.append(f"longest wait for one {figures.longest_gap_s:.2f} s, the service used {figures.cores:.2f} cores")
    early = len(figures.requests) // 5
    lines.append(
        f"memory {figures.memory_mib[early]:.0f} MiB after {figures.requests[early]} requests, "
        f"{figures.memory_mib[-1]:.0f} MiB after {figures.requests[-1]}"
    )
    return "\n".join(lines)


def _first_bytes(figures: ServiceFigures) -> tuple[tuple[str, list[float]], ...]:
    return ("direct", figures.direct_ms), ("through the service", figures.service_ms)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200, help="concurrent streams")
    parser.add_argument("--length", type=float, default=10.0, help="of a stream, in seconds")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load once all streams are running")
    parser.add_argument("--requests", type=positive_int, default=5000, help="of the memory measurement")
    parser.add_argument("--output", type=Path, default=Path("out/bench_speech_server"))
    args = parser.parse_args(argv)
    figures = measure(StreamLoad(args.streams, args.length, args.seconds), args.requests)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".json").write_text(json.dumps(asdict(figures)))
    plot(figures, args.output.with_suffix(".png"))
    print(summary(figures))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the service and the stub end too
    sys.exit(main())
