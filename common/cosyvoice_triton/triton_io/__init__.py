"""The only room that imports Triton's Python API: inputs, outputs, calls of models, one error boundary per request.

tensors.py    reads the inputs of a request and builds the outputs
errors.py     exceptions to error responses and back
calls.py      calls of other models
streams.py    streamed calls, over gRPC; imported only where used, because it needs the gRPC client
requests.py   requests answered at once, later by a thread, or by tasks of an asyncio loop
"""

from cosyvoice_triton.monitoring import logs
from cosyvoice_triton.triton_io.calls import call
from cosyvoice_triton.triton_io.errors import error_response
from cosyvoice_triton.triton_io.requests import (
    DeferredAnswer,
    Handler,
    RequestLoop,
    Responder,
    answer_later,
    respond_batch,
)
from cosyvoice_triton.triton_io.tensors import (
    origin,
    parameters,
    read_all,
    require,
    scalar,
    text,
    to_response,
    to_tensor,
)

logs.configure()  # each model's process imports this room first
