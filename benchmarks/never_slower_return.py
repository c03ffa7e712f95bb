"""How a drafter that was put to rest in the middle of an answer comes back: reported, no bar.

The server's operator switches speculation off after a third of a stream and on after another. What
is told is tokens per step before the rest and after it, by steps since the return. A head has had
no features meanwhile, a draft model no keys and values.
"""

import asyncio
import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from never_slower_arms import ADMIN_KEY, Arm, plain_ask
from never_slower_bench import TAUGHT, UNCACHED, Bench
from never_slower_load import TIMEOUT_S, Ask, Reply, read_reply

from foretoken.lab.http.timed import Answer, HttpPool, Incoming

HEAD = {"model": "demo-eagle3", "num_speculative_tokens": 3}
WINDOW = 32
"""Steps that are summed up together."""
EVENT = b'"tokens":[{"id":'


async def _switch(pool: HttpPool, on: bool) -> None:
    body = json.dumps({"enabled": on}).encode()
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    answer = await pool.send(
        "PUT", "/admin/speculation", body, timeout_s=TIMEOUT_S, headers=headers
    )
    assert answer.status == 200, answer.status


async def _stream(url: str, ask: Ask, places: Sequence[int]) -> tuple[Answer, list[int]]:
    """One answer, speculation switched at each of `places`, and how far it was by then."""
    pool, incoming, reached = HttpPool(url), Incoming(), list[int]()
    sending = asyncio.ensure_future(
        pool.send(
            "POST", "/v1/completions", ask.encoded({}), timeout_s=TIMEOUT_S, incoming=incoming
        )
    )
    seen, on = 0, True
    async for piece in incoming.pieces():
        seen += piece.count(EVENT)
        if len(reached) < len(places) and seen >= places[len(reached)]:
            on = not on
            await _switch(pool, on)
            reached.append(seen)
    answer = await sending
    await pool.close()
    return answer, reached


def _sizes(reply: Reply, begin: int, end: int) -> list[int]:
    """Tokens of the steps that begin between two places of the answer."""
    starts = [i for i, position in enumerate(reply.positions) if position == 0]
    return [b - a for a, b in pairwise(starts) if begin <= a < end]


def coming_back(bench: Bench) -> dict[str, Any]:
    """A head and a draft model, each resting for a third of some answers of one client."""
    third = bench.given.drift_tokens
    head = Arm(name="head", spec=bench.pair.drafted(HEAD, UNCACHED))
    results = {}
    print("\nback from a rest in mid-stream, one client: tokens per step")
    for arm in (head, bench.control()):
        name = "head" if arm is head else "draft model"
        url = bench.servers.url(arm.spec)
        found = []
        for turn in range(bench.given.repeats + 1):
            asked = plain_ask(bench.pair, TAUGHT + 500_000 + turn)
            more = {"max_tokens": 3 * third, "token_sources": True, "return_token_ids": False}
            ask = Ask(key=f"back {asked.key}", body={**asked.body, **more})
            answer, reached = asyncio.run(_stream(url, ask, (third, 2 * third)))
            reply = read_reply(ask, answer)
            bench.check(name, [reply])
            if turn and len(reached) == 2:
                found.append(_told(reply, reached))
        if not found:
            print(f"  {name}: its answers were over before they could be switched", flush=True)
            continue
        keys = found[0].keys()
        medians = {key: statistics.median(one[key] for one in found) for key in keys}
        results[name] = medians
        told = ", ".join(f"{key} {value:.2f}" for key, value in medians.items())
        print(f"  {name}: {told}", flush=True)
    return results


def _told(reply: Reply, reached: Sequence[int]) -> dict[str, float]:
    """Means before the rest and in windows after it; steps until a draft was accepted."""
    before = _sizes(reply, 0, reached[0])[-WINDOW:]
    after = _sizes(reply, reached[1], len(reply.ids))
    first = next((i for i, size in enumerate(after) if size > 1), len(after))
    return {
        "before": statistics.fmean(before),
        f"steps 1 to {WINDOW}": statistics.fmean(after[:WINDOW] or [1]),
        f"{WINDOW + 1} to {2 * WINDOW}": statistics.fmean(after[WINDOW : 2 * WINDOW] or [1]),
        "steps until a draft was accepted": float(first),
    }
