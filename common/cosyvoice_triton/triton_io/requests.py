"""The inputs of a request, the outputs of a response, and ways to answer: at once as a batch, later from a thread, or
each in a task of an asyncio loop.
"""

import asyncio
import concurrent.futures
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch
import triton_python_backend_utils as pb_utils  # noqa: TID251
import uvloop
from torch.utils.dlpack import to_dlpack

from cosyvoice_triton.batches import isolated
from cosyvoice_triton.errors import UnavailableError
from cosyvoice_triton.monitoring import tracing
from cosyvoice_triton.monitoring.health import health, report_failure
from cosyvoice_triton.monitoring.logs import request_id
from cosyvoice_triton.triton_io.errors import error_response

logger = logging.getLogger(__name__)

InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")

CANCEL_POLL_SECONDS = 0.02
# Live requests are asked in turn, so many of them at each poll: the first POLLED at each, any number within half a
# second.
POLLED, POLLS_PER_TURN = 2, 25
SHUTDOWN_SECONDS = 10.0


def read_all(request: Any, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Return the inputs among `names` that were sent, by name; without `names` all of them."""
    sent = {}
    for tensor in request.inputs():  # once: looking each name up makes objects of all of them every time
        if names is None or tensor.name() in names:
            sent[tensor.name()] = tensor.as_numpy()
    return sent


def require(request: Any, name: str) -> np.ndarray:
    """Return the input `name` as sent, with its batch dimension; ValueError if it was not sent."""
    if (tensor := pb_utils.get_input_tensor_by_name(request, name)) is None:
        raise ValueError(f"{name} is missing")
    array: np.ndarray = tensor.as_numpy()
    return array


def parameters(request: Any) -> dict[str, Any]:
    """Return the request parameters: strings, numbers and booleans by name."""
    return dict(json.loads(request.parameters() or "{}"))


def origin(request: Any) -> dict[str, Any]:
    """Say whose request it is: correlation_id (0 or "": none) with its flags start and end, and request_id."""
    flags = request.flags()
    return {
        "correlation_id": request.correlation_id(),
        "start": bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
        "end": bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
        "request_id": request.request_id(),
    }


def to_tensor(name: str, array: np.ndarray) -> Any:
    """Return `array` as a Triton tensor; strings as an object array of bytes or str.

    Numbers are passed by DLPack, because the backend's own constructor does not copy the data with numpy 2. They go
    through torch, because the backend renames the capsule to a name that numpy's destructor does not know.
    """
    if array.dtype == object or array.size == 0:  # the backend mistakes an empty DLPack tensor for a strided one
        return pb_utils.Tensor(name, array)
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy()
    # As a capsule: the backend would ask the tensor for one and for its device, in Python, 20 us for each tensor.
    return pb_utils.Tensor.from_dlpack(name, to_dlpack(torch.from_numpy(array)))


def to_response(outputs: Mapping[str, np.ndarray]) -> Any:
    return pb_utils.InferenceResponse(list(map(to_tensor, outputs.keys(), outputs.values())))


def respond_batch(
    requests: Sequence[Any],
    parse: Callable[[Any], InputT],
    compute: Callable[[list[InputT]], Sequence[Mapping[str, np.ndarray]]],
    *,
    model: str,
) -> list[Any]:
    """Return one response per request, in order: `compute` runs once, over the inputs that `parse` accepted.

    A request that `parse` rejects gets its own error and the others are served; so does one whose input `compute` fails
    for alone, after it has failed for the batch. `compute` must have no effect if it raises.
    """
    responses: list[Any] = [None] * len(requests)
    accepted: dict[int, InputT] = {}
    for index, request in enumerate(requests):
        try:
            accepted[index] = parse(request)
        except Exception as error:
            responses[index] = error_response(error, model)
    if not accepted:
        return responses

    def answer(inputs: Sequence[InputT]) -> list[Any]:
        answers = [to_response(outputs) for outputs in compute(list(inputs))]
        assert len(answers) == len(inputs), f"{len(inputs)} inputs gave {len(answers)} results"
        health.succeeded()
        return answers

    try:
        answers = isolated(answer, list(accepted.values()))
    except Exception as error:  # one that no input would survive
        answers = [error] * len(accepted)
    for index, result in zip(accepted, answers, strict=True):
        responses[index] = error_response(result, model) if isinstance(result, Exception) else result
    return responses


class Responder:
    """Sends the responses of one request: any number (one if the model is not decoupled), then the final flag."""

    def __init__(self, sender: Any, *, decoupled: bool) -> None:
        self._sender = sender
        self._decoupled = decoupled
        self.held: Any = None  # a model that is not decoupled has one response, which must carry the final flag
        self._lock = threading.Lock()
        self._ended = False

    def send(self, outputs: Mapping[str, np.ndarray]) -> None:
        """Send one response."""
        response = to_response(outputs)
        with self._lock:
            assert not self._ended, "response after the final one"
            if self._decoupled:
                self._sender.send(response)
            else:
                assert self.held is None, "second response from a model that is not decoupled"
                self.held = response
        for array in outputs.values():
            if array.size:  # an empty one, as to a stream's start, took no work
                health.succeeded()
                break

    def is_cancelled(self) -> bool:
        """Return whether the client disconnected before the end. Asking Triton 2.51 after the end crashes the whole
        server."""
        with self._lock:
            return not self._ended and bool(self._sender.is_cancelled())

    def finish(self, error: Any = None) -> None:
        """End the request, with an error response if one is given; only the first call has an effect."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            last = error or self.held
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            if last is None:
                self._sender.send(flags=final)
            else:
                self._sender.send(last, flags=final)


class DeferredAnswer:
    """The single response of a request, sent later from any thread: call it with the waveform or an exception.

    As a context manager it sends the exception that its block raises; a block that raises none leaves the response to
    be sent later.
    """

    def __init__(self, responder: Responder, model: str, request: str = "", span: tracing.Span = tracing.OFF) -> None:
        """Make the answer. request: its id, for the log. span: ends with the response."""
        self._request = request
        self._span = span
        self.is_cancelled = responder.is_cancelled
        self._responder = responder
        self._model = model

    def __call__(self, result: np.ndarray | BaseException) -> None:
        request_id.set(self._request)  # of this thread, until it answers the next one
        error = result if isinstance(result, BaseException) else None
        try:
            if not isinstance(result, BaseException):
                self._responder.send({"waveform": result[None]})  # (N,) -> (1, N)
        except Exception as failure:  # the request must end even if its response cannot be sent
            error = failure
        self._span.end(error)
        self._responder.finish(error and error_response(error, self._model))

    def __enter__(self) -> "DeferredAnswer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self(error)
        return True


def answer_later(request: Any, *, model: str) -> DeferredAnswer:
    """Return the answer that `execute` of a model that is not decoupled hands to another thread with the request."""
    try:
        name = request.request_id()
    except ValueError:  # it is not UTF-8, and only for the log
        name = ""
    span = tracing.child(model, parameters(request)) if tracing.is_on() else tracing.OFF
    return DeferredAnswer(Responder(request.get_response_sender(), decoupled=False), model, name, span)


Handler = Callable[[Any, Responder], Awaitable[None]]


class RequestLoop:
    """An asyncio loop in a thread of its own; each request is one task and ends exactly once.

    `handler(request, responder)` sends the responses; the loop adds the final flag, turns an exception into an error
    response, and cancels the task if its client disconnects. `decoupled`: the model's transaction policy.
    """

    def __init__(self, handler: Handler, *, model: str, decoupled: bool) -> None:
        self._handler = handler
        self._model = model
        self._decoupled = decoupled
        self._tasks: set[asyncio.Task[None]] = set()
        self._live: dict[asyncio.Future[None], Responder] = {}
        self._closing = False
        self._closed = threading.Event()
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name=f"loop-{model}", daemon=True)
        self._thread.start()
        self._watcher = threading.Thread(target=self._watch, name=f"watch-{model}", daemon=True)
        self._watcher.start()

    def submit(self, request: Any) -> None:
        """Handle `request` in the loop. For `execute`, which then returns None."""
        responder = Responder(request.get_response_sender(), decoupled=self._decoupled)
        work = self._serve(request, responder)
        try:
            self.loop.call_soon_threadsafe(self.loop.create_task, work)
        except RuntimeError:  # the loop is closed
            work.close()
            responder.finish(error_response(self._shutting_down(), self._model))

    def run(self, work: Awaitable[ResultT], timeout: float | None = None) -> ResultT:
        """Run `work` in the loop and return its result, for `initialize` and `finalize`."""

        async def wait() -> ResultT:
            return await work

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result(timeout)

    def end_requests(self) -> None:
        """Cancel the running requests; they and all later ones are answered with UNAVAILABLE."""
        self._closing = True
        with suppress(concurrent.futures.TimeoutError):  # the built-in TimeoutError since Python 3.11
            self.run(self._cancel_all(), SHUTDOWN_SECONDS)

    def close(self) -> None:
        """End the requests and the threads. Safe to call twice."""
        if self.loop.is_closed():
            return
        self.end_requests()
        self._closed.set()
        self._watcher.join(SHUTDOWN_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SHUTDOWN_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()

    def _run_loop(self) -> None:
        try:
            self.loop.run_forever()
        except BaseException as error:  # SystemExit of a task leaves the loop, and nobody else would answer
            report_failure(self._model, error)

    async def _serve(self, request: Any, responder: Responder) -> None:
        """Serve one request; this is its error boundary. `_watch` cancels the task if its client disconnects."""
        failure: Any = None
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)  # here: one that is cancelled before it begins would answer nothing
        try:
            request_id.set(request.request_id())  # for this task; ValueError if it is not UTF-8
            if self._closing:
                raise self._shutting_down()
            self._live[task] = responder
            await self._handler(request, responder)
            if not self._decoupled and responder.held is None:
                raise RuntimeError("the handler sent no response")
        except asyncio.CancelledError as error:
            failure = error_response(self._shutting_down() if self._closing else error, self._model)
        except Exception as error:
            failure = error_response(error, self._model)
        finally:
            self._live.pop(task, None)
            self._tasks.discard(task)
            responder.finish(failure)

    def _watch(self) -> None:
        """Poll which clients have disconnected.

        In a thread, because each check waits for tritonserver: with hundreds of requests that would take a good part
        of the loop's time, and all of them at each poll would take a good part of the process's.
        """
        turn: list[asyncio.Future[None]] = []  # who is still to be asked
        share = POLLED
        while not self._closed.wait(CANCEL_POLL_SECONDS):
            if not turn:
                turn = list(self._live)
                share = max(POLLED, -(-len(turn) // POLLS_PER_TURN))
            for work in turn[:share]:
                try:
                    if (responder := self._live.get(work)) is None or not responder.is_cancelled():
                        continue
                    self.loop.call_soon_threadsafe(work.cancel)
                except Exception:  # an error with one request must not end the polling of the others
                    logger.exception("%s: cannot find out whether a client has disconnected", self._model)
                self._live.pop(work, None)
            del turn[:share]

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _shutting_down(self) -> UnavailableError:
        return UnavailableError(f"{self._model} is shutting down")
