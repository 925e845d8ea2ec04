"""The trained checkpoint in this repository: its place and its checksums.

python -m demo_voice.training                        trains it, see demo_voice/README.md
demo_checkpoint/trained/                             official layout; README.md is its model card
(cd demo_checkpoint/trained && sha256sum -c SHA256SUMS)
"""

import hashlib
import shutil
from pathlib import Path

from cosyvoice_triton import stacks

TRAINED = Path(__file__).resolve().parent / "trained"
SUMS = "SHA256SUMS"
CARD = "README.md"
STACKS = tuple(stack for stack in stacks.BUILT_IN if (TRAINED / stack.checkpoint).is_dir())  # that it has
MAX_BYTES = 24 * 10**6  # of all files together, since they are in every clone


def files_of(directory: Path) -> list[str]:
    """Return the files with a checksum, relative to `directory`: all but the checksums and the model card."""
    found = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in found if name not in (SUMS, CARD))


def read_sums(directory: Path) -> dict[str, str]:
    """Return the SHA-256 by file name. Raise ValueError if the list is missing or malformed."""
    path = directory / SUMS
    if not path.is_file():
        raise ValueError(f"{path} is missing: it is part of the repository; run: git checkout {directory}")
    lines = path.read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if not sums or not all(len(digest) == 64 and name for name, digest in sums.items()):
        raise ValueError(f"{path} is not a list of SHA-256 sums")
    return sums


def check(directory: Path) -> None:
    """Compare all checksums. ValueError names the first file that is missing or damaged."""
    for name, digest in read_sums(directory).items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if _sha256(path) != digest:
            raise ValueError(f"{path} is damaged: its SHA-256 is not that of {SUMS}")


def copy(destination: Path) -> None:
    """Copy the checkpoint with its model card and checksums to `destination` and check it there."""
    for name in (CARD, SUMS, *read_sums(TRAINED)):
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(TRAINED / name, target)
    check(destination)


def write_sums(directory: Path) -> None:
    """Write the checksums of the files in `directory`."""
    sums = "".join(f"{_sha256(directory / name)}  {name}\n" for name in files_of(directory))
    (directory / SUMS).write_text(sums, encoding="utf-8")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
