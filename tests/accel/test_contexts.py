"""The pool of execution contexts: no error of a user loses a context."""

import random
import threading
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


def make_pool(size: int, make: Callable[..., object] | None = None) -> ContextPool:
    return ContextPool(make or (lambda stream: Context()), [HostStream() for _ in range(size)], LIMITS)


def test_no_context_is_lost_when_eight_threads_raise_at_random() -> None:
    pool = make_pool(2)
    outcomes: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(1000 // 8):
            try:
                with pool.context({"x": (rng.choice((1, 4, 4, 9)),)}, timeout=30) as slot:
                    slot.context.use()
                    if rng.random() < 0.3:
                        raise rng.choice((RuntimeError, ValueError, KeyboardInterrupt, SystemExit))("body")
                outcomes.append("served")
            except (RuntimeError, ValueError, KeyboardInterrupt, SystemExit) as error:
                outcomes.append("raised" if str(error) == "body" else "refused")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(outcomes) == 1000 and min(outcomes.count(kind) for kind in ("served", "raised", "refused")) > 100
    with pool.context(FITS, timeout=1) as one, pool.context(FITS, timeout=1) as other:
        assert one.context is not other.context and one.stream is not other.stream


def test_only_a_shape_that_fits_waits_for_a_context_and_not_for_ever() -> None:
    pool = make_pool(2)
    with pool.context(FITS, timeout=1), pool.context(FITS, timeout=1):  # none is free
        with pytest.raises(ValueError, match=r"input 'x' has shape \(5,\): the network takes \(1,\) to \(4,\)"):
            with pool.context({"x": (5,)}, timeout=60):
                pytest.fail("a context was acquired")
        with pytest.raises(UnavailableError, match=r"within 0.2 s; there are 2, all in use"):
            with pool.context(FITS, timeout=0.2):
                pytest.fail("a context was acquired")
    assert pool.size == 2 and 0.2 <= pool.waited_seconds < 5


@pytest.mark.parametrize("broken", [False, True])
def test_after_an_error_the_context_is_replaced_when_its_work_is_done_or_its_stream_is_broken(broken: bool) -> None:
    drains = []

    class Drained(HostStream):
        def drain(self) -> None:
            drains.append(1)
            if broken:
                raise RuntimeError("CUDA error")

    pool = ContextPool(lambda stream: Context(), [Drained()], LIMITS)
    with pool.context(FITS, timeout=1) as slot:
        first = slot.context
    with pytest.raises(ZeroDivisionError), pool.context(FITS, timeout=1) as slot:
        assert slot.context is first and not drains
        raise ZeroDivisionError
    assert drains == [1]
    with pool.context(FITS, timeout=1) as slot:
        assert slot.context is not first


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
