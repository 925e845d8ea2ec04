"""Files over plain HTTP: those of ModelScope, whose interface needs no library, and single files by their address."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from tqdm import tqdm

BRANCH = "master"  # ModelScope's default
BLOCK = 1 << 20
TIMEOUT_SECONDS = 60
LINE_SECONDS = 10.0


class DownloadProgress(tqdm):
    """The progress of a file: a bar on a terminal, in a log lines at its begin, every LINE_SECONDS and at its end."""

    def __init__(self, **options: Any) -> None:
        self._is_log = not sys.stderr.isatty()
        if self._is_log:
            options["desc"] = options["desc"].rpartition("/")[2]  # the hub's client may give the whole address
            options |= {"mininterval": LINE_SECONDS, "bar_format": "{desc}: {n_fmt} of {total_fmt}B, {rate_fmt}"}
        super().__init__(**options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        if not self._is_log:
            return super().display(msg, pos)
        print(self, file=sys.stderr, flush=True)
        return True


def modelscope_files(repository: str, revision: str | None) -> tuple[str, list[tuple[str, int, str]]]:
    """Return the revision and its files' names, sizes and sha256. ModelScope does not name a branch's commit."""
    revision = revision or BRANCH
    url = _modelscope(repository, "repo/files", {"Revision": revision, "Recursive": "true"})
    with urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
        entries = json.load(answer)["Data"]["Files"]
    files = [(entry["Path"], int(entry["Size"]), entry["Sha256"]) for entry in entries if entry["Type"] != "tree"]
    if strange := [name for name, *_ in files if name.startswith("/") or ".." in PurePosixPath(name).parts]:
        raise ValueError(f"{repository} has a file outside of itself: {strange[0]!r}")
    return revision, files


def modelscope_download(repository: str, name: str, revision: str, directory: Path) -> None:
    """Download one file; an interrupted download is continued."""
    download(_modelscope(repository, "repo", {"Revision": revision, "FilePath": name}), directory / name)


def download(url: str, path: Path) -> None:
    """Download a file to `path`, and show its progress. What has arrived is kept in PATH.part if the download is
    interrupted, and the next one goes on from there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    begin = part.stat().st_size if part.exists() else 0
    try:
        answer = urlopen(Request(url, headers={"Range": f"bytes={begin}-"} if begin else {}), timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        part.unlink(missing_ok=True)  # 416: it is longer than the file, which has changed
        raise OSError(f"{url}: HTTP {error.code}") from None
    with answer:
        continued = answer.status == 206
        length = int(answer.headers.get("Content-Length") or 0)
        with (
            part.open("ab" if continued else "wb") as file,
            DownloadProgress(desc=path.name, total=length or None, unit="B", unit_scale=True) as progress,
        ):
            received = 0
            while block := answer.read(BLOCK):
                progress.update(file.write(block))
                received += len(block)
    if received < length:
        raise OSError(f"the connection of {url} ended after {received} of {length} bytes")
    part.rename(path)


def _modelscope(repository: str, call: str, query: Mapping[str, str]) -> str:
    endpoint = os.environ.get("MODELSCOPE_ENDPOINT") or "https://modelscope.cn"
    return f"{endpoint}/api/v1/models/{repository}/{call}?{urlencode(query)}"
