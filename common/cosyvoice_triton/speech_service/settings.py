"""The settings of the service, each defined once: its default, its help and its check."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cosyvoice_triton.constants import GRPC_PORT, PROMPT_SAMPLE_RATE, SAMPLE_RATE, SPEECH_PORT

RATES = frozenset((8_000, 11_025, 12_000, PROMPT_SAMPLE_RATE, 22_050, SAMPLE_RATE, 32_000, 44_100, 48_000))
MIB = 1 << 20
MAX_CHAR_BYTES = 4  # of UTF-8

# OpenAI's voices, which clients name unless they are told others.
OPENAI_VOICES = (
    *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse"),
)


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _option(default: Any, help: str, name: str = "") -> Any:
    """Return a setting that is also an option of the command, called `name` if that differs from the field."""
    return field(default=default, metadata={"help": help, "name": name})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of the service. `command` makes an option of each. ValueError naming an invalid one."""

    urls: tuple[str, ...] = _option(
        (f"localhost:{GRPC_PORT}",), "gRPC addresses of Triton; the least busy one is used", "url"
    )
    voices_dir: Path = _option(Path("models/demo/voices"), "folder of the registered voices", "ref_audios_dir")
    voice_aliases: tuple[str, ...] = _option(
        OPENAI_VOICES,
        "further names of voices, such as alloy=anna; one without a voice gets one of those registered; default: "
        "OpenAI's names",
    )
    host: str = _option(LOOPBACK[0], "0.0.0.0 to accept other hosts; then also set --api_keys")
    port: int = _option(SPEECH_PORT, "0: any free one")
    runtime_port: int | None = _option(
        None, "serve the plain runtime's gRPC service too; its clients expect 50000; 0: any free one"
    )
    model: str = _option("", "for requests that name no served model; default: the first one served")
    sample_rate: int = _option(SAMPLE_RATE, "Hz of answers to requests without a sample_rate", "default_sample_rate")
    api_keys: tuple[str, ...] = _option((), "accepted keys; better set in SPEECH_API_KEYS")
    cors_origins: tuple[str, ...] = _option(
        (), "sites whose pages may use this service, such as https://example.org; *"
    )
    allowed_hosts: tuple[str, ...] = _option(
        (),
        "names by which this service may be addressed, such as speech.example.org or *.example.org; default: "
        "localhost with a --host of this machine only, otherwise any",
    )
    max_streams: int = _option(64, "concurrent streams; more are answered 429")
    max_sessions: int = _option(256, "limit of open WebSockets")
    max_input_chars: int = _option(4096, "limit of a text, in characters")
    max_reference_mb: int = _option(10, "size limit of an uploaded recording, in MiB")
    max_voices: int = _option(100, "limit of voices that one API key may register")
    max_batch: int = _option(32, "limit of texts in one batch")
    max_connections: int = _option(1024, "open HTTP connections; more are answered 503")
    timeout: float = _option(300.0, "seconds for a whole answer")
    stall: float = _option(60.0, "seconds that a client may leave its audio unread")
    receive_timeout: float = _option(60.0, "seconds in which a request must have arrived")
    # Longer than pools of clients and gateways keep idle connections (nginx: 60 s): if the server closes first, a
    # request that is sent at that moment is lost.
    keep_alive: float = _option(75.0, "seconds that an HTTP connection is kept between two requests")
    idle: float = _option(300.0, "seconds that a WebSocket may be silent, or a gRPC connection without calls")

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("no address of a Triton is given")
        object.__setattr__(self, "urls", tuple(grpc_address(url) for url in self.urls))
        if not self.allowed_hosts:
            object.__setattr__(self, "allowed_hosts", ("localhost",) if self.host in LOOPBACK else ("*",))
        for alias in self.voice_aliases:
            if not all(part.strip() for part in alias.split("=", 1)):
                raise ValueError(f"voice_aliases {alias!r} is not ALIAS=VOICE or ALIAS")
        if self.sample_rate not in RATES:
            raise ValueError(
                f"default_sample_rate {self.sample_rate} is not one of {', '.join(map(str, sorted(RATES)))}"
            )
        for name, value in vars(self).items():
            if name.startswith("max_") and value < 1:
                raise ValueError(f"{name} {value} is not positive")
            if isinstance(value, float) and not 0 < value < float("inf"):
                raise ValueError(f"{name} {value} is not a positive number of seconds")

    @property
    def max_reference_bytes(self) -> int:
        return self.max_reference_mb * MIB

    @property
    def max_reference_chars(self) -> int:
        """Return the limit for a recording in base64, in lines and with a data URL's header."""
        return self.max_reference_bytes * 4 // 3 + MIB

    @property
    def max_body_bytes(self) -> int:
        """Return the limit for a request body: one recording in base64, and the texts."""
        return self.max_reference_chars + MIB

    @property
    def max_unanswered_bytes(self) -> int:
        """Return the limit for all bodies and WebSocket messages that have begun to arrive: as many of the largest size
        as a quarter of `max_streams`, because most requests have no recording."""
        return self.max_body_bytes * max(self.max_streams // 4, 1)

    @property
    def max_json_chars(self) -> int:
        """Return the limit for the punctuation of a body: no more than the characters of all texts of a batch."""
        return self.max_batch * self.max_input_chars

    @property
    def max_form_bytes(self) -> int:
        """Return the limit for a form without files: its texts, percent-encoded."""
        return 3 * MAX_CHAR_BYTES * 3 * self.max_input_chars


def grpc_address(url: str) -> str:
    """Return host:port of Triton's gRPC endpoint. ValueError naming an invalid address.

    `http://host:8000`, which upstream's HTTP bridge expects, is Triton's HTTP endpoint and cannot stream. Its gRPC port
    is the next one by Triton's convention (8000/8001, 18000/18001).
    """
    parts = urlsplit(url if "://" in url else f"grpc://{url}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("grpc", "http") or not parts.hostname or not port or parts.path.strip("/"):
        raise ValueError(f"{url!r} is not the address of a Triton, such as localhost:8001")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port + 1 if parts.scheme == 'http' else port}"
