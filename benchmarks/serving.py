"""TTFT and TPOT of the packaged pair over HTTP, by number of clients, with and without drafts.

    python benchmarks/serving.py --clients 1 4 16

One server; speculation is switched off per request, so both arms share everything else, and their
rounds take turns. The server chooses how far to draft by measurement, and learns only from the
requests that want drafts; --no-adaptive drafts as far as it was told at any load. The last part
measures what 50 requests/s to /health, from a process of their own, do to TPOT. Numbers are
medians over rounds of medians over requests, ratios have their bootstrap interval.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from common import Goal, Ratio, announce, at_most, finish, make_parser, ratio_of_medians
from served import SIZES, demo_server

from foretoken.lab.http.timed import HttpPool, now

PROMPTS = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n",
    "import os\nimport sys\n\n\ndef main(argv):\n",
    "def parse(text):\n    result = []\n    for line in text.splitlines():\n",
    "class Reader:\n    def read(self, size=-1):\n        if self.closed:\n",
)
PER_CLIENT = 2
KNOCKS_PER_S = 50
"""Requests to /health."""
TIMES = ("ttft_s", "tpot_s", "s_per_token")


@dataclass
class Round:
    """Times of one round's requests, seconds."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    began: float = field(default_factory=now)
    tokens: int = 0

    def summary(self) -> dict[str, float]:
        return {
            "ttft_s": statistics.median(self.ttft_s),
            "tpot_s": statistics.median(self.tpot_s),
            "s_per_token": (now() - self.began) / self.tokens,
        }


async def ask(pool: HttpPool, prompt: str, tokens: int, on: bool, into: Round) -> None:
    """One stream; every token is an event of its own, those of a step arrive together."""
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "speculation": {"enabled": on},
    }
    answer = await pool.send("POST", "/v1/completions", json.dumps(body).encode(), timeout_s=300)
    assert answer.status == 200 and answer.broken is None, (answer.status, answer.broken)
    at = [time_s for time_s, piece in answer.pieces if b"data: {" in piece]
    into.ttft_s.append(at[0] - answer.sent_s)
    into.tpot_s.append((at[-1] - at[0]) / (tokens - 1))
    into.tokens += tokens


async def one_round(url: str, clients: int, tokens: int, on: bool) -> dict[str, float]:
    """Every client asks PER_CLIENT times, one after the other."""
    pool, seen = HttpPool(url), Round()

    async def client(number: int) -> None:
        for turn in range(PER_CLIENT):
            prompt = PROMPTS[(number + turn) % len(PROMPTS)] + f"# {number}\n"
            await ask(pool, prompt, tokens, on, seen)

    await asyncio.gather(*(client(number) for number in range(clients)))
    await pool.close()
    return seen.summary()


async def by_clients(url: str, clients: int, given: argparse.Namespace) -> dict[str, Any]:
    """A row of the table."""
    arms: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for _ in range(given.warm_up_rounds):
        await one_round(url, clients, given.tokens, True)
    for repeat in range(given.repeats):
        for on in (True, False) if repeat % 2 else (False, True):
            arms[on].append(await one_round(url, clients, given.tokens, on))
    row: dict[str, Any] = {"clients": clients}
    for name in TIMES:
        off, on_ = ([one[name] for one in arms[on]] for on in (False, True))
        ratio = ratio_of_medians(on_, off)
        row[name] = {"off": statistics.median(off), "on": statistics.median(on_), "ratio": ratio}
        print(
            f"{clients:3} clients  {name:12} {row[name]['off'] * 1e3:9.3f} ms without, "
            f"{row[name]['on'] * 1e3:9.3f} ms with drafts, ratio {ratio}",
            flush=True,
        )
    return row


async def knock(url: str) -> None:
    """GET /health at a steady rate until the process is ended."""
    pool, due = HttpPool(url), now()
    while True:
        answer = await pool.send("GET", "/health", timeout_s=10)
        assert answer.status == 200, answer.status
        due = max(due + 1 / KNOCKS_PER_S, now() - 1)
        await asyncio.sleep(max(0.0, due - now()))


async def health_round(url: str, tokens: int, knocking: bool) -> float:
    process = None
    if knocking:
        process = subprocess.Popen([sys.executable, __file__, "--knock-at", url])
        await asyncio.sleep(1.5)
    tpot_s = (await one_round(url, 1, tokens, True))["tpot_s"]
    if process is not None:
        assert process.poll() is None, "the process that asks /health has ended"
        process.kill()
        process.wait()
    return tpot_s


async def health(url: str, given: argparse.Namespace) -> Ratio:
    """TPOT of one client while /health is asked 50 times a second, over TPOT in peace."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(given.health_repeats):
        for knocking in (True, False) if repeat % 2 else (False, True):
            found[knocking].append(await health_round(url, given.health_tokens, knocking))
    ratio = ratio_of_medians(found[True], found[False])
    print(f"{KNOCKS_PER_S} requests/s to /health: TPOT times {ratio}", flush=True)
    return ratio


async def measure(url: str, given: argparse.Namespace) -> dict[str, Any]:
    await one_round(url, 2, 16, True)
    rows = [await by_clients(url, clients, given) for clients in given.clients]
    return {"clients": rows, "health_tpot_ratio": await health(url, given)}


def goals_of(results: dict[str, Any]) -> list[Goal]:
    """Never slower, up to noise; and HTTP does not wait for steps nor steps for HTTP."""
    found = [
        at_most(f"TPOT with over without drafts, {row['clients']} clients",
                row["tpot_s"]["ratio"].value, 1.03)
        for row in results["clients"]
    ]  # fmt: skip
    name = f"TPOT with {KNOCKS_PER_S} requests/s to /health over without"
    return [*found, at_most(name, results["health_tpot_ratio"].value, 1.03)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--warm-up-rounds", type=int, default=2, help="per number of clients")
    parser.add_argument("--health-tokens", type=int, default=1000)
    parser.add_argument("--health-repeats", type=int, default=9)
    parser.add_argument("--no-adaptive", action="store_true", help="draft at any load")
    parser.add_argument("--speculative-config", help="instead of the packaged draft model")
    parser.add_argument("--knock-at", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.knock_at is not None:
        asyncio.run(knock(given.knock_at))
    if given.quick:
        given.clients, given.repeats, given.tokens = [1, 2], 2, 16
        given.health_repeats, given.health_tokens, given.warm_up_rounds = 2, 100, 1
    where = announce(given)
    options = list(SIZES)
    options += ["--no-adaptive-speculation"] if given.no_adaptive else []
    if given.speculative_config:
        options += ["--speculative-config", given.speculative_config]
    with demo_server(*options) as server:
        results = asyncio.run(measure(server.url, given))
    finish("serving", where, given, results, goals_of(results))


if __name__ == "__main__":
    main()
