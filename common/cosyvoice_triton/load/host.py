"""How fast this machine's CPU runs Python, which first chunks depend on: machines of one kind differ by 1.6 times."""

import time

LOOPS = 300_000
RUNS = 7


def host_ms() -> float:
    """Return the milliseconds of a fixed loop of arithmetic, calls and dictionary accesses: the fastest of RUNS."""
    return 1e3 * min(_seconds() for _ in range(RUNS))


def _seconds() -> float:
    counts: dict[int, int] = {}
    begun = time.perf_counter()
    for number in range(LOOPS):
        counts[number & 1023] = counts.get(number & 1023, 0) + number
    return time.perf_counter() - begun
