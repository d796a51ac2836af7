"""A hub on this machine, with the part of the API that `huggingface_hub` needs for a snapshot."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass(slots=True)
class Repo:
    """A repository: ``gated`` refuses every client, ``token`` each client without it."""

    files: dict[str, bytes]
    sha: str = "a" * 40
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    token: str = ""

    @classmethod
    def of(cls, folder: Path, **others: bytes) -> Repo:
        found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return cls({**found, **others})


@dataclass(slots=True)
class Hub:
    """A hub; ``fetched`` lists the files whose contents were sent, in order."""

    repos: dict[str, Repo] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        known = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    known: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""

    def _answer(self, *, has_body: bool) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        is_api = parts[:2] == ["api", "models"]
        name, *rest = (
            ("/".join(parts[2:4]), *parts[4:]) if is_api else ("/".join(parts[:2]), *parts[2:])
        )
        repo = self.known.repos.get(name)
        if repo is None or (repo.token and self.headers["Authorization"] != f"Bearer {repo.token}"):
            return self._refuse(401, "RepoNotFound")
        if repo.gated:
            return self._refuse(403, "GatedRepo")
        match rest:
            case ["revision", revision] if is_api and revision in (*repo.revisions, repo.sha):
                self._json({"id": name, "sha": repo.sha, "siblings": []})
            case ["tree", revision] if is_api and revision in (*repo.revisions, repo.sha):
                self._json([_entry(path, data) for path, data in repo.files.items()])
            case ["resolve", _, *path] if "/".join(path) in repo.files:
                self._file(repo, "/".join(path), has_body=has_body)
            case ["revision" | "tree", _]:
                self._refuse(404, "RevisionNotFound")
            case _:
                self._refuse(404, "EntryNotFound")
        return None

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _file(self, repo: Repo, path: str, *, has_body: bool) -> None:
        data = repo.files[path]
        if has_body:
            self.known.fetched.append(path)
        headers = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": repo.sha}
        self._send(200, data, headers, has_body=has_body)

    def _send(
        self, status: int, data: bytes, headers: dict[str, str], *, has_body: bool = True
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if has_body and self.command == "GET":
            self.wfile.write(data)


def _entry(path: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {
        "type": "file",
        "path": path,
        "size": len(data),
        "oid": _digest(data)[:40],
    }
    if path.endswith((".safetensors", ".bin")):
        entry["lfs"] = {"oid": _digest(data), "size": len(data), "pointerSize": 134}
    return entry


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
