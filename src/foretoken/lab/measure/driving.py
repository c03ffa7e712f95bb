"""Drives one client with items at their instants: open loops by the clock, closed ones by turns.

Both send the same items in the same order. An open loop never waits for an answer; its lateness is
in the records (sent_s - scheduled_s), since a late client hides a slow server.

What measures runs in an event loop that SIGTERM ends as Ctrl-C does: at an await. An exception
raised wherever a signal comes is lost where nothing may raise, as around a fork, and a server that
is just being started would be left behind.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from foretoken.errors import ConfigError
from foretoken.lab.http.client import Client
from foretoken.lab.http.timed import now
from foretoken.lab.measure.workload import Item, Load, draw_arrivals
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.stats.intervals import Floats

T = TypeVar("T")
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


Done = Callable[[RequestRecord], None]


async def drive(client: Client, items: Sequence[Item], load_run: LoadRun, done: Done) -> float:
    """Send every item, tell `done` of each end; returns the seconds it took."""
    began, load = now(), load_run.load

    async def one(item: Item, due_s: float) -> None:
        seed = {} if item.seed is None else {"seed": item.seed}
        record = RequestRecord(
            index=item.index,
            arm=load_run.arm,
            block=load_run.block,
            cluster=item.cluster,
            category=item.category,
            warm_up=load_run.warm_up,
            temperature=item.temperature,
            parameters={**item.parameters, **seed},
            scheduled_s=due_s - load_run.start_s,
        )
        done(await client.complete(item, record, load_run.start_s))

    async def worker(queue: Iterator[Item]) -> None:
        for item in queue:
            await one(item, now())

    if load.kind == "closed":
        queue = iter(items)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.concurrency, len(items))):
                group.create_task(worker(queue))
        return now() - began
    after_N = instants(items, load, load_run.arrival_seed)
    due_N = now() + after_N
    async with asyncio.TaskGroup() as group:
        for item, due_s in zip(items, due_N.tolist(), strict=True):
            # Asleep to the last tick, then round the loop: its timers wake whole ticks late.
            if (wait_s := due_s - now()) > _TICK_S:
                await asyncio.sleep(wait_s - _TICK_S)
            while now() < due_s:
                await asyncio.sleep(0)
            group.create_task(one(item, due_s))
    return now() - began


def instants(items: Sequence[Item], load: Load, seed: int) -> Floats:
    """Seconds from the start of an open load at which items are due."""
    if load.kind != "trace":
        return draw_arrivals(load, len(items), seed)
    given = [item.arrival_s for item in items if item.arrival_s is not None]
    if len(given) != len(items):
        allowed = "a workload whose requests all say when they arrive, or another --load: closed:8"
        raise ConfigError("--load", "trace", allowed)
    gaps_N = np.diff(np.asarray(given, np.float64))
    # A workload that goes round begins again, a usual gap after its last request.
    usual = float(np.mean(gaps_N[gaps_N >= 0])) if (gaps_N >= 0).any() else 0.0
    gaps_N = np.where(gaps_N >= 0, gaps_N, usual)
    return np.concatenate([[0.0], np.cumsum(gaps_N)])[: len(items)] / load.speed


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`; what `main` started is stopped before this returns or raises. In the main
    thread SIGTERM has the running loop cancel `main` and nothing else: tasks that asyncio has for
    starting a process have to end by themselves, or its end is never noticed. Raises
    KeyboardInterrupt: it was told to end by SIGTERM or SIGINT."""
    told = False

    async def watched() -> T:
        if threading.current_thread() is not threading.main_thread():
            return await main
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def end() -> None:
            nonlocal told
            told = True
            task.cancel()

        before = signal.getsignal(signal.SIGTERM)
        loop.add_signal_handler(signal.SIGTERM, end)
        try:
            return await main
        finally:  # who handled it before does so again
            loop.remove_signal_handler(signal.SIGTERM)
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        if told:
            raise KeyboardInterrupt from None
        raise
