"""A fake of the HuggingFace hub and of ModelScope with one repository.

It can break connections and damage files, and records requests.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

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
            sha256 = hashlib.sha256(content).hexdigest()
            lfs = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append({"rfilename": name, "size": len(content), "blobId": "0" * 40, "lfs": lfs})
        return {"id": "any", "sha": COMMIT, "siblings": siblings}

    def modelscope_listing(self) -> dict[str, Any]:
        entries = [{"Path": "CosyVoice-BlankEN", "Type": "tree", "Size": 0, "Sha256": ""}]
        for name, content in self.files.items():
            digest = hashlib.sha256(content).hexdigest()
            entries.append({"Path": name, "Type": "blob", "Size": len(content), "Sha256": digest})
        return {"Code": 200, "Success": True, "Data": {"Files": entries}}


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path, _, query = self.path.partition("?")
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        if path.endswith("/repo"):  # ModelScope's
            name = parse_qs(query)["FilePath"][0]
        self.hub.requested.append(f"{path} {name}" if path.endswith("/repo") else path)
        refused = next((status for name, status in self.hub.refuses.items() if name in path), 0)
        if refused and not (refused == 403 and path.startswith("/api/models/")):
            self.send(b"", {"X-Error-Code": "GatedRepo"} if refused == 403 else {}, with_body, refused)
        elif path.endswith("/repo/files"):
            self.send(json.dumps(self.hub.modelscope_listing()).encode(), {}, with_body)
        elif path.startswith("/api/models/"):
            self.send(json.dumps(self.hub.listing()).encode(), {"Content-Type": "application/json"}, with_body)
        elif name in self.hub.files:
            self.send_file(name, with_body)
        else:
            self.send(b"", {"X-Error-Code": "EntryNotFound"}, with_body, 404)

    def send_file(self, name: str, with_body: bool) -> None:
        content = self.hub.files[name]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if name in self.hub.damage:
            content = bytes([content[0] ^ 1]) + content[1:]
        begin, status = 0, 200
        if with_body and self.hub.continues and (requested := self.headers.get("Range")):
            self.hub.ranges.append(requested)
            begin, status = int(requested.removeprefix("bytes=").split("-")[0]), 206
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        limit = self.hub.cut.pop(name, None) if with_body else None
        self.send(content[begin:], headers, with_body, status, limit)

    def send(
        self, body: bytes, headers: dict[str, str], with_body: bool, status: int = 200, limit: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body[:limit])
        if limit is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def fake_hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    hub = FakeHub(files=files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
