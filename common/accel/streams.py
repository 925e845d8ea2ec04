"""Work on a GPU beside its caller's: a stream of its own that follows and leads the caller's by events.

Nothing here waits for a whole device. On the CPU, where work is done when its call returns, `HostStream` takes the
place of `DeviceStream`.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


class DeviceStream:
    """A CUDA stream that one worker at a time uses."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @property
    def handle(self) -> int:
        return self._stream.cuda_stream

    @contextmanager
    def called_from(self, caller: torch.cuda.Stream | None) -> Iterator[None]:
        """In the body `caller` (by default the device's current stream) is the current one: what is allocated there is
        the caller's. However the body ends, the caller's stream then waits for what it began on this one."""
        caller = caller or torch.cuda.current_stream(self._stream.device)
        with torch.cuda.stream(caller):
            try:
                yield
            finally:
                caller.wait_stream(self._stream)

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """What comes on this stream waits for what the current one holds, and may use `tensors`: their memory goes to
        nobody else before it is done with them, also where they belong to a third stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def drain(self) -> None:
        """The host waits until this stream, and no other, has done its work."""
        self._stream.synchronize()


class HostStream:
    """The same where work is done when its call returns."""

    handle = 0

    @contextmanager
    def called_from(self, caller: torch.cuda.Stream | None) -> Iterator[None]:
        yield

    def follow(self, tensors: Iterable[Tensor]) -> None: ...

    def drain(self) -> None: ...


Stream = DeviceStream | HostStream


def current_on(device: torch.device) -> AbstractContextManager[object]:
    """In the body `device` is the current one, which a library that takes no device works on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def stream_on(device: torch.device) -> Stream:
    return DeviceStream(device) if device.type == "cuda" else HostStream()
