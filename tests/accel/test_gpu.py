"""Stream synchronisation on a real GPU. The fake TensorRT computes on the CPU, so its tests need no GPU."""

import pytest
import torch
from cosyvoice_triton.runtimes.contexts import ContextPool
from cosyvoice_triton.runtimes.network import ShapeLimits
from cosyvoice_triton.runtimes.streams import DeviceStream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine"),
]
LIMITS = ShapeLimits(least={"x": (1,)}, usual={"x": (1,)}, most={"x": (1 << 20,)})
CYCLES = 50_000_000  # about 30 ms


def work(stream: DeviceStream, x: torch.Tensor, y: torch.Tensor) -> None:
    """Like TensorRT: kernels on the stream of that handle that read and write memory of the caller."""
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)):
        torch.cuda._sleep(CYCLES)
        torch.mul(x, 2, out=y)


def run(pool: ContextPool, x: torch.Tensor, caller: torch.cuda.Stream | None = None) -> torch.Tensor:
    with pool.context({"x": tuple(x.shape)}, timeout=5) as slot, slot.stream.called_from(caller):
        y = torch.empty_like(x)
        slot.stream.follow([x, y])
        work(slot.stream, x, y)
    return y


@pytest.fixture
def pool() -> ContextPool:
    return ContextPool(lambda stream: object(), [DeviceStream(torch.device("cuda:0"))], LIMITS)


def test_work_waits_for_its_caller_and_later_work_for_it(pool: ContextPool) -> None:
    caller = torch.cuda.Stream()
    with torch.cuda.stream(caller):
        x = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(CYCLES)
        x.add_(3)
    began = torch.cuda.Event(enable_timing=False)
    y = run(pool, x, caller)
    with torch.cuda.stream(caller):
        sum_ = y + 1
        began.record()
    assert not began.query(), "the host waited for the device"
    caller.synchronize()
    assert bool((sum_ == 7).all())


def test_memory_that_the_caller_frees_is_not_reused_before_the_work_is_done(pool: ContextPool) -> None:
    for _ in range(20):
        x = torch.ones(1 << 20, device="cuda")
        y = run(pool, x)
        del x
        junk = torch.full((1 << 20,), 9.0, device="cuda")
        assert bool((y == 2).all())
        del junk, y


def test_after_an_error_the_caller_waits_and_the_stream_is_drained(pool: ContextPool) -> None:
    x = torch.ones(1 << 20, device="cuda")
    y = torch.empty_like(x)
    with pytest.raises(RuntimeError, match="body"):
        with pool.context({"x": tuple(x.shape)}, timeout=5) as slot, slot.stream.called_from(None):
            slot.stream.follow([x, y])
            work(slot.stream, x, y)
            raise RuntimeError("body")
    assert bool((y == 2).all())
