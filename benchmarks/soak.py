"""Hammer a server for minutes and see that nothing is lost, leaked or left behind.

    python benchmarks/soak.py --minutes 10 --clients 64

Starts `foretoken serve demo` and lets every client send one request after the other: short and
long, streamed and whole, several choices, seeded and greedy, and, mixed in, clients that leave in
the middle, send nonsense, or read slowly. Then every accepted request must have ended exactly
once, all pages must be free, and memory must be flat: at first, prompts that are all different fill
the prefix cache, and two fifths of the time warm up. The last line is JSON; exit code 1 if not.
Options after `--` go to the server.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from functools import partial
from typing import Any

import httpx
from common import Goal, announce, at_most, finish, make_parser
from served import Server, anonymous_bytes, demo_server, pages_of

from foretoken.lab.http.client import parse_metrics

PATH = "/v1/completions"
PROMPTS = ("def ", "import os\n\n\nclass Walker:\n", "x = [", "for name in names:\n    ", "# ")
NONSENSE: tuple[bytes, ...] = (
    b"{", b"\xff\xff", b'{"prompt": 3}', b'{"prompt": "x", "temperature": -1}', b"[" * 5000,
    b'{"prompt": "x", "n": 0}', b'{"prompt": "x", "nonsense": true}',
)  # fmt: skip


class Tallies:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.first_token_s: list[float] = []

    def expect(self, ok: bool, what: str) -> None:
        if not ok and len(self.wrong) < 20:
            self.wrong.append(what)


async def refused(answer: httpx.Response, seen: Tallies) -> bool:
    """Whether the server is full; then wait as long as it says."""
    if answer.status_code == 429:
        seen.counts["refused"] += 1
        await asyncio.sleep(float(answer.headers["retry-after"]))
    return answer.status_code == 429


async def whole(client: httpx.AsyncClient, draw: random.Random, seen: Tallies) -> None:
    body = some_body(draw)
    answer = await client.post(PATH, json=body)
    if not await refused(answer, seen):
        seen.expect(answer.status_code == 200, f"{answer.status_code}: {answer.text[:200]}")
        choices = answer.json().get("choices", ())
        seen.expect(len(choices) == body["n"], f"{len(choices)} choices for n={body['n']}")
        seen.expect(all(c["finish_reason"] for c in choices), "a choice without an end")
        seen.counts["whole"] += 1


async def streamed(
    client: httpx.AsyncClient, draw: random.Random, seen: Tallies, pause_s: float = 0.0
) -> None:
    """Read a stream to its end: each choice ends once, and [DONE] is last."""
    body = {**some_body(draw), "stream": True}
    began, ends, last = time.perf_counter(), Counter[int](), ""
    async with client.stream("POST", PATH, json=body) as answer:
        if await refused(answer, seen):
            return
        seen.expect(answer.status_code == 200, f"stream: {answer.status_code}")
        async for line in answer.aiter_lines():
            if not line:
                continue
            if not last:
                seen.first_token_s.append(time.perf_counter() - began)
            last = line
            if line != "data: [DONE]":
                chunk = json.loads(line.removeprefix("data: "))
                seen.expect("error" not in chunk, str(chunk)[:200])
                ends.update(c["index"] for c in chunk.get("choices", ()) if c["finish_reason"])
            await asyncio.sleep(pause_s)
    seen.expect(last == "data: [DONE]", f"last line {last[:100]}")
    seen.expect(ends == Counter(range(body["n"])), f"ends {dict(ends)} for n={body['n']}")
    seen.counts["slow" if pause_s else "streamed"] += 1


async def leaves(client: httpx.AsyncClient, draw: random.Random, seen: Tallies) -> None:
    body = {**some_body(draw), "max_tokens": 1000, "stream": True, "ignore_eos": True}
    stop_after = draw.randrange(20)
    async with client.stream("POST", PATH, json=body) as answer:
        async for _ in answer.aiter_lines():
            stop_after -= 1
            if stop_after < 0:
                break
    seen.counts["left"] += 1


async def nonsense(client: httpx.AsyncClient, draw: random.Random, seen: Tallies) -> None:
    raw = draw.choice(NONSENSE)
    answer = await client.post(PATH, content=raw, headers={"content-type": "application/json"})
    seen.expect(400 <= answer.status_code < 500, f"{raw[:30]!r}: {answer.status_code}")
    seen.counts["nonsense"] += 1


KINDS = ((0.35, whole), (0.4, streamed), (0.05, partial(streamed, pause_s=0.02)), (0.1, leaves),
         (0.1, nonsense))  # fmt: skip
"""What a client does next, and with which chance."""


def some_body(draw: random.Random) -> dict[str, Any]:
    return {
        "prompt": draw.choice(PROMPTS) * draw.choice((1, 1, 4, 30)),
        "max_tokens": draw.choice((1, 8, 32, 128)),
        "temperature": draw.choice((0, 0.8)),
        "seed": draw.choice((None, draw.randrange(1000))),
        "n": draw.choice((1, 1, 1, 2)),
        "stop": draw.choice((None, None, ["\n\n"])),
    }


async def one_client(url: str, number: int, until: float, seen: Tallies) -> None:
    draw = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        while time.monotonic() < until:
            [(_, act)] = draw.choices(KINDS, [chance for chance, _ in KINDS])
            await act(client, draw, seen)


async def watch(server: Server, until: float, samples: list[int]) -> None:
    while time.monotonic() < until:
        samples.append(anonymous_bytes(server.process.pid))
        await asyncio.sleep(1)


def totals(url: str) -> dict[str, float]:
    """Sums of the server's metrics over their labels."""
    return parse_metrics(httpx.get(url + "/metrics", timeout=30).text)


async def drained(url: str) -> bool:
    for _ in range(600):
        now = totals(url)
        if now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"] == 0:
            return now["vllm:kv_cache_usage_perc"] == 0
        await asyncio.sleep(0.1)
    return False


async def fill(url: str) -> int:
    """Have as many different tokens read as the KV cache holds, so that caches are full."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        text = (await client.get("/metrics")).text
        page_size, num_pages = pages_of(text)
        draw, num_tokens = random.Random(0), page_size * num_pages
        for _ in range(num_tokens // 1800 + 1):
            prompt = [draw.randrange(300, 4000) for _ in range(1800)]
            answer = await client.post(PATH, json={"prompt": prompt, "max_tokens": 1})
            answer.raise_for_status()
    return num_tokens


async def soak(server: Server, minutes: float, clients: int) -> dict[str, Any]:
    url = server.url
    seen, samples, filled = Tallies(), list[int](), await fill(url)
    until = time.monotonic() + minutes * 60
    tasks = [one_client(url, number, until, seen) for number in range(clients)]
    await asyncio.gather(watch(server, until, samples), *tasks)
    free = await drained(url)
    now = totals(url)
    fifth = max(1, len(samples) // 5)
    warm, last = statistics.median(samples[fifth : 2 * fifth]), statistics.median(samples[-fifth:])
    return {
        "filled_tokens": filled,
        "requests": dict(seen.counts),
        "accepted": now["vllm:request_prompt_tokens_count"],
        "ended": now["vllm:request_success"],
        "generation_tokens": now["vllm:generation_tokens"],
        "draft_tokens": now["vllm:spec_decode_num_draft_tokens"],
        "preemptions": now["vllm:num_preemptions"],
        "ttft_p50_s": statistics.median(seen.first_token_s),
        "ttft_p99_s": statistics.quantiles(seen.first_token_s, n=100)[98],
        "memory_warm_mib": round(warm / 2**20, 1),
        "memory_end_mib": round(last / 2**20, 1),
        "memory_growth": last / warm - 1,
        "memory_mib_over_time": [
            round(b / 2**20, 1) for b in samples[:: max(1, len(samples) // 12)]
        ],
        "pages_back_to_zero": free,
        "wrong": seen.wrong,
    }


def goals_of(results: dict[str, Any]) -> list[Goal]:
    """What the soak is for."""
    return [
        at_most("accepted requests that did not end once",
                abs(results["accepted"] - results["ended"]), 0),
        at_most("answers that were wrong", len(results["wrong"]), 0),
        at_most("pages in use at the end (1: some)", float(not results["pages_back_to_zero"]), 0),
        at_most("growth of memory after the warm-up", results["memory_growth"], 0.02),
        at_most("exit code after SIGTERM", abs(results["exit_code"]), 0),
    ]  # fmt: skip


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("serve", nargs="*", default=[], help="further options of foretoken serve")
    given = parser.parse_args()
    if given.quick:
        given.minutes, given.clients = 0.5, 16
        given.serve = [*given.serve, "--kv-cache-memory-bytes", "30000000"]
    where = announce(given)
    with demo_server(*given.serve) as server:
        results = asyncio.run(soak(server, given.minutes, given.clients))
        results["exit_code"] = server.stop()
    goals = goals_of(results)
    finish("soak", where, given, results, goals)
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
