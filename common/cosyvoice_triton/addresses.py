"""Addresses of servers: how they are written, and which of them no proxy can reach."""

import ipaddress
import socket
import urllib.request
from typing import Any
from urllib.parse import urlsplit

# The details of grpc.aio's INTERNAL if the server has ended a call before the request has left; the server's own status
# is lost then.
ENDED_EARLY = "Internal error from Core"

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def join(host: str, port: int) -> str:
    """Return host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int | None]:
    """Return the host and the port of host:port or a URL; "" and None for what is missing."""
    parts = urlsplit(address if "//" in address else f"//{address}")
    return parts.hostname or "", parts.port


def is_this_machine(host: str) -> bool:
    """Return whether a host is this machine: `localhost`, or an address that can be bound here. Other names are not
    resolved: behind a proxy that may take seconds and fail."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        version = ipaddress.ip_address(host).version
        with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        return False
    return True


def open_page(url: str, seconds: float) -> Any:
    """Open a URL like `urlopen`, but a page of this machine never through a proxy, whatever `no_proxy` says: an
    `http_proxy` that Docker puts into a container's environment cannot reach the container itself."""
    opener = _direct.open if is_this_machine(split(url)[0]) else urllib.request.urlopen
    return opener(url, timeout=seconds)


def channel_options(address: str) -> list[tuple[str, int]]:
    """Return the options of a gRPC channel: messages of any size, and, as for pages, to this machine no proxy."""
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    return options + [("grpc.enable_http_proxy", 0)] * is_this_machine(split(address)[0])
