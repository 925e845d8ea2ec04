"""A small file that one process replaces several times a second and another one reads, on a disk that may be full.

Its bytes are reserved when it is made, and replaced in place from then on: that needs no free block, no inode and no
name in a directory, so that a full disk does not make a sound model look dead. Two slots are written in turn, and a
checksum tells the reader which of them is whole. Not prometheus_client's multi-process mode: it maps sparse files into
memory, and a write to a page for which the disk has no block ends the process with SIGBUS.
"""

import os
import struct
import zlib
from pathlib import Path

_HEADER = struct.Struct("<QII")  # number of the version, bytes of its content, their checksum
ATTEMPTS = 3  # to read: a reader that is held up between the slots may find both changed
_SPARE = 4096  # bytes that the content may grow by, beside twice its first size


class MetricsFile:
    """The writer of a file. An existing one is continued: its process has ended."""

    def __init__(self, path: Path, content: bytes) -> None:
        """Make the file with this content. OSError if the disk is full already."""
        new = not path.exists()
        source = path.with_suffix(".new") if new else path  # readers see the whole file or none
        if new:
            source.write_bytes(bytes(2 * (_HEADER.size + 2 * len(content) + _SPARE)))
        self._version = 0 if new else read(path)[0]
        self._file = os.open(source, os.O_RDWR)
        self._slot = os.fstat(self._file).st_size // 2
        self.write(content)
        if new:
            source.rename(path)

    def write(self, content: bytes) -> None:
        """Replace the content. ValueError if it has grown beyond what was reserved."""
        if _HEADER.size + len(content) > self._slot:
            raise ValueError(f"{len(content)} bytes of metrics; {self._slot - _HEADER.size} are reserved")
        version = self._version + 1
        header = _HEADER.pack(version, len(content), _checksum(version, content))
        os.pwrite(self._file, header + content, version % 2 * self._slot)
        self._version = version

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> tuple[int, bytes]:
    """Return the latest version's number, which increases with each write, and its content. OSError if there is no such
    file, ValueError if it is none of these."""
    for _ in range(ATTEMPTS):
        stored = path.read_bytes()
        slots = stored[: len(stored) // 2], stored[len(stored) // 2 :]
        if versions := [version for slot in slots if (version := _version(slot)) is not None]:
            return max(versions)
    raise ValueError(f"{path} holds no metrics")


def _version(slot: bytes) -> tuple[int, bytes] | None:
    """Return what one slot holds, None while it is being replaced or was never written."""
    if len(slot) < _HEADER.size:
        return None
    version, size, checksum = _HEADER.unpack_from(slot)
    content = slot[_HEADER.size : _HEADER.size + size]
    return (version, content) if version and checksum == _checksum(version, content) else None


def _checksum(version: int, content: bytes) -> int:
    return zlib.crc32(content, version & 0xFFFFFFFF)
