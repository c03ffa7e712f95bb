"""How much the lab's client costs: streams per second, and what it adds to the server's own times.

A server in a process of its own, which does nothing but stream (`workers/run_streams.py`), notes
when each request came and when the first and the last chunk of its answer left; the client's
arrivals are held against that, stream by stream, on the clock that all processes of a machine
share. Added is how late a request was sent, and how long after its writing a chunk was noted. Open
loop at a fixed rate, streams of 16 chunks.

    python benchmarks/lab_client.py --rate 320 --seconds 8
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
from foretoken.lab.http.timed import now
from foretoken.lab.measure.driving import LoadRun, drive
from foretoken.lab.measure.servers import free_port
from foretoken.lab.measure.workload import Item, Load, take
from foretoken.lab.records.results import RequestRecord

CHUNKS, STEP_MS, WARM_UP = 16, 10, 64


def wait_for(url: str) -> None:
    for _ in range(100):
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the client saw; times of records count from `start_s`."""

    records: list[RequestRecord]
    start_s: float
    took_s: float
    cpu_s: float


async def load(url: str, rate: float, seconds: float) -> Run:
    client = await connect(EndpointConfig(url=url))
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


def compare(url: str, rate: float, seconds: float) -> dict[str, Any]:
    run = asyncio.run(load(url, rate, seconds))
    with urllib.request.urlopen(f"{url}/timings") as answer:
        truth_N3 = np.array(sorted(json.load(answer))[WARM_UP:]) - run.start_s
    good = sorted((r for r in run.records if r.ok), key=lambda r: r.sent_s or 0.0)
    assert len(good) == len(truth_N3), (len(good), len(truth_N3))
    seen_N2 = np.array([[r.first_s, r.last_s] for r in good])
    late_N = np.array([(r.sent_s or 0) - r.scheduled_s for r in good])
    added_N2 = late_N[:, None] + seen_N2 - truth_N3[:, 1:]
    return {
        "streams": len(good),
        "failed": len(run.records) - len(good),
        "streams_per_s": round(len(good) / run.took_s, 1),
        "chunks_per_stream": CHUNKS,
        "added_ms": {"ttft": spread_ms(added_N2[:, 0]), "e2e": spread_ms(added_N2[:, 1])},
        "late_ms": spread_ms(late_N),
        "client_cpu_share": round(run.cpu_s / run.took_s, 3),
    }


def spread_ms(seconds_N: np.ndarray) -> dict[str, float]:
    """Quantiles in milliseconds."""
    return {f"p{q}": round(1000 * float(np.percentile(seconds_N, q)), 3) for q in (50, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=320.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    port = free_port()
    script = Path(__file__).parent / "workers" / "run_streams.py"
    command = [sys.executable, str(script), str(port), str(STEP_MS), str(CHUNKS)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url)
        print(json.dumps(compare(url, given.rate, given.seconds)))
    finally:
        server.terminate()
        server.wait(timeout=10)


if __name__ == "__main__":
    main()
