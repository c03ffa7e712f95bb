"""A server that only streams: what it costs stays far below what a client of it costs.

Every step of `step_s`, as an engine does it, each stream gets its next chunk, and the moment right
before each write is kept; GET /timings has them. Speaks as much HTTP/1.1 as the lab's client needs.

    python benchmarks/workers/run_streams.py PORT STEP_MS CHUNKS
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWERS = {
    b"/v1/models": {"object": "list", "data": [{"id": "streams", "owned_by": "mock"}]},
    b"/version": {"version": "1"},
    b"/health": {},
}


def frame(event: object) -> bytes:
    """One event in one chunk of the transfer coding."""
    data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def frames_of(chunks: int) -> list[bytes]:
    """What every stream says."""
    found = []
    for n in range(chunks):
        choice = {"index": 0, "text": f" word{n}", "token_ids": [n], "finish_reason": None}
        choice["finish_reason"] = "length" if n == chunks - 1 else None
        found.append(frame({"id": "cmpl-0000", "choices": [choice]}))
    usage = {"prompt_tokens": 3, "completion_tokens": chunks}
    found[-1] += frame({"id": "cmpl-0000", "choices": [], "usage": usage})
    found[-1] += frame(b"[DONE]") + b"0\r\n\r\n"
    return found


@dataclass(slots=True)
class Stream:
    """One answer on its way."""

    transport: asyncio.Transport
    received_s: float
    sent_s: list[float] = field(default_factory=list)


class Engine:
    """All streams, and the steps that they take together."""

    def __init__(self, step_s: float, chunks: int) -> None:
        """Begin with none."""
        self.step_s, self.frames = step_s, frames_of(chunks)
        self.running: list[Stream] = []
        self.ended: list[Stream] = []

    async def run(self) -> None:
        """Step for ever."""
        due = time.perf_counter()
        while True:
            due += self.step_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            for stream in self.running:
                piece = self.frames[len(stream.sent_s)]
                head = b"" if stream.sent_s else HEAD
                stream.sent_s.append(time.perf_counter())
                stream.transport.write(head + piece)
            last = len(self.frames)
            self.ended += [s for s in self.running if len(s.sent_s) == last]
            self.running = [s for s in self.running if len(s.sent_s) < last]

    def timings(self) -> list[list[float]]:
        """[received, first chunk, last chunk] of every ended stream."""
        return [[s.received_s, s.sent_s[0], s.sent_s[-1]] for s in self.ended]


class Connection(asyncio.Protocol):
    """Requests of one client, one after another."""

    def __init__(self, engine: Engine) -> None:
        """Of `engine`."""
        self._engine = engine
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        assert isinstance(transport, asyncio.Transport), transport
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer a request once it is whole."""
        at = time.perf_counter()
        self._rest += data
        head, end, body = self._rest.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        if not end or len(body) < length:
            return
        self._rest = b""
        path = head.split(b" ", 2)[1]
        if head.startswith(b"POST"):
            self._engine.running.append(Stream(self._transport, at))
            return
        answer = self._engine.timings() if path == b"/timings" else ANSWERS.get(path)
        self._reply(b"404 Not Found" if answer is None else b"200 OK", json.dumps(answer).encode())

    def _reply(self, status: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % (status, len(body)) + body)


async def main(port: int, step_ms: float, chunks: int) -> None:
    """Serve until killed."""
    engine = Engine(step_ms / 1000, chunks)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=2048)
    async with server:
        await engine.run()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
