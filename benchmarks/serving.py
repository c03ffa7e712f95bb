"""TTFT and TPOT of the packaged pair over HTTP, by number of clients, with and without drafts.

    python benchmarks/serving.py --clients 1 4 16 --repeats 5

One server; speculation is switched per request, so both arms share everything else, and their
rounds are interleaved. A second part measures what 50 requests/s to /health do to TPOT, again
interleaved. Medians over rounds of medians over requests, ratios with their bootstrap intervals;
the last line is JSON.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from common import ratio_of_medians

PROMPTS = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n",
    "import os\nimport sys\n\n\ndef main(argv):\n",
    "def parse(text):\n    result = []\n    for line in text.splitlines():\n",
    "class Reader:\n    def read(self, size=-1):\n        if self.closed:\n",
)


@dataclass
class Round:
    """Times of one round's requests, seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    tokens: int = 0

    def medians(self) -> dict[str, float]:
        return {
            "ttft_s": statistics.median(self.ttft),
            "tpot_s": statistics.median(self.tpot),
            "tokens_per_s": self.tokens / (time.perf_counter() - self.began),
        }


async def ask(client: httpx.AsyncClient, prompt: str, tokens: int, on: bool, into: Round) -> None:
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "speculation": {"enabled": on},
    }
    began, first, last = time.perf_counter(), 0.0, 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.status_code
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                last = time.perf_counter()
                first = first or last
    into.ttft.append(first - began)
    into.tpot.append((last - first) / (tokens - 1))
    into.tokens += tokens


async def one_round(url: str, clients: int, tokens: int, on: bool) -> dict[str, float]:
    seen = Round()
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def worker(number: int) -> None:
            for turn in range(2):
                prompt = PROMPTS[(number + turn) % len(PROMPTS)] + f"# {number}\n"
                await ask(client, prompt, tokens, on, seen)

        await asyncio.gather(*(worker(number) for number in range(clients)))
    return seen.medians()


async def knock(url: str, per_second: float, stop: asyncio.Event) -> int:
    """GET /health at a steady rate until told to stop."""
    count = 0
    async with httpx.AsyncClient(base_url=url) as client:
        while not stop.is_set():
            began = time.perf_counter()
            assert (await client.get("/health")).status_code == 200
            count += 1
            await asyncio.sleep(max(0.0, 1 / per_second - (time.perf_counter() - began)))
    return count


async def health_round(url: str, tokens: int, knocking: bool) -> float:
    stop = asyncio.Event()
    task = asyncio.create_task(knock(url, 50, stop)) if knocking else None
    tpot = (await one_round(url, 1, tokens, True))["tpot_s"]
    stop.set()
    if task is not None:
        await task
    return tpot


async def measure(url: str, given: argparse.Namespace) -> dict[str, Any]:
    await one_round(url, 2, 16, True)
    table = []
    for clients in given.clients:
        arms: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for repeat in range(given.repeats):
            for on in (True, False) if repeat % 2 else (False, True):
                arms[on].append(await one_round(url, clients, given.tokens, on))
        row: dict[str, Any] = {"clients": clients}
        for name in ("ttft_s", "tpot_s", "tokens_per_s"):
            off = [one[name] for one in arms[False]]
            on_values = [one[name] for one in arms[True]]
            row[name] = {
                "off": round(statistics.median(off), 5),
                "on": round(statistics.median(on_values), 5),
                "on_over_off": str(ratio_of_medians(on_values, off)),
            }
        table.append(row)
        print(json.dumps(row), flush=True)
    quiet, knocked = [], []
    for repeat in range(given.repeats):
        for knocking in (True, False) if repeat % 2 else (False, True):
            found = await health_round(url, given.tokens, knocking)
            (knocked if knocking else quiet).append(found)
    health = {
        "tpot_s_quiet": round(statistics.median(quiet), 5),
        "tpot_s_with_50_health_per_s": round(statistics.median(knocked), 5),
        "ratio": str(ratio_of_medians(knocked, quiet)),
    }
    return {"clients": table, "health": health}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--speculative-config", default=None)
    parser.add_argument("--quick", action="store_true", help="see that it runs; no numbers")
    given = parser.parse_args()
    if given.quick:
        given.clients, given.repeats, given.tokens = [1, 2], 3, 12
    command = [sys.executable, "-m", "foretoken", "serve", "demo", "--port", "0"]
    command += ["--kv-cache-memory-bytes", "200000000"]
    if given.speculative_config:
        command += ["--speculative-config", given.speculative_config]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, "the server did not start"
        print(json.dumps(asyncio.run(measure(found[0], given))))
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()
