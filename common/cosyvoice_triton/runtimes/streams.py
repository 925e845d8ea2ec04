"""CUDA streams for work that runs between two pieces of its caller's work, ordered by events.

Nothing here synchronises a whole device. On the CPU, where a call returns after its work is done, `HostStream` replaces
`DeviceStream`.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


class DeviceStream:
    """A CUDA stream for one user at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @property
    def handle(self) -> int:
        return self._stream.cuda_stream

    @contextmanager
    def called_from(self, caller: torch.cuda.Stream | None) -> Iterator[None]:
        """In the body, `caller` (default: the device's current stream) is the current stream, so that tensors allocated
        there belong to it. At the end of the body, also after an error, it waits for what was queued on this stream."""
        caller = caller or torch.cuda.current_stream(self._stream.device)
        with torch.cuda.stream(caller):
            try:
                yield
            finally:
                caller.wait_stream(self._stream)

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Later work on this stream waits for what is queued on the current one, and may use `tensors`: their memory is
        not reused before that work is done, also if they were allocated on a third stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def drain(self) -> None:
        """Wait on the host until the work of this stream alone is done."""
        self._stream.synchronize()


class HostStream:
    """The same interface on the CPU, where a call returns after its work is done."""

    handle = 0

    @contextmanager
    def called_from(self, caller: torch.cuda.Stream | None) -> Iterator[None]:
        yield

    def follow(self, tensors: Iterable[Tensor]) -> None: ...

    def drain(self) -> None: ...


WorkStream = DeviceStream | HostStream


def current_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which `device` is the current one, for libraries that take no device argument."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """A context in which the current stream is another than that of other threads, which by default share one: work on
    it waits for nothing of theirs."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def stream_on(device: torch.device) -> WorkStream:
    return DeviceStream(device) if device.type == "cuda" else HostStream()
