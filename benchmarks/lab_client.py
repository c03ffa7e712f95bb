"""How much the lab's client costs: streams per second, and what it adds to the server's own times.

A mock server in a process of its own notes when the first and the last token of every stream left;
the client's arrivals are held against that. Open loop at a fixed rate, streams of 16 chunks.

    python benchmarks/lab_client.py --rate 320 --seconds 8
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from typing import Any

import numpy as np

from foretoken.lab.arrivals import Load
from foretoken.lab.client import EndpointConfig, connect
from foretoken.lab.driving import Stretch, drive
from foretoken.lab.http1 import now
from foretoken.lab.results import RequestRecord
from foretoken.lab.servers import free_port
from foretoken.lab.workload import Item, take

CHUNKS = 16


def wait_for(url: str) -> None:
    for _ in range(100):
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the mock did not start")


async def load(url: str, rate: float, seconds: float) -> tuple[list[RequestRecord], float]:
    client = await connect(EndpointConfig(url=url))
    items = take([Item(index=0, prompt="a b c", max_tokens=CHUNKS, temperature=0.0)],
                 int(rate * seconds))  # fmt: skip
    records: list[RequestRecord] = []
    start = now()
    warm = Stretch(load=Load(concurrency=8), start_s=start, warm_up=True)
    await drive(client, items[:64], warm, lambda _: None)
    stretch = Stretch(load=Load(kind="constant", rate=rate), start_s=start)
    took = await drive(client, items, stretch, records.append)
    await client.close()
    return records, took


def compare(url: str, rate: float, seconds: float) -> dict[str, Any]:
    began = time.process_time()
    records, took = asyncio.run(load(url, rate, seconds))
    cpu = time.process_time() - began
    with urllib.request.urlopen(f"{url}/mock/timings") as answer:
        truth = json.load(answer)[64:]
    good = sorted((r for r in records if r.ok), key=lambda r: r.sent_s or 0.0)
    truth.sort(key=lambda t: t["received_s"])
    ours = np.array([[r.ttft_s, r.e2e_s] for r in good])
    theirs = np.array([[t["first_s"] - t["received_s"], t["last_s"] - t["received_s"]]
                       for t in truth])  # fmt: skip
    added = {}
    for name, column in (("ttft", 0), ("e2e", 1)):
        for label, q in (("p50", 0.5), ("p99", 0.99)):
            gap = np.quantile(ours[:, column], q) - np.quantile(theirs[:, column], q)
            added[f"{name}_{label}_ms"] = round(1000 * float(gap), 3)
    lags = [(r.sent_s or 0) - r.scheduled_s for r in good]
    return {
        "streams": len(good),
        "failed": len(records) - len(good),
        "streams_per_s": round(len(good) / took, 1),
        "chunks_per_stream": CHUNKS,
        "added": added,
        "late_p99_ms": round(1000 * float(np.quantile(lags, 0.99)), 3),
        "client_cpu_share": round(cpu / took, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=320.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "foretoken", "lab", "mock", "--port", str(port),
               "--step-ms", "10", "--row-ms", "0", "--prefill-ms", "0",
               "--restart-sd", "0"]  # fmt: skip
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
