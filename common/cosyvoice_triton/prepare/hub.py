"""Checkpoints from the HuggingFace hub or ModelScope; every file is compared with the hub's checksum.

The commit fetched first is kept: an interrupted download continues with it, and later starts need no network. Verified
files are recorded in `.downloads.json` next to the checkpoints.
"""

import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from cosyvoice_triton.prepare import transfer
from cosyvoice_triton.stacks import Stack

HubName = Literal["huggingface", "modelscope"]

RECORD = ".downloads.json"
HASH_BYTES = 8 << 20
SPARE_BYTES = 1 << 30  # for files that are made from the downloads


class DownloadError(RuntimeError):
    """The checkpoints could not be downloaded; the message says what to do. Complete parts are kept."""


@dataclass(frozen=True)
class Source:
    """Files of a repository of a hub and the directory, below the checkpoints' own, that they go to."""

    repository: str
    directory: str
    patterns: tuple[str, ...]
    hub: HubName = "huggingface"


def sources(stack: Stack, hub: HubName = "huggingface", weights: str = "") -> tuple[Source, ...]:
    """Return the repositories that a stack's files come from: one if its LLM is in the same one as the rest.

    weights: the LLM's file; by default the stack's. The text model's own weights are not read: the LLM has them.
    Raise DownloadError if a hub does not have one of them.
    """
    name = "repository" if hub == "huggingface" else "modelscope"
    repositories = [getattr(part, name) for part in (stack.llm, stack)]
    if not all(repositories):
        raise DownloadError(f"{hub} does not have the {stack.name} stack: leave --hub out")
    llm = Source(
        repositories[0],
        stack.llm.download,
        (weights or stack.llm.weights, f"{stack.llm.base}/*.json", f"{stack.llm.base}/*.txt"),
        hub,
    )
    files = tuple(str(PurePosixPath(stack.repository_folder, name)) for name in stack.files)
    if (stack.repository, stack.download) == (llm.repository, llm.directory):
        return (replace(llm, patterns=(*llm.patterns, *files)),)
    return llm, Source(repositories[1], stack.download, files, hub)


@dataclass(frozen=True)
class RemoteFile:
    """A file of a commit. `digest`: sha256 of large files; for others git's blob hash, "git:SHA1"."""

    name: str
    size: int
    digest: str

    def is_at(self, path: Path) -> bool:
        """Return whether a file of this size exists; `verify` checks its content."""
        return path.is_file() and path.stat().st_size == self.size

    def verify(self, path: Path) -> None:
        """Raise DownloadError if the checksum differs from the hub's; the file is then removed."""
        if (found := digest_of(path, git=self.digest.startswith("git:"))) != self.digest:
            path.unlink()
            raise DownloadError(
                f"{path} is damaged (its checksum is {found}, the hub's {self.digest}) and was removed; run again"
            )


def digest_of(path: Path, *, git: bool) -> str:
    """Return the sha256 of a file, or its git blob hash."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode()) if git else hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BYTES):
            digest.update(block)
    return f"git:{digest.hexdigest()}" if git else digest.hexdigest()


def fetch(source: Source, models: Path, revision: str | None = None) -> bool:
    """Complete one source, as `fetch_all` does; return False if it was complete."""
    return next(fetch_all((source,), models, {source.repository: revision}))


def fetch_all(sources: Sequence[Source], models: Path, revisions: Mapping[str, str | None]) -> Iterator[bool]:
    """Complete one source after another below `models`; yield False for one that was complete.

    revisions: commits, branches or tags to switch to, by repository. Raise DownloadError if a hub cannot be reached or
    refuses, a file is missing there, the disk is too full or a file is damaged. A hub may list what it does not send
    without a token, so the smallest file of every later source comes before the gigabytes of the first.
    """
    listings = [_listing_unless_complete(source, models, revisions.get(source.repository)) for source in sources]
    for source, listed in [*zip(sources, listings, strict=True)][1:]:
        if listed is not None:
            smallest = min(listed[1], key=lambda file: file.size)
            if not smallest.is_at(models / source.directory / smallest.name):
                _download(source, smallest, listed[0], models)
    for source, listed in zip(sources, listings, strict=True):
        if listed is not None:
            _complete(source, *listed, models, revisions.get(source.repository))
        yield listed is not None


def _complete(source: Source, commit: str, files: list[RemoteFile], models: Path, revision: str | None) -> None:
    """Download the missing files of a source, verify all of them and write them to the record."""
    record = read_record(models)
    known = record.get(source.repository)
    missing = []
    for file in files:
        path = models / source.directory / file.name
        if not file.is_at(path) and not _linked(file, path, models, record):
            missing.append(file)
    require_space(models, sum(file.size for file in missing))
    for file in files:
        path = models / source.directory / file.name
        if file in missing:
            _download(source, file, commit, models)
        file.verify(path)
    all_files = (known or {}).get("files", []) if known and known["commit"] == commit else []
    names = {file.name for file in files}
    all_files = [old for old in all_files if old["name"] not in names] + [asdict(file) for file in files]
    entry = {
        "commit": commit,
        "revision": revision,
        "directory": source.directory,
        "files": sorted(all_files, key=lambda entry: entry["name"]),
    }
    _write_record(models, record | {source.repository: entry})


def _linked(file: RemoteFile, path: Path, models: Path, record: Mapping[str, Any]) -> bool:
    """Make `path` a link to an equal file of another repository, or a copy; False if there is none.

    Stacks share files under different names: Step-Audio2's vocoder and prompt models are CosyVoice2's.
    """
    olds = [(entry.get("directory", ""), RemoteFile(**old)) for entry in record.values() for old in entry["files"]]
    for directory, old in olds:
        known = models / directory / old.name
        if (
            old.digest == file.digest
            and file.is_at(known)
            and digest_of(known, git=file.digest.startswith("git:")) == file.digest
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            try:
                path.hardlink_to(known)
            except OSError:  # the file system has none
                shutil.copyfile(known, path)
            return True
    return False


def read_record(models: Path) -> dict[str, Any]:
    """Return the downloaded and verified files by repository."""
    try:
        return dict(json.loads((models / RECORD).read_text()))
    except (OSError, ValueError):
        return {}


def require_space(models: Path, size: int) -> None:
    """Raise DownloadError unless `size` bytes and a reserve are free."""
    free = shutil.disk_usage(models).free
    if size and free < size + SPARE_BYTES:
        needed = (size + SPARE_BYTES) / 1e9
        raise DownloadError(
            f"{needed:.1f} GB are needed at {models}, {free / 1e9:.1f} GB are free; free some disk and run again"
        )


def _wanted(source: Source, known: Mapping[str, Any]) -> list[RemoteFile]:
    """Return the recorded files of a source; for a pattern without any, a placeholder that does not exist."""
    files = [RemoteFile(**entry) for entry in known["files"]]
    found = []
    for pattern in source.patterns:
        found += [file for file in files if fnmatch.fnmatch(file.name, pattern)] or [RemoteFile(pattern, -1, "")]
    return found


def _listing_unless_complete(source: Source, models: Path, revision: str | None) -> tuple[str, list[RemoteFile]] | None:
    """Return the commit to fetch, that of the record if it may stay, and its files; None if all of them are there."""
    known = read_record(models).get(source.repository)
    if known and (revision is None or revision in (known["commit"], known["revision"])):
        if all(file.is_at(models / source.directory / file.name) for file in _wanted(source, known)):
            return None
        revision = known["commit"]
    return _listing(source, revision)


def _listing(source: Source, revision: str | None) -> tuple[str, list[RemoteFile]]:
    try:
        commit, names = _HUBS[source.hub][0](source.repository, revision)
    except Exception as error:  # includes the errors of an HTTP library, which differs between versions
        raise DownloadError(_unreachable(source, error)) from error
    found: list[RemoteFile] = []
    for pattern in source.patterns:
        matching = [RemoteFile(*one) for one in names if fnmatch.fnmatch(one[0], pattern)]
        if not matching:
            raise DownloadError(f"{source.repository} at {commit} has no {pattern}; name another revision")
        found += matching
    return commit, found


def _download(source: Source, file: RemoteFile, commit: str, models: Path) -> None:
    """Download one file with a progress bar; an interrupted download is continued."""
    try:
        _HUBS[source.hub][1](source.repository, file.name, commit, models / source.directory / file.name)
    except Exception as error:  # as above
        raise DownloadError(_unreachable(source, error)) from error


def _huggingface_files(repository: str, revision: str | None) -> tuple[str, list[tuple[str, int, str]]]:
    from huggingface_hub import HfApi

    info = HfApi(endpoint=_endpoint()).model_info(repository, revision=revision, files_metadata=True)
    files = []
    for one in info.siblings or []:
        files.append((one.rfilename, int(one.size or 0), one.lfs.sha256 if one.lfs else f"git:{one.blob_id}"))
    return str(info.sha), files


def _huggingface_download(repository: str, name: str, commit: str, path: Path) -> None:
    from huggingface_hub import hf_hub_download

    directory = path.parents[name.count("/")]
    hf_hub_download(repository, name, revision=commit, local_dir=directory, endpoint=_endpoint())


# Of each hub: what lists a repository's files, what downloads one, and what its user can set.
_HUBS = {
    "huggingface": (
        _huggingface_files,
        _huggingface_download,
        "HF_ENDPOINT is a mirror, HF_TOKEN your access token, --hub modelscope the other hub",
    ),
    "modelscope": (transfer.modelscope_files, transfer.modelscope_download, "MODELSCOPE_ENDPOINT is a mirror"),
}


def _endpoint() -> str | None:
    """Return a mirror from the environment. Compose files pass an empty value for none."""
    return os.environ.get("HF_ENDPOINT") or None


def _unreachable(source: Source, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "code", None)
    if status in (401, 403):
        return (
            f"{source.hub} refuses {source.repository} (HTTP {status}), which is private or gated: "
            + ("set HF_TOKEN to a token" if source.hub == "huggingface" else "leave --hub out, and set HF_TOKEN to one")
            + " of an account that may read it, after it has accepted the terms on the repository's page"
        )
    words = str(error).strip().splitlines() or [type(error).__name__]
    hint = _HUBS[source.hub][2]
    return f"{source.repository} could not be downloaded: {words[0]}; complete parts are kept: run again ({hint})"


def _write_record(models: Path, record: Mapping[str, Any]) -> None:
    fresh = models / f"{RECORD}.new"
    fresh.write_text(json.dumps(record, indent=1) + "\n")
    fresh.rename(models / RECORD)
