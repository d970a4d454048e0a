"""A server on loopback that speaks as much of the hub's API as fetching a model needs."""

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_local"


@dataclass
class FakeRepo:
    """files by path. revisions: names of the one commit there is. is_gated: files need TOKEN.

    cuts: by path, at which bytes a transfer is broken off, one after the other.
    """

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    is_gated: bool = False
    cuts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        digest = hashlib.sha1(usedforsecurity=False)
        for name, data in sorted(self.files.items()):
            digest.update(f"{len(name)} {name} {len(data)} ".encode())
            digest.update(data)
        return digest.hexdigest()

    def has(self, revision: str) -> bool:
        return revision in (*self.revisions, self.commit)


@dataclass
class FakeHub:
    """repos by id. requests: (method, path, Range or None), in order."""

    repos: dict[str, FakeRepo] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def fetched(self) -> set[str]:
        """Names of the files whose contents were asked for."""
        return {
            path.rpartition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        }


def repo_of(folder: Path, **options: object) -> FakeRepo:
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return FakeRepo(files, **options)


class _Server(ThreadingHTTPServer):
    """A hub that has gone answers nobody, on connections that were open either."""

    daemon_threads = True

    def __init__(self, hub: FakeHub) -> None:
        self.hub = hub
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def finish_request(self, request: socket.socket, address: object) -> None:
        self._open.add(request)
        super().finish_request(request, address)

    def shutdown_request(self, request: socket.socket) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: socket.socket, address: object) -> None:
        """A client that goes is no news."""

    def close_connections(self) -> None:
        for connection in tuple(self._open):
            connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def running_hub(*repos: tuple[str, FakeRepo]) -> Iterator[FakeHub]:
    hub = FakeHub(dict(repos))
    server = _Server(hub)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        server.close_connections()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """One request, as the hub answers it."""

    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Tests read FakeHub.requests."""

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.hub.requests.append((self.command, path, self.headers.get("Range")))
        if path.startswith("/api/models/"):
            self._answer_api(path.removeprefix("/api/models/"))
        else:
            repo_id, _, rest = path.strip("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            self._answer_file(self.server.hub.repos.get(repo_id), revision, name, has_body)

    def _answer_api(self, path: str) -> None:
        for kind in ("/revision/", "/tree/", ""):
            repo_id, found, revision = path.partition(kind) if kind else (path, "x", "main")
            if found:
                break
        repo = self.server.hub.repos.get(repo_id)
        if repo is None:
            return self._refuse(401, "RepoNotFound")
        if not repo.has(revision):
            return self._refuse(404, "RevisionNotFound")
        listing = [
            {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
            for name, data in repo.files.items()
        ]
        siblings = [{"rfilename": name} for name in repo.files]
        info = {"id": repo_id, "sha": repo.commit, "siblings": siblings, "tags": []}
        return self._send(200, json.dumps(listing if kind == "/tree/" else info).encode(), {})

    def _answer_file(self, repo: FakeRepo | None, revision: str, name: str, has_body: bool) -> None:
        if repo is None:
            return self._refuse(401, "RepoNotFound")
        if repo.is_gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(403, "GatedRepo")
        if not repo.has(revision):
            return self._refuse(404, "RevisionNotFound")
        if name not in repo.files:
            return self._refuse(404, "EntryNotFound", {"X-Repo-Commit": repo.commit})
        data = repo.files[name]
        start = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{_etag(data)}"'}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cuts = repo.cuts.get(name, [])
        cut = cuts.pop(0) if has_body and cuts else None
        self._send(206 if start else 200, data[start:], headers, has_body, cut)
        return None

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, b"", {"X-Error-Code": code, **(headers or {})})

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str],
        has_body: bool = True,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
