"""The signal from the process that runs tritonserver to its models: accept no new requests.

Triton cannot drain models that call each other: on SIGTERM it refuses their calls too, and every stream in progress
fails. So it gets SIGTERM only after the last request has ended, and until then the orchestrators refuse new ones. The
signal is a file, because that needs no port, lock or thread in a process that Triton owns.
"""

from pathlib import Path

from cosyvoice_triton.errors import UnavailableError


class DrainFile:
    """Created once, by the process that started the server. `path` None: this server is never drained."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def reserve(self) -> None:
        """Make the file under another name, so that `create` needs no inode, of which a full disk has none."""
        if self._path:
            self._path.with_suffix(".reserved").touch()

    def create(self) -> None:
        """Let `check` raise from now on. OSError if nothing was reserved."""
        if self._path:
            self._path.with_suffix(".reserved").rename(self._path)

    def check(self) -> None:
        """Raise UnavailableError once the file exists."""
        if self._path and self._path.exists():
            raise UnavailableError("this server is shutting down and accepts no new requests; retry or use another one")
