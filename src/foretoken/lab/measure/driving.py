"""Drives one client with items at their instants: open loops by the clock, closed ones by turns.

Both send the same items in the same order. An open loop never waits for an answer; its lateness is
in the records (sent_s - scheduled_s), since a late client hides a slow server.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.errors import ConfigError
from foretoken.lab.http.client import Client
from foretoken.lab.http.read_answer import ReadingOptions
from foretoken.lab.http.timed import now
from foretoken.lab.measure.workload import Item, Load, draw_arrivals
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.stats.intervals import Floats

_TICK_S = 0.001
"""Resolution of asyncio's timers on Linux: epoll takes milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """One load on one server: a block of an arm, or a whole run."""

    arm: str = ""
    block: int = 0
    load: Load
    arrival_seed: int = 0
    warm_up: bool = False
    start_s: float
    """Start of the run on the monotonic clock, which the records' times count from."""
    keep_text: bool = False


Done = Callable[[RequestRecord], None]


async def drive(client: Client, items: Sequence[Item], load_run: LoadRun, done: Done) -> float:
    """Send every item, tell `done` of each end; returns the seconds it took."""
    began = now()
    options = ReadingOptions(start_s=load_run.start_s, keep_text=load_run.keep_text)

    async def one(item: Item, due_s: float) -> None:
        record = _record(item, load_run, due_s - load_run.start_s)
        done(await client.complete(item, record, options))

    if load_run.load.kind == "closed":
        await _drive_closed(items, load_run.load.concurrency, one)
    else:
        await _drive_open(items, instants(items, load_run), one)
    return now() - began


def instants(items: Sequence[Item], load_run: LoadRun) -> Floats:
    """Seconds from the start of the load at which items are due."""
    if load_run.load.kind != "trace":
        return draw_arrivals(load_run.load, len(items), load_run.arrival_seed)
    given = [item.arrival_s for item in items if item.arrival_s is not None]
    if len(given) != len(items):
        allowed = "a workload whose requests all say when they arrive, or another --load: closed:8"
        raise ConfigError("--load", "trace", allowed)
    gaps_N = np.diff(np.asarray(given, np.float64))
    # A workload that goes round begins again, a usual gap after its last request.
    usual = float(np.mean(gaps_N[gaps_N >= 0])) if (gaps_N >= 0).any() else 0.0
    gaps_N = np.where(gaps_N >= 0, gaps_N, usual)
    return np.concatenate([[0.0], np.cumsum(gaps_N)])[: len(items)] / load_run.load.speed


def _record(item: Item, load_run: LoadRun, scheduled_s: float) -> RequestRecord:
    return RequestRecord(
        index=item.index,
        arm=load_run.arm,
        block=load_run.block,
        cluster=item.cluster,
        category=item.category,
        warm_up=load_run.warm_up,
        temperature=item.temperature,
        parameters={**item.parameters, **({"seed": item.seed} if item.seed is not None else {})},
        scheduled_s=scheduled_s,
    )


async def _drive_closed(items: Sequence[Item], concurrency: int, one: "_One") -> None:
    queue = iter(items)

    async def worker() -> None:
        for item in queue:
            await one(item, now())

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(items))):
            group.create_task(worker())


async def _drive_open(items: Sequence[Item], due_N: Floats, one: "_One") -> None:
    began = now()
    async with asyncio.TaskGroup() as group:
        for item, due in zip(items, due_N, strict=True):
            await _until(began + float(due))
            group.create_task(one(item, began + float(due)))


async def _until(due_s: float) -> None:
    """Sleeps to the last tick, then goes round the loop: its timers wake whole ticks late."""
    wait = due_s - now()
    if wait > _TICK_S:
        await asyncio.sleep(wait - _TICK_S)
    while now() < due_s:
        await asyncio.sleep(0)


_One = Callable[[Item, float], Coroutine[None, None, None]]
