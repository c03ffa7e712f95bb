"""A front in a thread of the test's own process, and streams as a client reads them."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from foretoken.replicas.front import FrontState
from foretoken.replicas.members import ReplicaPlace
from foretoken.replicas.run import front_server, front_state
from foretoken.server.run import bound
from foretoken.server.settings import ServerConfig
from foretoken.server.transport.drain import Drain
from foretoken.server.transport.draining_server import DrainingServer

KEY = "for the front alone"


@dataclass(frozen=True)
class Fronting:
    url: str
    state: FrontState
    drain: Drain
    runner: DrainingServer


@contextmanager
def fronting(
    places: Sequence[ReplicaPlace], config: ServerConfig | None = None
) -> Iterator[Fronting]:
    config = config or ServerConfig()
    drain = Drain(config.limits.drain_s)

    async def directory() -> Sequence[ReplicaPlace]:
        return places

    state = front_state(config, directory, KEY, drain, 0)
    runner = front_server(state)
    listening = bound(ServerConfig(port=0))
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        until = time.monotonic() + 20
        while not runner.started or len(state.parts.members.views) < len(places):
            assert thread.is_alive() and time.monotonic() < until, "the front did not start"
            time.sleep(0.01)
        yield Fronting(f"http://127.0.0.1:{listening.getsockname()[1]}", state, drain, runner)
    finally:
        drain.begin()
        drain.begin()
        thread.join(30)
        listening.close()
    assert not thread.is_alive(), "the front did not stop"


@dataclass
class Streamed:
    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    status: int = 0
    ended: bool = False
    """Whether it came to its `[DONE]`."""
    at_s: list[float] = field(default_factory=list)
    """When each chunk came, by time.monotonic()."""

    @property
    def plain(self) -> list[dict[str, Any]]:
        """The chunks without what differs from answer to answer."""
        found = json.loads(json.dumps(self.chunks))
        for chunk in found:
            del chunk["id"], chunk["created"]
            if chunk.get("usage") is not None:
                del chunk["usage"]["prompt_tokens_details"]
            for choice in chunk["choices"]:
                for call in choice.get("delta", {}).get("tool_calls") or ():
                    call.pop("id", None)
        return list(found)

    @property
    def by_choice(self) -> dict[int, list[dict[str, Any]]]:
        """The plain chunks of each choice, in order; -1: those without one."""
        found: dict[int, list[dict[str, Any]]] = {}
        for chunk in self.plain:
            index = chunk["choices"][0]["index"] if chunk["choices"] else -1
            found.setdefault(index, []).append(chunk)
        return found

    def pause_s(self, since_s: float) -> float:
        """The longest time without a chunk that ended after a moment."""
        pairs = zip(self.at_s, self.at_s[1:], strict=False)
        return max((b - a for a, b in pairs if b > since_s), default=0.0)

    @property
    def ids(self) -> list[int]:
        """All token ids, of all choices as they came."""
        return [i for c in self.chunks for one in c["choices"] for i in one.get("token_ids") or ()]


def stream(
    url: str,
    path: str,
    body: dict[str, Any],
    *,
    seen: Callable[[int], None] = lambda chunks: None,
    **headers: str,
) -> Streamed:
    """Read one stream to its end; `seen` is told after each chunk how many there are."""
    asked = {"stream_options": {"include_usage": True}, **body, "stream": True}
    found = Streamed()
    with httpx.stream("POST", url + path, json=asked, headers=headers, timeout=120) as answer:
        found.status = answer.status_code
        for line in answer.iter_lines():
            if line.startswith(":"):
                found.comments.append(line)
            elif line == "data: [DONE]":
                found.ended = True
            elif line:
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                found.chunks.append(chunk)
                found.at_s.append(time.monotonic())
                seen(len(found.chunks))
    return found
