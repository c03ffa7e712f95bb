"""What one client's odd request does to another client's stream: the longest gap between tokens.

    python benchmarks/hostile.py

One client streams; beside it another sends, one after the other, requests that are large or dear
before any step of the model: huge texts, lists, conversations, bodies and schemas. Each row is the
longest time without a token from the moment the request was sent until 0.3 s after its answer. The
first row is the stream alone. The bar is 100 ms beyond that row.
"""

import argparse
import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common import Goal, announce, at_most, finish, make_parser
from served import SIZES, demo_server

from foretoken.lab.http.timed import HttpPool, Incoming, now

BAR_S = 0.1
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MOST = 3_900_000
"""Characters of the largest bodies; the server takes 4 MiB."""


@dataclass(frozen=True)
class Attack:
    name: str
    path: str
    body: bytes


def attacks(most: int) -> Iterator[Attack]:
    """Requests of up to `most` bytes."""

    def asking(name: str, path: str, **fields: Any) -> Attack:
        return Attack(name, path, json.dumps({"max_tokens": 1, **fields}).encode())

    def filled(name: str, path: str, start: str, item: str, end: str) -> Attack:
        count = (most - len(start) - len(end)) // (len(item) + 1)
        return Attack(name, path, (start + ",".join([item] * count) + end).encode())

    user = {"role": "user", "content": "hello"}
    yield asking("text of a's", TEXT, prompt="a" * most)
    yield asking("text of a's, a quarter", TEXT, prompt="a" * (most // 4))
    yield asking("text of code", TEXT, prompt="def f(x):\n    return x\n" * (most // 27))
    yield asking("text that just fits", TEXT, prompt="def f(x):\n  return x\n" * 100)
    yield asking(
        "prediction of a's", TEXT, prompt="a", prediction={"type": "content", "content": "a" * most}
    )
    yield asking("message of a's", CHAT, messages=[{**user, "content": "a" * most}])
    yield asking("50,000 bad words", TEXT, prompt="a", bad_words=[f"w{i}" for i in range(50_000)])
    yield asking("1,000 bad words", TEXT, prompt="a", bad_words=[f"w{i}" for i in range(1000)])
    yield asking("50,000 stop strings", TEXT, prompt="a", stop=[f"w{i}" for i in range(50_000)])
    yield asking("50,000 messages", CHAT, messages=[user] * 50_000)
    yield asking("1,000 messages", CHAT, messages=[user] * 1000)
    yield filled("ids", TEXT, '{"prompt":[', "1", "]}")
    yield filled("lists of ids", TEXT, '{"prompt":[', "[1]", "]}")
    yield filled("ids and a text", TEXT, '{"prompt":[', "1", ',"a"]}')
    yield filled("messages that are none", CHAT, '{"messages":[', "1", "]}")
    yield filled("empty objects", TEXT, '{"prompt":"a","structured_outputs":{"json":[', "{}", "]}}")
    yield asking("unknown fields", TEXT, **{f"f{i}": 1 for i in range(most // 14)})
    bias = {str(i): 1 for i in range(most // 12)}
    yield asking("logit_bias of many", TEXT, prompt="a", logit_bias=bias)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2500)}}
    some = {"type": "object", "properties": {f"p{j}": {"type": "integer"} for j in range(10)}}
    choices = {"choice": [f"choice {i}" for i in range(7000)]}
    either = {"json": {"anyOf": [some] * 200}}
    yield asking("a wide schema", TEXT, prompt="a", structured_outputs={"json": wide})
    yield asking("7,000 choices", TEXT, prompt="a", structured_outputs=choices)
    yield asking("200 alternatives", TEXT, prompt="a", structured_outputs=either)


class Streaming:
    """A client that streams, and when its tokens came."""

    def __init__(self, url: str) -> None:
        self._pool = HttpPool(url)
        self._task: asyncio.Task[None] | None = None
        self.at_s: list[float] = []

    async def start(self) -> None:
        """Stream until `stop`, and wait for the first tokens."""
        self._task = asyncio.create_task(self._stream())
        while len(self.at_s) < 20:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._pool.close()

    async def _stream(self) -> None:
        body = {"prompt": "class Stack:\n", "max_tokens": 2000, "temperature": 0.8, "seed": 1}
        raw = json.dumps({**body, "ignore_eos": True, "stream": True}).encode()
        while True:
            incoming = Incoming()
            asked = self._pool.send("POST", TEXT, raw, timeout_s=300, incoming=incoming)
            sending = asyncio.create_task(asked)
            async for _ in incoming.pieces():
                self.at_s.append(now())
            await sending

    def longest_gap(self, since_s: float) -> float:
        """Longest time between tokens since a moment, the open one included."""
        before = [t for t in self.at_s if t <= since_s][-1:]
        times = [*before, *(t for t in self.at_s if t > since_s), now()]
        return max(b - a for a, b in zip(times, times[1:], strict=False))


async def row(url: str, attack: Attack | None) -> tuple[float, float, int]:
    """Longest gap, seconds until the answer, and its status."""
    stream, pool = Streaming(url), HttpPool(url)
    await stream.start()
    began, status = now(), 0
    if attack is None:
        await asyncio.sleep(1.0)
    else:
        answer = await pool.send("POST", attack.path, attack.body, timeout_s=120)
        status = answer.status
    took = now() - began
    await asyncio.sleep(0.3)
    gap = stream.longest_gap(began)
    await stream.stop()
    await pool.close()
    return gap, took, status


async def measure(url: str, most: int) -> list[dict[str, Any]]:
    rows = []
    warm = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1})
    await row(url, Attack("the first chat, which reads the template", CHAT, warm.encode()))
    for attack in [None, *attacks(most)]:
        gap, took, status = await row(url, attack)
        name = "nobody" if attack is None else attack.name
        size = 0 if attack is None else len(attack.body)
        print(f"{name:26} {size / 1e6:6.2f} MB  gap {gap * 1e3:8.1f} ms  {status} "
              f"after {took:6.2f} s", flush=True)  # fmt: skip
        rows.append({"name": name, "bytes": size, "gap_s": gap, "status": status, "s": took})
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    given: argparse.Namespace = parser.parse_args()
    where = announce(given)
    with demo_server(*SIZES, "--max-num-seqs", "8") as server:
        rows = asyncio.run(measure(server.url, MOST // 8 if given.quick else MOST))
    alone = rows[0]["gap_s"]
    goals: list[Goal] = [
        at_most(f"gap beside {row['name']}, s", row["gap_s"], alone + BAR_S) for row in rows[1:]
    ]
    finish("hostile", where, given, {"rows": rows}, goals)


if __name__ == "__main__":
    main()
