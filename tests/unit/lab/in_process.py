"""Requests to an ASGI application without sockets, for runs by the hundred."""

import asyncio
from typing import Any

from starlette.types import ASGIApp

from foretoken.lab.http.timed import Answer


class InProcess:
    """Sends requests to an application in the same loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def send(
        self, method: str, path: str, body: bytes = b"", *, timeout_s: float = 60.0
    ) -> Answer:
        sent = [{"type": "http.request", "body": body, "more_body": False}]
        pieces: list[tuple[float, bytes]] = []
        head: dict[str, Any] = {}

        async def receive() -> Any:
            if sent:
                return sent.pop()
            await asyncio.Event().wait()  # the client stays

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                head.update(message)
            else:
                pieces.append((0.0, message.get("body", b"")))

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
            "server": ("mock", 80), "client": ("test", 1), "scheme": "http", "root_path": "",
        }  # fmt: skip
        await self._app(scope, receive, send)
        headers = tuple((k.decode(), v.decode()) for k, v in head["headers"])
        return Answer(head["status"], headers, tuple(p for p in pieces if p[1]), 0.0, 0.0)
