"""Calls of other models of the same Triton (BLS), from a coroutine."""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import async_timeout
import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from common.constants import CALLS_AT_ONCE
from common.errors import LostAnswerError, UnavailableError
from common.triton_io.errors import to_exception
from common.triton_io.tensors import to_tensor

ResultT = TypeVar("ResultT")

# Calls whose caller waits no longer. Triton 2.51 cannot cancel a call, so it keeps its thread as long as the other
# model takes.
_given_up: set["_Job"] = set()
MAX_GIVEN_UP = CALLS_AT_ONCE // 2  # far above what cancelled streams leave for a moment
_idle: list["_Worker"] = []  # threads that wait for the next call: starting one takes longer than handing it a call
MAX_IDLE = 64


async def call(
    model: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    *,
    correlation_id: int = 0,
    start: bool = False,
    end: bool = False,
    timeout: float = 60.0,
) -> dict[str, np.ndarray]:
    """The named outputs of one request to `model`; raises what its error says, UnavailableError after `timeout` s,
    LostAnswerError where an output is missing.

    A call that is given up runs on in its thread, since Triton 2.51 cannot cancel one; its answer is dropped.
    """
    flags = start * pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
    flags |= end * pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
    request = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=list(outputs),
        inputs=[to_tensor(name, array) for name, array in inputs.items()],
        correlation_id=correlation_id,
        flags=flags,
    )
    try:
        async with async_timeout.timeout(timeout):
            response = await _in_thread(request.exec)
    except asyncio.TimeoutError:
        raise UnavailableError(f"{model} did not answer within {timeout:g} s") from None
    arrays = _outputs(model, response)
    if absent := [name for name in outputs if name not in arrays]:
        raise LostAnswerError(f"{model} answered without {', '.join(absent)}: the same request failed before")
    return arrays


async def _in_thread(function: Callable[[], ResultT]) -> ResultT:
    """Run a blocking `function` in a thread that does nothing else meanwhile.

    Not in an executor: calls that wait for the models that wait for them must never share a bounded pool, and a
    thread that is stuck in Triton must not keep the process from ending.
    """
    future: Future[ResultT] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    async with _working(run):
        return await asyncio.wrap_future(future)


class Places:
    """So many may be under way at once; the others wait in their order."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._lock = threading.Lock()

    async def take(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came at the same moment
                self.give_back()
            raise

    def give_back(self) -> None:
        """From any thread."""
        with self._lock:
            if not self._waiting:
                self._free += 1
                return
            turn = self._waiting.popleft()
        try:
            turn.get_loop().call_soon_threadsafe(self._pass_on, turn)
        except RuntimeError:  # the loop is closed: nobody waits there any more
            self.give_back()

    def _pass_on(self, turn: "asyncio.Future[None]") -> None:
        if turn.done():  # it no longer waits
            self.give_back()
        else:
            turn.set_result(None)


_places = Places(CALLS_AT_ONCE)


class _Job:
    """Something to do in a thread; at its end it gives back its place."""

    def __init__(self, target: Callable[[], None], places: Places) -> None:
        self._target = target
        self._places = places
        self.done = False

    def run(self) -> None:
        try:
            self._target()
        finally:
            self.done = True
            _given_up.discard(self)
            self._places.give_back()


class _Worker(threading.Thread):
    """Does one job after another; ends when more threads are idle than are kept."""

    def __init__(self) -> None:
        super().__init__(name="call", daemon=True)
        self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            self.jobs.get().run()
            if len(_idle) >= MAX_IDLE:
                return
            _idle.append(self)


@asynccontextmanager
async def _working(target: Callable[[], None]) -> AsyncIterator[None]:
    """A thread does `target` for the time of the block; if it waits in Triton still after that, it has been given up.

    UnavailableError when too many of those are there.
    """
    if len(_given_up) >= MAX_GIVEN_UP:
        raise UnavailableError(f"{len(_given_up)} calls of other models are stuck; a model hangs or has died")
    places = _places
    await places.take()
    job = _Job(target, places)
    try:
        worker = _idle.pop() if _idle else _Worker()
    except RuntimeError:  # no thread could be started
        places.give_back()
        raise
    worker.jobs.put(job)
    try:
        yield
    finally:
        _given_up.add(job)
        if job.done:  # asked after it was added: it may end at any time
            _given_up.discard(job)


def _outputs(model: str, response: Any) -> dict[str, np.ndarray]:
    """The arrays of a response, or its error raised."""
    if response.has_error():
        raise to_exception(model, response.error())
    return {tensor.name(): _to_array(tensor) for tensor in response.output_tensors()}


def _to_array(tensor: Any) -> np.ndarray:
    """On the CPU; the copy outlives the response, whose memory Triton takes back."""
    return tensor.as_numpy().copy() if tensor.is_cpu() else torch.from_dlpack(tensor.to_dlpack()).cpu().numpy()
