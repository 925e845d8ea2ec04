"""A fake of the HuggingFace hub and of ModelScope with one repository.

It can break connections and damage files, and records requests.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from tests.support.http_servers import Page, http_server

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """`files`: content by name, served as LFS files. `cut`: bytes of a file after which the connection breaks, once.
    `damage`: names of files to send with a changed byte. `requested`: paths. `ranges`: Range headers, which it follows
    if it `continues` files. `refuses`: repositories by the HTTP status that it answers for them; 403 lists them.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    damage: set[str] = field(default_factory=set)
    requested: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    continues: bool = True
    refuses: dict[str, int] = field(default_factory=dict)

    def listing(self) -> dict[str, Any]:
        siblings = []
        for name, content in self.files.items():
            lfs = {"sha256": digest(content), "size": len(content), "pointerSize": 130}
            siblings.append({"rfilename": name, "size": len(content), "blobId": "0" * 40, "lfs": lfs})
        return {"id": "any", "sha": COMMIT, "siblings": siblings}

    def modelscope_listing(self) -> dict[str, Any]:
        entries = [{"Path": "CosyVoice-BlankEN", "Type": "tree", "Size": 0, "Sha256": ""}]
        for name, content in self.files.items():
            entries.append({"Path": name, "Type": "blob", "Size": len(content), "Sha256": digest(content)})
        return {"Code": 200, "Success": True, "Data": {"Files": entries}}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Handler(Page):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        path, _, query = self.path.partition("?")
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        if path.endswith("/repo"):  # ModelScope's
            name = parse_qs(query)["FilePath"][0]
        self.hub.requested.append(f"{path} {name}" if path.endswith("/repo") else path)
        refused = next((status for name, status in self.hub.refuses.items() if name in path), 0)
        if refused and not (refused == 403 and path.startswith("/api/models/")):
            self.reply(refused, **({"X_Error_Code": "GatedRepo"} if refused == 403 else {}))
        elif path.endswith("/repo/files"):
            self.reply(200, self.hub.modelscope_listing())
        elif path.startswith("/api/models/"):
            self.reply(200, self.hub.listing(), Content_Type="application/json")
        elif name in self.hub.files:
            self.send_file(name)
        else:
            self.reply(404, X_Error_Code="EntryNotFound")

    def send_file(self, name: str) -> None:
        content = self.hub.files[name]
        headers = {"ETag": f'"{digest(content)}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        with_body = self.command != "HEAD"
        if name in self.hub.damage:
            content = bytes([content[0] ^ 1]) + content[1:]
        begin, status = 0, 200
        if with_body and self.hub.continues and (requested := self.headers.get("Range")):
            self.hub.ranges.append(requested)
            begin, status = int(requested.removeprefix("bytes=").split("-")[0]), 206
            headers["Content_Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        limit = self.hub.cut.pop(name, None) if with_body else None
        if limit is not None:
            headers["Content_Length"], self.close_connection = str(len(content) - begin), True
        self.reply(status, content[begin:][:limit], **headers)


@contextmanager
def fake_hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    hub = FakeHub(files=files)
    with http_server(type("Bound", (Handler,), {"hub": hub})) as server:
        hub.url = server.url
        yield hub
