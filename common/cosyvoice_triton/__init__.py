"""CosyVoice text-to-speech: in this process, or on NVIDIA Triton Inference Server.

    from cosyvoice_triton import Speaker

    with Speaker() as speaker:  # the demo voice, in this process
        for chunk in speaker.stream("Good morning.", voice="kumo"):  # float32 (N,) at speaker.sample_rate
            ...

    from cosyvoice_triton import Client, Server

    with Server() as server, Client(server.address) as client:  # the same with a tritonserver, for many listeners
        for chunk in client.stream("Good morning.", voice="kumo"):
            ...

`cosyvoice_triton.speaker.speaker` and `cosyvoice_triton.api` document them. They are imported on first use, because
every model's process imports this package and needs none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cosyvoice_triton.api import Client as Client
    from cosyvoice_triton.api import ClientError as ClientError
    from cosyvoice_triton.api import Server as Server
    from cosyvoice_triton.api import ServerError as ServerError
    from cosyvoice_triton.speaker.speaker import Speaker as Speaker

_HOMES = dict.fromkeys(("Client", "ClientError", "Server", "ServerError"), "cosyvoice_triton.api")
_HOMES["Speaker"] = "cosyvoice_triton.speaker.speaker"
__all__ = ["Client", "ClientError", "Server", "ServerError", "Speaker"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
