"""Triton's response cache, which keeps what the encoders made of recordings: in memory, or in a Redis that servers
share."""

import os
import socket

REDIS_PORT = 6379
ANSWER_SECONDS = 10.0


def cache_option(redis: str, mib: int) -> str:
    """Return the value of Triton's --cache-config. redis: HOST or HOST:PORT, "" for a cache of `mib` MiB in memory."""
    if not redis:
        return f"local,size={mib << 20}"
    host, port = _address(redis)
    return f"redis,host={host},port={port}"


def empty_redis(redis: str) -> None:
    """Empty the cache in a Redis: an entry's key does not tell whose recording it is of. Raise OSError if it fails."""
    password, user = (os.environ.get(f"TRITONCACHE_REDIS_{name}", "") for name in ("PASSWORD", "USERNAME"))
    login = [["AUTH", *([user] if user else []), password]] if password else []
    with socket.create_connection(_address(redis), ANSWER_SECONDS) as connection, connection.makefile("rb") as answers:
        for command in (*login, ["FLUSHDB"]):
            words = [word.encode() for word in command]
            parts = [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
            connection.sendall(b"*%d\r\n" % len(words) + b"".join(parts))
            if not (answer := answers.readline(1024)).startswith(b"+"):
                raise OSError(f"Redis at {redis} answers {answer.decode(errors='replace').strip()!r}")


def _address(redis: str) -> tuple[str, int]:
    host, _, port = redis.partition(":")
    if not host or not (port or str(REDIS_PORT)).isdigit():
        raise ValueError(f"--redis {redis!r} is not HOST or HOST:PORT")
    return host, int(port or REDIS_PORT)
