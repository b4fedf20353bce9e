"""A small hub on the loopback interface: what huggingface_hub's client asks for when it downloads a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories by id: file name -> content. `gated` and `private` ones want the token."""

    repositories: dict[str, dict[str, bytes]]
    token: str = "hf_secret"
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)  # answer 500
    cut: set[str] = field(default_factory=set)  # file names whose transfer breaks off half-way
    requests: list[tuple[str, str]] = field(default_factory=list)  # (method, path)
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send(status, b"", {"X-Error-Code": code, "X-Error-Message": code}, with_body=False)

    def answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.answer_api("/".join(parts[2:4]), parts[4:])
        elif "resolve" in parts:
            self.answer_file("/".join(parts[:2]), "/".join(parts[4:]), with_body)
        else:
            self.refuse(404, "EntryNotFound")

    def is_refused(self, repository: str, for_file: bool) -> bool:
        has_token = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repository in self.hub.broken:
            self.refuse(500, "Broken")
        elif repository not in self.hub.repositories or (repository in self.hub.private and not has_token):
            self.refuse(404, "RepoNotFound")
        elif repository in self.hub.gated and for_file and not has_token:
            self.refuse(403, "GatedRepo")
        else:
            return False
        return True

    def answer_api(self, repository: str, rest: list[str]) -> None:
        if self.is_refused(repository, for_file=False):
            return
        files = self.hub.repositories[repository]
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            body: object = tree
        else:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            body = {"id": repository, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
        self.send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def answer_file(self, repository: str, name: str, with_body: bool) -> None:
        if self.is_refused(repository, for_file=True):
            return
        data = self.hub.repositories[repository].get(name)
        if data is None:
            self.refuse(404, "EntryNotFound")
            return
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if with_body and name in self.hub.cut:
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        self.send(200, data, headers, with_body)


@contextmanager
def running_hub(hub: Hub) -> Iterator[Hub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
