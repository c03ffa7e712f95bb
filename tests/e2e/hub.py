"""A small Hugging Face hub on this machine: what `huggingface_hub` asks for, and what was asked."""

import hashlib
import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import Any, Self

COMMIT = "a" * 40


@dataclass(frozen=True, slots=True)
class Asked:
    method: str
    path: str
    token: str | None
    range: str | None


@dataclass(slots=True)
class Hub:
    """Serves one repository, `some/model`, at the revisions `main` and `v2`."""

    files: dict[str, bytes]
    gated: bool = False
    breaks_at: dict[str, int] = field(default_factory=dict)
    """File -> after how many bytes its first download breaks off."""
    asked: list[Asked] = field(default_factory=list)
    _server: Any = None

    def __enter__(self) -> Self:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, headers = request.path.split("?")[0], request.headers
        token, span = headers.get("authorization"), headers.get("range")
        self.asked.append(Asked(request.command, path, token, span))
        if self.gated and token is None:
            return _reply(request, 401, b"", {"x-error-code": "GatedRepo"})
        if path.startswith("/api/models/some/model"):
            return self._describe(request, path)
        if path.startswith("/some/model/resolve/"):
            return self._send(request, path.removeprefix("/some/model/resolve/").split("/", 1)[1])
        return _reply(request, 404, b"", {"x-error-code": "RepoNotFound"})

    def _describe(self, request: BaseHTTPRequestHandler, path: str) -> None:
        parts = path.removeprefix("/api/models/some/model").strip("/").split("/")
        if len(parts) > 1 and parts[1] not in ("main", "v2", COMMIT):
            return _reply(request, 404, b"", {"x-error-code": "RevisionNotFound"})
        content: object = {
            "id": "some/model",
            "sha": COMMIT,
            "siblings": [{"rfilename": name} for name in self.files],
        }
        if parts[0] == "tree":
            content = [
                {"type": "file", "path": name, "size": len(data), "oid": _hash(data)}
                for name, data in self.files.items()
            ]
        return _reply(request, 200, json.dumps(content).encode(), {})

    def _send(self, request: BaseHTTPRequestHandler, name: str) -> None:
        data = self.files.get(name)
        if data is None:
            return _reply(request, 404, b"", {"x-error-code": "EntryNotFound"})
        headers = {"etag": f'"{_hash(data)}"', "x-repo-commit": COMMIT}
        span = request.headers.get("range")
        start = int(span.removeprefix("bytes=").split("-")[0]) if span else 0
        if start:
            headers["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        stop = None
        if request.command == "GET":
            stop = self.breaks_at.pop(name, None)
        return _reply(request, 206 if start else 200, data[start:], headers, stop)


def _hash(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _reply(
    request: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    headers: dict[str, str],
    stop: int | None = None,
) -> None:
    request.send_response(status)
    for name, value in {**headers, "content-length": str(len(body))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body[:stop])
    if stop is not None:
        request.close_connection = True
