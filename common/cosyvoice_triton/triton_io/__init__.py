"""The only room that imports Triton's Python API: inputs, outputs, calls of models, one error boundary per request.

errors.py     exceptions to error responses and back
calls.py      calls of other models
streams.py    streamed calls, over gRPC; imported only where used, because it needs the gRPC client
requests.py   inputs and outputs; requests answered at once, later by a thread, or by tasks of an asyncio loop
"""

from cosyvoice_triton.batches import scalar
from cosyvoice_triton.monitoring import logs
from cosyvoice_triton.triton_io.calls import call
from cosyvoice_triton.triton_io.errors import error_response
from cosyvoice_triton.triton_io.requests import (
    DeferredAnswer,
    Handler,
    RequestLoop,
    Responder,
    answer_later,
    origin,
    parameters,
    read_all,
    require,
    respond_batch,
    to_response,
    to_tensor,
)

logs.configure()  # each model's process imports this room first
