"""CosyVoice text-to-speech on NVIDIA Triton Inference Server.

    from cosyvoice_triton import Client, Server

    with Server() as server, Client(server.address) as client:  # the demo voice, on this machine
        for chunk in client.stream("Good morning.", voice="rms"):  # float32 (N,) at client.sample_rate
            ...

`cosyvoice_triton.api` documents both. They are imported on first use, because every model's process imports this
package and needs neither.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cosyvoice_triton.api import Client as Client
    from cosyvoice_triton.api import ClientError as ClientError
    from cosyvoice_triton.api import Server as Server
    from cosyvoice_triton.api import ServerError as ServerError

__all__ = ["Client", "ClientError", "Server", "ServerError"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cosyvoice_triton import api

    return getattr(api, name)
