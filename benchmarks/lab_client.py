"""How much the lab's client costs: streams per second, and what it adds to the server's own times.

A server in a process of its own, which does nothing but stream (`workers/run_streams.py`), notes
when each request came and when the first and the last chunk of its answer left; the client's
arrivals are held against that, stream by stream, on the clock that all processes of a machine
share. Added is how late a request was sent, and how long after its writing a chunk was noted. Open
loop at a fixed rate, streams of 16 chunks. `--client` puts httpx or aiohttp (which have to be
installed) in the place of the lab's own connections.

    python benchmarks/lab_client.py --rate 320 --seconds 8 --client own aiohttp httpx --rounds 5
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.lab.http.client import EndpointConfig, connect
from foretoken.lab.http.timed import Answer, HttpPool, now
from foretoken.lab.measure.driving import LoadRun, drive
from foretoken.lab.measure.servers import free_port
from foretoken.lab.measure.workload import Item, Load, take
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.stats.repeats import in_turn

CHUNKS, STEP_MS, WARM_UP = 16, 10, 64


def wait_for(url: str) -> None:
    for _ in range(100):
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


def answer_of(status: int, headers: Any, pieces: list[tuple[float, bytes]], sent: float) -> Answer:
    pairs = tuple((name.lower(), value) for name, value in headers.items())
    return Answer(status, pairs, tuple(pieces), sent, pieces[-1][0])


class Httpx:
    """Requests by httpx; a piece is stamped when httpx hands it over."""

    def __init__(self, url: str) -> None:
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(base_url=url, limits=limits, timeout=300, trust_env=False)

    async def send(self, method: str, path: str, body: bytes, **_: Any) -> Answer:
        sent, pieces, headers = now(), [], {"content-type": "application/json"}
        async with self._client.stream(method, path, content=body, headers=headers) as answer:
            async for piece in answer.aiter_raw():
                pieces.append((now(), piece))
            return answer_of(answer.status_code, answer.headers, pieces, sent)

    async def close(self) -> None:
        await self._client.aclose()


class Aiohttp:
    """Requests by aiohttp; a piece is stamped when aiohttp hands it over."""

    def __init__(self, url: str) -> None:
        import aiohttp

        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(url, connector=connector, auto_decompress=False)

    async def send(self, method: str, path: str, body: bytes, **_: Any) -> Answer:
        sent, pieces, headers = now(), [], {"content-type": "application/json"}
        async with self._session.request(method, path, data=body, headers=headers) as answer:
            async for piece in answer.content.iter_any():
                pieces.append((now(), piece))
            return answer_of(answer.status, answer.headers, pieces, sent)

    async def close(self) -> None:
        await self._session.close()


CLIENTS: dict[str, Any] = {"own": HttpPool, "httpx": Httpx, "aiohttp": Aiohttp}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the client saw; times of records count from `start_s`."""

    records: list[RequestRecord]
    start_s: float
    took_s: float
    cpu_s: float


async def load(name: str, url: str, rate: float, seconds: float) -> Run:
    client = await connect(EndpointConfig(url=url))
    await client.pool.close()
    client.pool = CLIENTS[name](url)
    items = take([Item(index=0, prompt="a b c", max_tokens=CHUNKS, temperature=0.0)],
                 int(rate * seconds))  # fmt: skip
    records: list[RequestRecord] = []
    start = now()
    warm = LoadRun(load=Load(concurrency=WARM_UP), start_s=start, warm_up=True)
    await drive(client, items[:WARM_UP], warm, lambda _: None)
    began = time.process_time()
    load_run = LoadRun(load=Load(kind="constant", rate=rate), start_s=start)
    took = await drive(client, items, load_run, records.append)
    cpu = time.process_time() - began
    await client.close()
    return Run(records=records, start_s=start, took_s=took, cpu_s=cpu)


def compare(name: str, url: str, rate: float, seconds: float) -> dict[str, Any]:
    run = asyncio.run(load(name, url, rate, seconds))
    with urllib.request.urlopen(f"{url}/timings") as answer:
        truth_N3 = np.array(sorted(json.load(answer))[WARM_UP:]) - run.start_s
    good = sorted((r for r in run.records if r.ok), key=lambda r: r.sent_s or 0.0)
    assert len(good) == len(truth_N3), (len(good), len(truth_N3))
    seen_N2 = np.array([[r.first_s, r.last_s] for r in good])
    late_N = np.array([(r.sent_s or 0) - r.scheduled_s for r in good])
    added_N2 = late_N[:, None] + seen_N2 - truth_N3[:, 1:]
    return {
        "client": name,
        "streams": len(good),
        "failed": len(run.records) - len(good),
        "streams_per_s": round(len(good) / run.took_s, 1),
        "chunks_per_stream": CHUNKS,
        "added_ms": {"ttft": spread_ms(added_N2[:, 0]), "e2e": spread_ms(added_N2[:, 1])},
        "late_ms": spread_ms(late_N),
        "client_cpu_share": round(run.cpu_s / run.took_s, 3),
        "client_cpu_ms_per_stream": round(1000 * run.cpu_s / len(good), 3),
    }


def spread_ms(seconds_N: np.ndarray) -> dict[str, float]:
    """Quantiles in milliseconds."""
    return {f"p{q}": round(1000 * float(np.percentile(seconds_N, q)), 3) for q in (50, 99)}


def measure(name: str, rate: float, seconds: float) -> dict[str, Any]:
    """One client against a server of its own."""
    port = free_port()
    script = Path(__file__).parent / "workers" / "run_streams.py"
    command = [sys.executable, str(script), str(port), str(STEP_MS), str(CHUNKS)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url)
        return compare(name, url, rate, seconds)
    finally:
        server.terminate()
        server.wait(timeout=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=320.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--client", nargs="+", choices=CLIENTS, default=["own"])
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    for turn in range(given.rounds):
        for name in in_turn(given.client, turn):
            print(json.dumps(measure(name, given.rate, given.seconds)))


if __name__ == "__main__":
    main()
