"""The pool of execution contexts: no error of a user loses a context."""

import random
import threading
import time
from collections.abc import Callable

import pytest
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.runtimes.contexts import ContextPool
from cosyvoice_triton.runtimes.network import ShapeLimits
from cosyvoice_triton.runtimes.streams import HostStream

LIMITS = ShapeLimits(least={"x": (1,)}, usual={"x": (2,)}, most={"x": (4,)})
FITS = {"x": (3,)}


class Context:
    """Fails when two users have it at once."""

    def __init__(self) -> None:
        self._users = threading.Lock()

    def use(self) -> None:
        assert self._users.acquire(blocking=False), "two users at once"
        self._users.release()


class Drained(HostStream):
    def __init__(self) -> None:
        self.drains = 0

    def drain(self) -> None:
        self.drains += 1


def make_pool(size: int, make: Callable[..., object] | None = None) -> ContextPool:
    return ContextPool(make or (lambda stream: Context()), [HostStream() for _ in range(size)], LIMITS)


def test_no_context_is_lost_when_eight_threads_raise_at_random() -> None:
    pool = make_pool(2)
    outcomes: list[str] = []
    unexpected: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(10_000 // 8):
            try:
                with pool.context({"x": (rng.choice((1, 4, 4, 9)),)}, timeout=30) as slot:
                    slot.context.use()
                    if rng.random() < 0.3:
                        raise rng.choice((RuntimeError, ValueError, KeyboardInterrupt, SystemExit))("body")
                outcomes.append("served")
            except (RuntimeError, ValueError, KeyboardInterrupt, SystemExit) as error:
                outcomes.append("raised" if str(error) == "body" else "refused")
            except BaseException as error:
                unexpected.append(error)
                raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads) and unexpected == []
    counts = {kind: outcomes.count(kind) for kind in ("served", "raised", "refused")}
    assert sum(counts.values()) == 10_000 and min(counts.values()) > 1000

    found = pool.statistics()
    assert (found.size, found.free, found.timeouts) == (2, 2, 0)
    assert found.lent == counts["served"] + counts["raised"]
    assert counts["raised"] - 2 <= found.replaced <= counts["raised"]
    with pool.context(FITS, timeout=1) as one, pool.context(FITS, timeout=1) as other:
        assert one.context is not other.context and one.stream is not other.stream


def test_shapes_are_checked_before_a_context_is_acquired() -> None:
    pool = make_pool(1)
    with pool.context(FITS, timeout=1):  # none is free
        with pytest.raises(ValueError, match=r"input 'x' has shape \(5,\): the network takes \(1,\) to \(4,\)"):
            with pool.context({"x": (5,)}, timeout=60):
                pytest.fail("a context was acquired")
    assert pool.statistics().lent == 1


def test_a_wait_that_times_out_names_the_pool_size_and_the_timeout() -> None:
    pool = make_pool(2)
    with pool.context(FITS, timeout=1), pool.context(FITS, timeout=1):
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=r"within 0.2 s; there are 2, all in use"):
            with pool.context(FITS, timeout=0.2):
                pytest.fail("a context was acquired")
        assert 0.2 <= time.monotonic() - began < 5
    found = pool.statistics()
    assert (found.timeouts, found.lent, found.free) == (1, 2, 2)
    assert 0.2 <= found.longest_wait_seconds <= found.waited_seconds < 5


def test_a_waiting_user_gets_the_released_context() -> None:
    pool = make_pool(1)
    taken = threading.Event()
    served: list[float] = []

    def wait() -> None:
        taken.wait(timeout=10)
        with pool.context(FITS, timeout=30):
            served.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    with pool.context(FITS, timeout=1):
        taken.set()
        time.sleep(0.1)
        returned = time.monotonic()
    thread.join(timeout=30)
    assert served and served[0] >= returned
    assert pool.statistics().longest_wait_seconds > 0.05


def test_after_an_error_the_context_is_replaced_when_its_work_is_done() -> None:
    stream = Drained()
    pool = ContextPool(lambda stream: Context(), [stream], LIMITS)
    with pool.context(FITS, timeout=1) as slot:
        first = slot.context
    with pytest.raises(ZeroDivisionError), pool.context(FITS, timeout=1) as slot:
        assert slot.context is first and stream.drains == 0
        raise ZeroDivisionError
    assert stream.drains == 1
    with pool.context(FITS, timeout=1) as slot:
        assert slot.context is not first
    assert pool.statistics().replaced == 1


def test_a_context_that_cannot_be_recreated_is_tried_again_for_the_next_user() -> None:
    succeeds = [True, False, True]  # creation of the first, second and third context

    def make(stream: object) -> Context:
        if not succeeds.pop(0):
            raise UnavailableError("no memory for another TensorRT context")
        return Context()

    pool = make_pool(1, make)
    with pytest.raises(ZeroDivisionError), pool.context(FITS, timeout=1):
        raise ZeroDivisionError
    with pytest.raises(UnavailableError, match="no memory"), pool.context(FITS, timeout=1):
        pytest.fail("a context was acquired")
    with pool.context(FITS, timeout=1) as slot:
        assert slot.context is not None
    assert pool.statistics().free == 1


def test_a_stream_that_fails_to_drain_loses_no_slot() -> None:
    class Failing(HostStream):
        def drain(self) -> None:
            raise RuntimeError("CUDA error")

    pool = ContextPool(lambda stream: Context(), [Failing()], LIMITS)
    with pytest.raises(ZeroDivisionError), pool.context(FITS, timeout=1):
        raise ZeroDivisionError
    with pool.context(FITS, timeout=1):
        pass


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_pool(0)
