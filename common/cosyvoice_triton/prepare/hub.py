"""Checkpoints from the HuggingFace hub or ModelScope; every file is compared with the hub's checksum.

The commit fetched first is kept: an interrupted download continues with it, and later starts need no network. Verified
files are recorded in `.downloads.json` next to the checkpoints.
"""

import fnmatch
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple
from urllib.parse import urlencode
from urllib.request import urlopen

from tqdm import tqdm

from cosyvoice_triton.stacks import Stack

BRANCH = "master"  # ModelScope's default
TIMEOUT_SECONDS = 60
HubName = Literal["huggingface", "modelscope"]
SETTINGS = {
    "huggingface": "HF_ENDPOINT is a mirror, HF_TOKEN your access token, --hub modelscope the other hub",
    "modelscope": "MODELSCOPE_ENDPOINT is a mirror",
}

RECORD = ".downloads.json"
HASH_BYTES = 8 << 20
LINE_SECONDS = 10.0
SPARE_BYTES = 1 << 30  # for files that are made from the downloads


class DownloadProgress(tqdm):
    """The progress of a file: a bar on a terminal, in a log lines at its begin, every LINE_SECONDS and at its end."""

    def __init__(self, **options: Any) -> None:
        self._is_log = not sys.stderr.isatty()
        if self._is_log:
            options["desc"] = options["desc"].rpartition("/")[2]  # the hub's client may give the whole address
            options |= {"mininterval": LINE_SECONDS, "bar_format": "{desc}: {n_fmt} of {total_fmt}B, {rate_fmt}"}
        super().__init__(**options | {"disable": False})

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        if not self._is_log:
            return super().display(msg, pos)
        print(self, file=sys.stderr, flush=True)
        return True


@dataclass(frozen=True)
class Download:
    """Files of a repository of a hub and the directory, below the checkpoints' own, that they go to."""

    repository: str
    directory: str
    patterns: tuple[str, ...]
    hub: HubName = "huggingface"


def sources(stack: Stack, hub: HubName = "huggingface", weights: str = "") -> tuple[Download, ...]:
    """Return the repositories that a stack's files come from: one if its LLM is in the same one as the rest.

    weights: the LLM's file; by default the stack's. The text model's own weights are not read: the LLM has them.
    Raise RuntimeError if a hub does not have one of them.
    """
    name = "repository" if hub == "huggingface" else "modelscope"
    repositories = [getattr(part, name) for part in (stack.llm, stack)]
    if not all(repositories):
        raise RuntimeError(f"{hub} does not have the {stack.name} stack: leave --hub out")
    llm = Download(
        repositories[0],
        stack.llm.download,
        (weights or stack.llm.weights, f"{stack.llm.base}/*.json", f"{stack.llm.base}/*.txt"),
        hub,
    )
    files = tuple(str(PurePosixPath(stack.repository_folder, name)) for name in stack.files)
    if (repositories[1], stack.download) == (llm.repository, llm.directory):
        return (replace(llm, patterns=(*llm.patterns, *files)),)
    return llm, Download(repositories[1], stack.download, files, hub)


class RemoteFile(NamedTuple):
    """A file of a commit. `digest`: sha256 of large files; for others git's blob hash, "git:SHA1"."""

    name: str
    size: int
    digest: str

    def is_at(self, path: Path) -> bool:
        """Return whether a file of this size exists; `is_whole_at` reads it."""
        return path.is_file() and path.stat().st_size == self.size

    def is_whole_at(self, path: Path) -> bool:
        """Return whether the file there has the hub's checksum."""
        return digest_of(path, git=self.digest.startswith("git:")) == self.digest


def digest_of(path: Path, *, git: bool) -> str:
    """Return the sha256 of a file, or its git blob hash."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode()) if git else hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BYTES):
            digest.update(block)
    return f"git:{digest.hexdigest()}" if git else digest.hexdigest()


def fetch(sources: Sequence[Download], models: Path, revisions: Mapping[str, str]) -> list[bool]:
    """Complete the sources below `models`; return which of them were not complete.

    revisions: commits, branches or tags to switch to, by repository. Raise RuntimeError if a hub cannot be reached or
    refuses, a file is missing there, the disk is too full or a file is damaged.
    """
    record, listings = read_record(models), dict[Download, tuple[str, list[RemoteFile]]]()
    for source in sources:
        known, revision = record.get(source.repository), revisions.get(source.repository)
        if known and revision in (None, known["commit"], known["revision"]):
            if _is_complete(source, known, models):
                continue
            revision = known["commit"]  # the rest of the same
        listings[source] = _listing(source, revision)
    missing = [
        (file, commit, source)
        for source, (commit, files) in listings.items()
        for file in files
        if not file.is_at(models / source.directory / file.name)
    ]
    require_space(models, sum(file.size for file, *_ in missing))
    # A hub may list what it does not send without a token: the smallest file of each source comes before any gigabytes.
    # One after another in this thread, because those of `snapshot_download` do not end at Ctrl-C or SIGTERM.
    missing.sort(key=lambda each: each[0].size)
    smallest = {source: file for file, _, source in reversed(missing)}
    for file, commit, source in sorted(missing, key=lambda each: each[0] is not smallest[each[2]]):
        with _explaining(source):
            _download(source, file, commit, models / source.directory)
    for source, (commit, files) in listings.items():
        for file in files:
            if not file.is_whole_at(path := models / source.directory / file.name):
                path.unlink()
                raise RuntimeError(
                    f"{path} is damaged (its checksum is not the hub's {file.digest}) and was removed; run again"
                )
        _write_record(models, source, commit, revisions.get(source.repository), files)
    return [source in listings for source in sources]


def _is_complete(source: Download, known: Mapping[str, Any], models: Path) -> bool:
    """Return whether there are recorded files for each pattern, all of their sizes."""
    files = [RemoteFile(**entry) for entry in known["files"]]
    found = [_matching(files, pattern) for pattern in source.patterns]
    return all(found) and all(file.is_at(models / source.directory / file.name) for files in found for file in files)


def _listing(source: Download, revision: str | None) -> tuple[str, list[RemoteFile]]:
    """Return the commit of a revision, and its files that the source needs."""
    with _explaining(source):
        commit, listed = (_huggingface if source.hub == "huggingface" else _modelscope)(source.repository, revision)
    found = {pattern: _matching(listed, pattern) for pattern in source.patterns}
    for pattern, matching in found.items():
        if not matching:
            raise RuntimeError(f"{source.repository} at {commit} has no {pattern}; name another revision")
    return commit, [file for matching in found.values() for file in matching]


def _matching(files: Sequence[RemoteFile], pattern: str) -> list[RemoteFile]:
    return [file for file in files if fnmatch.fnmatch(file.name, pattern)]


def require_space(models: Path, size: int) -> None:
    """Raise RuntimeError unless `size` bytes and a reserve are free."""
    free = shutil.disk_usage(models).free
    if size and free < size + SPARE_BYTES:
        needed = (size + SPARE_BYTES) / 1e9
        raise RuntimeError(
            f"{needed:.1f} GB are needed at {models}, {free / 1e9:.1f} GB are free; free some disk and run again"
        )


def read_record(models: Path) -> dict[str, Any]:
    """Return the downloaded and verified files by repository."""
    try:
        return dict(json.loads((models / RECORD).read_text()))
    except (OSError, ValueError):
        return {}


def _write_record(models: Path, source: Download, commit: str, revision: str | None, files: list[RemoteFile]) -> None:
    """Add the files of a source to those that other stacks have of the same commit."""
    record = read_record(models)
    known = record.get(source.repository, {"commit": None})
    by_name = {old["name"]: old for old in known["files"]} if known["commit"] == commit else {}
    by_name |= {file.name: file._asdict() for file in files}
    listed = [by_name[name] for name in sorted(by_name)]
    record[source.repository] = {"commit": commit, "revision": revision, "files": listed}
    fresh = models / f"{RECORD}.new"
    fresh.write_text(json.dumps(record, indent=1) + "\n")
    fresh.rename(models / RECORD)


def _huggingface(repository: str, revision: str | None) -> tuple[str, list[RemoteFile]]:
    """Return the commit of a revision and its files."""
    from huggingface_hub import HfApi

    info = HfApi(endpoint=_endpoint()).model_info(repository, revision=revision, files_metadata=True)
    return str(info.sha), [
        RemoteFile(one.rfilename, int(one.size or 0), one.lfs.sha256 if one.lfs else f"git:{one.blob_id}")
        for one in info.siblings or []
    ]


def _modelscope(repository: str, revision: str | None) -> tuple[str, list[RemoteFile]]:
    """Return the revision and its files. ModelScope does not name a branch's commit."""
    revision = revision or BRANCH
    url = _modelscope_url(repository, "repo/files", {"Revision": revision, "Recursive": "true"})
    with urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
        entries = json.load(answer)["Data"]["Files"]
    files = [RemoteFile(each["Path"], int(each["Size"]), each["Sha256"]) for each in entries if each["Type"] != "tree"]
    if strange := [file.name for file in files if file.name.startswith("/") or ".." in file.name.split("/")]:
        raise ValueError(f"{repository} has a file outside of itself: {strange[0]!r}")
    return revision, files


def _modelscope_url(repository: str, call: str, query: Mapping[str, str]) -> str:
    endpoint = os.environ.get("MODELSCOPE_ENDPOINT") or "https://modelscope.cn"
    return f"{endpoint}/api/v1/models/{repository}/{call}?{urlencode(query)}"


def _endpoint() -> str | None:
    """Return a mirror from the environment. Compose files pass an empty value for none."""
    return os.environ.get("HF_ENDPOINT") or None


def _download(source: Download, file: RemoteFile, commit: str, directory: Path) -> None:
    if source.hub == "modelscope":
        query = {"Revision": commit, "FilePath": file.name}
        return download(_modelscope_url(source.repository, "repo", query), directory / file.name, file.size)
    from huggingface_hub import hf_hub_download

    hf_hub_download(
        source.repository,
        file.name,
        revision=commit,
        local_dir=directory,
        endpoint=_endpoint(),
        tqdm_class=DownloadProgress,
    )


def download(url: str, path: Path, size: int | None = None) -> None:
    """Download a file of `size` bytes, where known. What has arrived is kept in PATH.part if the download is
    interrupted, and the next one goes on from there. Raise OSError if the server refuses."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("ab") as file:
            http_get(
                url,
                file,
                resume_size=file.tell(),
                expected_size=size,
                displayed_filename=path.name,
                tqdm_class=DownloadProgress,
            )
    except HfHubHTTPError as error:
        part.unlink()  # 416: it is longer than the file, which has changed
        raise OSError(f"{url}: HTTP {error.response.status_code}") from error
    part.rename(path)


@contextmanager
def _explaining(source: Download) -> Iterator[None]:
    """Raise a RuntimeError that says what to do for any error of the block: those of HTTP libraries differ."""
    try:
        yield
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "code", None)
        if status in (401, 403):
            token = (
                "set HF_TOKEN to a token" if source.hub == "huggingface" else "leave --hub out, and set HF_TOKEN to one"
            )
            raise RuntimeError(
                f"{source.hub} refuses {source.repository} (HTTP {status}), which is private or gated: {token} of an "
                "account that may read it, after it has accepted the terms on the repository's page"
            ) from error
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise RuntimeError(
            f"{source.repository} could not be downloaded: {words[0]}; complete parts are kept: run again "
            f"({SETTINGS[source.hub]})"
        ) from error
