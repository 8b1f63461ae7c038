"""A package index and a hub on loopback, as far as pip, uv and `huggingface_hub` ask them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

COMMIT: Final = "c0ffee" + "0" * 34


class LocalServer(ThreadingHTTPServer):
    """Serves the wheels of a folder under `/simple`, and repositories of a hub.

    Attributes:
        repositories: files by repository and path.
        gated: repositories that nobody may have.
        half: paths of which half the body comes; then the connection closes, or with `stalls`
            nothing comes any more.
        asked: the paths that were asked for.
        reached: set when half a body was sent.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, wheels: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.wheels = wheels
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.half: set[str] = set()
        self.stalls = False
        self.asked: list[str] = []
        self.reached = threading.Event()
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: LocalServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if path.startswith("/simple/"):
            self._list(path.removeprefix("/simple/").strip("/"))
        elif path.startswith("/files/"):
            self._send((self.server.wheels / path.removeprefix("/files/")).read_bytes())
        elif path.startswith("/api/models/"):
            self._describe(path.removeprefix("/api/models/"))
        elif "/resolve/" in path:
            repository, _, rest = path.strip("/").partition("/resolve/")
            data = self.server.repositories[repository][rest.partition("/")[2]]
            etag = hashlib.sha1(data).hexdigest()
            self._send(data, ETag=f'"{etag}"', **{"X-Repo-Commit": COMMIT})
        else:
            self.send_error(404)

    def _list(self, name: str) -> None:
        wheels = self.server.wheels.glob(f"{name.replace('-', '_')}-*.whl")
        links = [f'<a href="/files/{path.name}">{path.name}</a>' for path in wheels]
        page = f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>"
        self._send(page.encode(), **{"Content-Type": "text/html"})

    def _describe(self, path: str) -> None:
        name = "/".join(path.split("/")[:2])
        files = self.server.repositories.get(name)
        code = "GatedRepo" if name in self.server.gated else "RepoNotFound"
        if files is None or name in self.server.gated:
            self.send_response(401)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", f"Access to model {name} is restricted.")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": each, "size": len(data)}
                | {"oid": hashlib.sha1(data).hexdigest()}
                for each, data in files.items()
            ]
            self._send(json.dumps(tree).encode())
        else:
            siblings = [{"rfilename": each} for each in files]
            told = {"id": name, "sha": COMMIT, "siblings": siblings}
            self._send(json.dumps(told).encode())

    def _send(self, data: bytes, **headers: str) -> None:
        self.send_response(200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.path.partition("?")[0] not in self.server.half:
            self.wfile.write(data)
            return
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        self.server.reached.set()
        if self.server.stalls:
            self.server.ended.wait()
        self.close_connection = True


@contextmanager
def local_server(wheels: Path) -> Generator[LocalServer]:
    """A server, while in the `with`."""
    with LocalServer(wheels) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join(30)
