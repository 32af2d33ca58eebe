"""A stand-in for the Hugging Face hub: an HTTP server that counts what is read, and keeps what is uploaded.

It answers the requests of huggingface_hub for information, files, ranges of files, and commits (git-LFS uploads).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
"""The commit of the default branch."""


@dataclass
class Hub:
    """The state of the server.

    Attributes:
        models: name -> revision -> folder. The revision "main" has the commit SHA.
        sent: (name, file) -> bytes of the file's content that were sent.
        reads: (name, file) -> number of GET requests.
        requests: method and path, in order.
        pushed: name -> file -> content, of the last commit.
        refuses: answer every upload with this status.
    """

    address: str = ""
    models: dict[str, dict[str, Path]] = field(default_factory=dict)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    reads: Counter[tuple[str, str]] = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)
    pushed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    refuses: int | None = None

    def commit_of(self, revision: str) -> str:
        return SHA if revision in ("main", SHA) else hashlib.sha1(revision.encode()).hexdigest()

    def folder(self, name: str, revision: str) -> Path | None:
        revisions = self.models[name]
        return next((path for key, path in revisions.items() if revision in (key, self.commit_of(key))), None)


@contextmanager
def serving() -> Iterator[Hub]:
    """The running server's state."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        """Nothing: requests are in `Hub.requests`."""

    def do_HEAD(self) -> None:
        self._get()

    def do_GET(self) -> None:
        self._get()

    def _get(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._information(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            folder = self._folder(found[1], found[2])
            if folder is not None:
                files = [{"type": "file", **entry} for entry in _files(folder, "path", "oid")]
                self._answer(200, files)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(found[1], found[2], found[3])
        else:
            self._answer(404, {"error": path})

    def _folder(self, name: str, revision: str) -> Path | None:
        if name not in self.state.models:
            self._answer(404, {}, {"X-Error-Code": "RepoNotFound"})
            return None
        folder = self.state.folder(name, revision)
        if folder is None:
            self._answer(404, {}, {"X-Error-Code": "RevisionNotFound"})
        return folder

    def _information(self, name: str, revision: str) -> None:
        folder = self._folder(name, revision)
        if folder is not None:
            siblings = _files(folder, "rfilename", "blobId")
            self._answer(200, {"id": name, "sha": self.state.commit_of(revision), "siblings": siblings})

    def _file(self, name: str, revision: str, file: str) -> None:
        folder = self._folder(name, revision)
        if folder is None:
            return
        path = folder / file
        if not path.is_file():
            self._answer(404, {}, {"X-Error-Code": "EntryNotFound"})
            return
        size = path.stat().st_size
        begin, end, status = 0, size, 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end = int(asked[1]), min(size, int(asked[2] or size - 1) + 1)
            status = 206
        self.send_response(status)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("ETag", f'"{_etag(path)}"')
        self.send_header("X-Repo-Commit", self.state.commit_of(revision))
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.state.reads[name, file] += 1
        with path.open("rb") as opened:
            opened.seek(begin)
            content = opened.read(end - begin)
        self.wfile.write(content)
        self.state.sent[name, file] += len(content)

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.state.refuses is not None:
            self._answer(self.state.refuses, {"error": "refused"})
        elif path == "/api/repos/create":
            wanted = json.loads(body)
            self.state.created.append(wanted)
            self._answer(200, {"url": f"{self.state.address}/{wanted['organization']}/{wanted['name']}"})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
            self._answer(200, {"files": modes})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**entry, "actions": {"upload": {"href": f"{self.state.address}/objects/{entry['oid']}"}}}
                for entry in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            self._commit(found[1], body)
        elif re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
            self._answer(200, {})
        else:
            self._answer(404, {"error": path})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.state.objects[oid] = content
        self._answer(200, {})

    def _commit(self, name: str, body: bytes) -> None:
        files = {}
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.state.objects[value["oid"]]
        self.state.pushed[name] = files
        address = f"{self.state.address}/{name}/commit/{SHA}"
        self._answer(200, {"success": True, "commitOid": SHA, "commitUrl": address, "hookOutput": ""})

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _files(folder: Path, name_key: str, hash_key: str) -> list[dict[str, Any]]:
    return [
        {name_key: path.relative_to(folder).as_posix(), "size": path.stat().st_size, hash_key: _etag(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]


def _etag(path: Path) -> str:
    """A name of the content; of a large file, of its size."""
    status = path.stat()
    content = path.read_bytes() if status.st_size < 1 << 20 else str(status.st_size).encode()
    return hashlib.sha1(content).hexdigest()
