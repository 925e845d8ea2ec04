"""What clients report: the error of a request that could not be sent or answered, and its words."""

from cosyvoice_triton import stacks


class ClientError(RuntimeError):
    """The request could not be sent or answered. The message is one line that says what to do next."""


def unreachable(server: str, reason: object) -> ClientError:
    """Return the error for a server that does not answer at `server`."""
    return ClientError(
        f"no tritonserver answers at {server} ({one_line(reason)}): start one with `cosyvoice-triton serve`, "
        "or correct the address, such as localhost:8001 for gRPC"
    )


def not_served(server: str, model: str) -> ClientError:
    """Return the error for a server that is running but does not have the model."""
    return ClientError(
        f"{server} does not serve the model '{model}': choose another with --model-name, "
        f"or start its stack with {' or '.join(f'`cosyvoice-triton serve --stack {name}`' for name in stacks.names())}"
    )


def unavailable(server: str, reason: object) -> ClientError:
    """Return the error for a broken connection, or a server that is temporarily unavailable."""
    return ClientError(f"{server} cannot answer ({one_line(reason)}): check that it is running, and its log")


def timed_out(server: str, seconds: float) -> ClientError:
    """Return the error for an answer that was not complete in time."""
    return ClientError(f"no complete answer from {server} within {seconds:g} s: retry, or raise --timeout")


def streams_only(model: str) -> ClientError:
    """Return the error for an offline request to a model with the decoupled policy."""
    return ClientError(
        f"'{model}' is served for streaming: use `cosyvoice-triton client-grpc --mode streaming`, "
        "or serve it for offline requests with `cosyvoice-triton serve --offline`"
    )


def refused(reason: object) -> ClientError:
    """Return the error with the server's own message, which names the offending value."""
    return ClientError(f"the server answered with an error: {one_line(reason)}")


def one_line(text: object) -> str:
    return " ".join(str(text).splitlines())
