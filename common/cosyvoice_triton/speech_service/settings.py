"""The settings of the service, checked once. `command` reads them from options and the environment."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cosyvoice_triton.constants import GRPC_PORT, PROMPT_SAMPLE_RATE, SAMPLE_RATE

RATES = frozenset((8_000, 11_025, 12_000, PROMPT_SAMPLE_RATE, 22_050, SAMPLE_RATE, 32_000, 44_100, 48_000))
MIB = 1 << 20
MAX_CHAR_BYTES = 4  # of UTF-8

# OpenAI's voices, which clients name unless they are told others.
OPENAI_VOICES = (
    *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse"),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the service; ValueError naming an invalid one.

    urls: gRPC addresses of Triton. voices_dir: folder of the registered voices. model: for requests that name no served
    model; empty: the first one served. sample_rate: of answers to requests without one. timeout: seconds for a whole
    answer. stall: seconds that a client may leave its audio unread. receive_timeout: seconds in which a request must
    have arrived. idle: seconds that a WebSocket may be silent. voice_aliases: further names of voices, as ALIAS=VOICE;
    those without a voice are spread over the registered ones.
    """

    urls: tuple[str, ...] = (f"localhost:{GRPC_PORT}",)
    voices_dir: Path = Path("models/demo/voices")
    voice_aliases: tuple[str, ...] = OPENAI_VOICES
    model: str = ""
    sample_rate: int = SAMPLE_RATE
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ("localhost",)
    max_streams: int = 64
    max_sessions: int = 256
    max_input_chars: int = 4096
    max_reference_mb: int = 10
    max_batch: int = 32
    max_connections: int = 1024
    timeout: float = 300.0
    stall: float = 60.0
    receive_timeout: float = 60.0
    idle: float = 300.0

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("no address of a Triton is given")
        object.__setattr__(self, "urls", tuple(grpc_address(url) for url in self.urls))
        for alias in self.voice_aliases:
            if not all(part.strip() for part in alias.split("=", 1)):
                raise ValueError(f"voice_aliases {alias!r} is not ALIAS=VOICE or ALIAS")
        if self.sample_rate not in RATES:
            raise ValueError(
                f"default_sample_rate {self.sample_rate} is not one of {', '.join(map(str, sorted(RATES)))}"
            )
        for name in (each for each in vars(self) if each.startswith("max_")):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive")
        for name in ("timeout", "stall", "receive_timeout", "idle"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} {getattr(self, name)} is not a positive number of seconds")

    @property
    def max_reference_bytes(self) -> int:
        return self.max_reference_mb * MIB

    @property
    def max_body_bytes(self) -> int:
        """Limit for a request body: one recording in base64, and the texts."""
        return self.max_reference_bytes * 4 // 3 + 2 * MIB

    @property
    def max_json_chars(self) -> int:
        """Limit for the punctuation of a body: no more than the characters of all texts of a batch."""
        return self.max_batch * self.max_input_chars

    @property
    def max_form_bytes(self) -> int:
        """Limit for a form without files: its texts, percent-encoded."""
        return 3 * MAX_CHAR_BYTES * 3 * self.max_input_chars


def grpc_address(url: str) -> str:
    """host:port of Triton's gRPC endpoint. ValueError naming an invalid address.

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
