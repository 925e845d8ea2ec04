"""Calls of other models of the same tritonserver (BLS), from a coroutine."""

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import async_timeout
import numpy as np
import torch
import triton_python_backend_utils as pb_utils  # noqa: TID251

from cosyvoice_triton.constants import CALLS_AT_ONCE
from cosyvoice_triton.errors import LostAnswerError, UnavailableError
from cosyvoice_triton.monitoring import tracing
from cosyvoice_triton.monitoring.logs import request_id
from cosyvoice_triton.triton_io.errors import exception_of
from cosyvoice_triton.triton_io.requests import to_tensor

# Calls whose caller no longer waits. Triton 2.51 cannot cancel a call, so it occupies its thread until the other model
# has answered.
_abandoned: set[Future[Any]] = set()
MAX_ABANDONED = CALLS_AT_ONCE // 2  # far above the few that cancelled streams leave for a moment
_idle: list["_Worker"] = []  # threads waiting for the next call: reusing one is faster than starting one
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
    """Return the named outputs of one request to `model`.

    Raises the exception that the model's error stands for, UnavailableError after `timeout` seconds, LostAnswerError if
    an output is missing. A call that is abandoned keeps running in its thread, because Triton 2.51 cannot cancel it;
    its answer is dropped.
    """
    flags = start * pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
    flags |= end * pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
    request = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=list(outputs),
        inputs=list(map(to_tensor, inputs.keys(), inputs.values())),
        correlation_id=correlation_id,
        request_id=request_id.get(),
        flags=flags,
        parameters=tracing.carried(),
    )
    try:
        async with async_timeout.timeout(timeout):
            response = await _in_thread(request.exec)
    except asyncio.TimeoutError:
        raise UnavailableError(f"{model} did not answer within {timeout:g} s") from None
    if response.has_error():
        raise exception_of(model, response.error().message(), response.error().code())
    arrays = {}
    for tensor in response.output_tensors():  # copied to the CPU, because Triton reuses the response's memory
        on_cpu = tensor.is_cpu()
        array = tensor.as_numpy().copy() if on_cpu else torch.from_dlpack(tensor.to_dlpack()).cpu().numpy()
        arrays[tensor.name()] = array
    if absent := set(outputs) - arrays.keys():
        raise LostAnswerError(f"{model} answered without {', '.join(sorted(absent))}: the same request failed before")
    return arrays


_slots = asyncio.Semaphore(CALLS_AT_ONCE)  # of the loop of the model's requests


class _Worker(threading.Thread):
    """Runs one call after another; ends if MAX_IDLE threads are idle already."""

    def __init__(self) -> None:
        super().__init__(name="call", daemon=True)
        self.calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            future, function = self.calls.get()
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del future, function  # an idle thread must not keep its answer
            if len(_idle) >= MAX_IDLE:
                return
            _idle.append(self)


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Run a blocking `function` in a thread of its own; if its caller stops waiting first, the call is abandoned.

    Not in an executor: nested calls that wait for each other must not share a bounded pool, and a thread that is stuck
    in Triton must not prevent the process from exiting. UnavailableError if too many calls are abandoned.
    """
    if len(_abandoned) >= MAX_ABANDONED:
        raise UnavailableError(f"{len(_abandoned)} calls of other models are stuck; a model hangs or has died")
    slots, loop = _slots, asyncio.get_running_loop()
    await slots.acquire()

    def ended(future: Future[Any]) -> None:
        try:
            loop.call_soon_threadsafe(slots.release)
        except RuntimeError:  # the loop is closed, so none of its tasks waits
            slots.release()

    try:
        worker = _idle.pop() if _idle else _Worker()
    except RuntimeError:  # no thread could be started
        slots.release()
        raise
    future: Future[Any] = Future()
    future.add_done_callback(ended)  # an abandoned call keeps its slot until it has ended
    worker.calls.put((future, function))
    try:
        return await asyncio.wrap_future(future)
    finally:
        _abandoned.add(future)
        future.add_done_callback(_abandoned.discard)  # at once if it has ended
