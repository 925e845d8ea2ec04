"""Word from the process that runs a tritonserver to its models: begin no new request.

Triton cannot drain models that call each other: told to end, it refuses their calls too, and every live stream fails.
So it is told only once no request lives, and until then the orchestrators refuse what is new. Their processes hear of
it by a file, because that is the one thing that needs no port, no lock and no thread in a process which Triton owns.
"""

import os
from pathlib import Path

from common.errors import UnavailableError

VARIABLE = "TTS_DRAIN_FILE"


class DrainMark:
    """Set once, by the process that started the server; `path` None is never set."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def of_environment(cls) -> "DrainMark":
        """The mark of the server whose model this process runs."""
        path = os.environ.get(VARIABLE)
        return cls(Path(path) if path else None)

    def environment(self) -> dict[str, str]:
        """What `of_environment` finds in the models' processes."""
        return {VARIABLE: str(self._path)} if self._path else {}

    def set(self) -> None:
        if self._path:
            self._path.touch()

    def check(self) -> None:
        """UnavailableError once the mark is set."""
        if self._path and self._path.exists():
            raise UnavailableError("this server is being stopped and takes no new requests; ask again or another one")
