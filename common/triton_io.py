"""The only Triton-aware file of the library: inputs, outputs, calls of other models, one error boundary per request.

ValueError        <-> INVALID_ARG      the caller's mistake
UnavailableError  <-> UNAVAILABLE      full, timed out, or a part of the service is down
CancelledError     -> CANCELLED        the client went away
anything else      -> INTERNAL         a bug, logged with its traceback
"""

import asyncio
import json
import logging
import re
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from common.audio import validate_reference
from common.errors import LostAnswerError, UnavailableError

logger = logging.getLogger(__name__)

InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")

CANCEL_POLL_SECONDS = 0.1
SHUTDOWN_SECONDS = 10.0
# Words that open a message. A call between models loses the code of an error (Triton 2.51 makes every one INTERNAL),
# so the caller tells them by these.
INVALID = "invalid request: "
UNAVAILABLE = "unavailable: "
# Triton's own words where a model's process has died, or where the server is ending and refuses calls between models.
MODEL_DOWN = re.compile(r"Stub process .* is not healthy|Server not ready")
MAX_MESSAGE_CHARS = 500  # gRPC carries errors in escaped headers, of which a client takes 8 kB


# --- inputs and outputs ------------------------------------------------------------------------------------------


def read(request: Any, name: str) -> np.ndarray | None:
    """The input `name` as it was sent, batch dimension included; None when it was not."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def read_all(request: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Those of the inputs `names` that were sent, by name."""
    arrays = {name: read(request, name) for name in names}
    return {name: array for name, array in arrays.items() if array is not None}


def require(request: Any, name: str) -> np.ndarray:
    """The input `name`; ValueError when it was not sent."""
    array = read(request, name)
    if array is None:
        raise ValueError(f"{name} is missing")
    return array


def scalar(request: Any, name: str) -> Any:
    """The only element of the input `name` as a Python value; None when it was not sent."""
    array = read(request, name)
    if array is None:
        return None
    if array.size != 1:
        raise ValueError(f"{name} must hold one value, not {array.size} (shape {list(array.shape)})")
    return array.reshape(-1)[0].item() if array.dtype != object else array.reshape(-1)[0]


def text(request: Any, name: str) -> str | None:
    """The only string of the input `name`, from UTF-8; None when it was not sent."""
    value = scalar(request, name)
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from None


def parameters(request: Any) -> dict[str, Any]:
    """The request's own parameters: strings, numbers and booleans by name."""
    return dict(json.loads(request.parameters() or "{}"))


def reference(request: Any) -> np.ndarray:
    """The recording in `reference_wav`, checked: float32 (N,), without the padding behind `reference_wav_len`."""
    return validate_reference(require(request, "reference_wav"), scalar(request, "reference_wav_len"))


def to_tensor(name: str, array: np.ndarray) -> Any:
    """`array` as a Triton tensor; strings as objects of bytes or str.

    Numbers travel by DLPack: with numpy 2 the backend's own constructor reads no bytes at all. They go through torch,
    because the backend renames the capsule to a name that numpy's destructor does not know.
    """
    if array.dtype == object or array.size == 0:  # the backend takes an empty DLPack tensor for a strided one
        return pb_utils.Tensor(name, array)
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy()
    return pb_utils.Tensor.from_dlpack(name, torch.from_numpy(array))


def to_response(outputs: Mapping[str, np.ndarray]) -> Any:
    return pb_utils.InferenceResponse([to_tensor(name, array) for name, array in outputs.items()])


def error_response(error: BaseException, model: str) -> Any:
    """The response that tells a client of `error`; what is not its own fault is logged here."""
    code, message = pb_utils.TritonError.INTERNAL, f"{model}: {type(error).__name__}: {error}"
    if isinstance(error, ValueError):
        code, message = pb_utils.TritonError.INVALID_ARG, f"{INVALID}{error}"
    elif isinstance(error, UnavailableError):
        code, message = pb_utils.TritonError.UNAVAILABLE, f"{UNAVAILABLE}{error}"
        logger.warning("%s: %s", model, error)
    elif isinstance(error, asyncio.CancelledError):
        code, message = pb_utils.TritonError.CANCELLED, "the request was cancelled"
    else:
        logger.error("%s failed", model, exc_info=error)
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[:MAX_MESSAGE_CHARS]}... ({len(message)} characters)"
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


# --- models that answer at once ----------------------------------------------------------------------------------


def respond_batch(
    requests: Sequence[Any],
    parse: Callable[[Any], InputT],
    compute: Callable[[list[InputT]], Sequence[Mapping[str, np.ndarray]]],
    *,
    model: str,
) -> list[Any]:
    """One response per request, in order: `compute` runs once, over the inputs that `parse` accepted.

    A request that `parse` rejects answers its own error and its neighbours are served. An error of `compute` is
    everybody's, since no input can be blamed.
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
    try:
        results = compute(list(accepted.values()))
        answers = [to_response(outputs) for outputs in results]
        assert len(answers) == len(accepted), f"{len(accepted)} inputs gave {len(answers)} results"
    except Exception as error:
        answers = [error_response(error, model) for _ in accepted]
    for index, answer in zip(accepted, answers, strict=True):
        responses[index] = answer
    return responses


# --- calls of other models ---------------------------------------------------------------------------------------


async def call(
    model: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    *,
    correlation_id: int = 0,
    start: bool = False,
    end: bool = False,
    request_id: str = "",
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
        request_id=request_id,
        correlation_id=correlation_id,
        flags=flags,
    )
    try:
        response = await asyncio.wait_for(_in_thread(request.exec), timeout)
    except asyncio.TimeoutError:
        raise UnavailableError(f"{model} did not answer within {timeout:g} s") from None
    arrays = _outputs(model, response)
    if absent := [name for name in outputs if name not in arrays]:
        raise LostAnswerError(f"{model} answered without {', '.join(absent)}: the same request failed before")
    return arrays


async def stream(
    model: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    *,
    request_id: str = "",
) -> AsyncGenerator[dict[str, np.ndarray], None]:
    """The outputs of each response of a decoupled `model`, as they arrive; the caller bounds the waiting.

    Leaving early drops the rest, but does not stop the model: Triton 2.51 has no cancel for such a call. It also loses
    an error that follows other responses, and the end with it: the model must end by FINAL alone after its first
    response, or the thread that reads it is never freed.
    """
    request = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=list(outputs),
        inputs=[to_tensor(name, array) for name, array in inputs.items()],
        request_id=request_id,
    )
    loop = asyncio.get_running_loop()
    arrivals: asyncio.Queue[Any] = asyncio.Queue()
    finished = object()

    def put(item: Any) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody is left to hear it
            loop.call_soon_threadsafe(arrivals.put_nowait, item)

    def forward() -> None:
        try:
            for response in request.exec(decoupled=True):
                put(response)
        except Exception as error:
            put(error)
        put(finished)

    threading.Thread(target=forward, name=f"stream-{model}", daemon=True).start()
    while (item := await arrivals.get()) is not finished:
        if isinstance(item, Exception):
            raise item
        if arrived := _outputs(model, item):  # the last response may only say that it is the last
            yield arrived


async def _in_thread(function: Callable[[], ResultT]) -> ResultT:
    """Run a blocking `function` in a thread of its own.

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

    threading.Thread(target=run, name="call", daemon=True).start()
    return await asyncio.wrap_future(future)


def _outputs(model: str, response: Any) -> dict[str, np.ndarray]:
    """The arrays of a response, or its error raised."""
    if response.has_error():
        code, message = response.error().code(), response.error().message()
        if code == pb_utils.TritonError.INVALID_ARG or INVALID in message:
            raise ValueError(f"{model}: {message.split(INVALID, 1)[-1]}")
        if code == pb_utils.TritonError.UNAVAILABLE or UNAVAILABLE in message or MODEL_DOWN.search(message):
            raise UnavailableError(f"{model}: {message.split(UNAVAILABLE, 1)[-1]}")
        raise RuntimeError(f"{model}: {message}")
    return {tensor.name(): _to_array(tensor) for tensor in response.output_tensors()}


def _to_array(tensor: Any) -> np.ndarray:
    """On the CPU; the copy outlives the response, whose memory Triton takes back."""
    return tensor.as_numpy().copy() if tensor.is_cpu() else torch.from_dlpack(tensor.to_dlpack()).cpu().numpy()


# --- models that answer later ------------------------------------------------------------------------------------


class Responder:
    """The way back to one client: any number of `send` (one if the model is not decoupled), then the loop's FINAL."""

    def __init__(self, sender: Any, *, decoupled: bool) -> None:
        self._sender = sender
        self._decoupled = decoupled
        self._held: Any = None  # the only response of a model that is not decoupled: it must carry FINAL
        self._lock = threading.Lock()
        self._ended = False

    def send(self, outputs: Mapping[str, np.ndarray]) -> None:
        """Send one response."""
        response = to_response(outputs)
        with self._lock:
            assert not self._ended, "a response after the final one"
            if self._decoupled:
                self._sender.send(response)
            else:
                assert self._held is None, "a model that is not decoupled answers once"
                self._held = response

    def check_answered(self) -> None:
        """RuntimeError when a model that is not decoupled is about to end a request without an answer."""
        if not self._decoupled and self._held is None:
            raise RuntimeError("the handler sent no response")

    def is_cancelled(self) -> bool:
        """The client went away."""
        return bool(self._sender.is_cancelled())

    def finish(self, error: Any = None) -> None:
        """End the request, with an error response if there is one; only the first call counts."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            last = error or self._held
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            if last is None:
                self._sender.send(flags=final)
            else:
                self._sender.send(last, flags=final)


class LateAnswer:
    """The one answer of a request that another thread will give: call it with the output's array or an exception."""

    def __init__(self, responder: Responder, output: str, model: str) -> None:
        self.is_cancelled = responder.is_cancelled
        self._responder = responder
        self._output = output
        self._model = model

    def __call__(self, result: np.ndarray | BaseException) -> None:
        if isinstance(result, BaseException):
            self._responder.finish(error_response(result, self._model))
        else:
            self._responder.send({self._output: result[None]})  # (N,) -> (1, N)
            self._responder.finish()


@contextmanager
def answer_later(request: Any, output: str, *, model: str) -> Iterator[LateAnswer]:
    """For `execute` of a model that is not decoupled: a block that hands the request to a thread of its own.

    An exception in the block is the request's answer; after the block the answer is the thread's duty.
    """
    answer = LateAnswer(Responder(request.get_response_sender(), decoupled=False), output, model)
    try:
        yield answer
    except Exception as error:
        answer(error)


Handler = Callable[[Any, Responder], Awaitable[None]]


class RequestLoop:
    """An asyncio loop in a thread of its own, where each request is one task that ends exactly once.

    `handler(request, responder)` sends what it has; the loop adds the final response, turns an exception into an
    error response, and cancels the task when its client goes away. `decoupled`: as the model is configured.
    """

    def __init__(self, handler: Handler, *, model: str, decoupled: bool) -> None:
        self._handler = handler
        self._model = model
        self._decoupled = decoupled
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=f"loop-{model}", daemon=True)
        self._thread.start()

    def submit(self, request: Any) -> None:
        """Serve `request` in the loop; to be called from `execute`, which then returns None."""
        responder = Responder(request.get_response_sender(), decoupled=self._decoupled)
        try:
            self.loop.call_soon_threadsafe(self._start, request, responder)
        except RuntimeError:  # the loop is closed
            responder.finish(error_response(self._shutting_down(), self._model))

    def run(self, work: Awaitable[ResultT], timeout: float | None = None) -> ResultT:
        """The result of `work` in the loop, for `initialize` and `finalize`."""

        async def wait() -> ResultT:
            return await work

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result(timeout)

    def close(self) -> None:
        """Cancel what runs, answer it with UNAVAILABLE, and end the thread; safe to call twice."""
        if self._closing:
            return
        self._closing = True
        with suppress(TimeoutError, asyncio.TimeoutError):
            self.run(self._cancel_all(), SHUTDOWN_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SHUTDOWN_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()

    def _start(self, request: Any, responder: Responder) -> None:
        task = self.loop.create_task(self._serve(request, responder))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, request: Any, responder: Responder) -> None:
        """The error boundary of one request."""
        failure: Any = None
        try:
            if self._closing:
                raise self._shutting_down()
            await self._handle(request, responder)
            responder.check_answered()
        except asyncio.CancelledError as error:
            failure = error_response(self._shutting_down() if self._closing else error, self._model)
        except Exception as error:
            failure = error_response(error, self._model)
        finally:
            responder.finish(failure)

    async def _handle(self, request: Any, responder: Responder) -> None:
        """Run the handler and cancel it when the client goes away."""
        work = asyncio.ensure_future(self._handler(request, responder))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=CANCEL_POLL_SECONDS)
                if not work.done() and responder.is_cancelled():
                    break
        finally:
            work.cancel()  # does nothing to work that is done
            await asyncio.wait({work})
        work.result()

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _shutting_down(self) -> UnavailableError:
        return UnavailableError(f"{self._model} is shutting down")
