"""A segment: one block of one arm on one started server, and the folder its records go to.

Everything measured is on disk before the next segment begins. A segment counts once its line is in
segments.jsonl; records of one that was cut short are dropped when the run is resumed.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError
from foretoken.lab.http.client import Client, key_headers
from foretoken.lab.http.scraping import GAUGES, grown, scrape
from foretoken.lab.http.timed import HttpPool, now
from foretoken.lab.measure.driving import LoadRun, drive
from foretoken.lab.measure.experiment import ArmConfig
from foretoken.lab.measure.servers import serving
from foretoken.lab.measure.workload import Item, Load
from foretoken.lab.plain import from_plain, to_plain
from foretoken.lab.records.results import RequestRecord, Scrape, ServerInfo
from foretoken.lab.records.run_files import (
    REQUESTS,
    SCRAPES,
    LineWriter,
    read_lines,
    read_requests,
    write_json,
)

SEGMENTS = "segments.jsonl"
TAKEN = "a new folder, or --resume, which goes on with the run that is there"
CONFIG = "config.json"
_JUMP_S = 1.0
_QUIET_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What is to be measured in one go."""

    arm: ArmConfig
    block: int
    items: tuple[Item, ...]
    warm_up: tuple[Item, ...]
    load: Load
    arrival_seed: int
    keep_text: bool = False
    scrape_every_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEnd:
    """A finished segment."""

    arm: str
    block: int
    seconds: float
    server: ServerInfo
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    clock_jump_s: float = 0.0
    """How far the wall clock moved against the monotonic one."""
    has_metrics: bool = True
    host_busy: float | None = None
    """Share of this machine's time that others took just before; None where it does not tell."""


def busy_share(ends: Sequence[SegmentEnd]) -> float | None:
    """How busy the machine was with something else, on average before the segments."""
    known = [end.host_busy for end in ends if end.host_busy is not None]
    return sum(known) / len(known) if known else None


def require_new(folder: Path) -> None:
    """Say that a run is there already, before anything is asked or started.

    Raises:
        ConfigError: something was measured in this folder.
    """
    if _is_taken(folder):
        raise ConfigError("--out", str(folder), TAKEN)


def _is_taken(folder: Path) -> bool:
    # Where nothing was measured, as for want of a server, there is nothing to lose.
    files = [folder / name for name in (REQUESTS, SCRAPES, SEGMENTS)]
    return any(file.is_file() and file.stat().st_size for file in files)


class RunFolder:
    """The files of a run, appended to while it goes."""

    def __init__(self, folder: Path, settings: object, *, resume: bool) -> None:
        """Begin, or with `resume` go on with what is there.

        Raises:
            ConfigError: there is a run already and `resume` is not set, or the settings of the
                run that is there were others.
        """
        self.folder = folder
        self.finished: list[SegmentEnd] = []
        self._problem: OSError | None = None
        if not resume:
            require_new(folder)
        if _is_taken(folder):
            self._check_settings(settings)
            self.finished = read_segments(folder)
            _keep_finished(folder, self.finished)
        write_json(folder / CONFIG, settings)
        try:
            self._requests = LineWriter(folder / REQUESTS)
            self._scrapes = LineWriter(folder / SCRAPES)
            self._segments = LineWriter(folder / SEGMENTS)
        except OSError as error:
            raise ConfigError("--out", str(folder), f"a folder to write to ({error})") from error

    def _check_settings(self, settings: object) -> None:
        """Raise a ConfigError if more than how much is measured differs from before."""
        path = self.folder / CONFIG
        try:
            before = dict(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            allowed = f"what a run wrote ({error}); name another --out"
            raise ConfigError("--resume", str(path), allowed) from error
        require_same_settings(before, to_plain(settings), but=("sizes",))

    def is_finished(self, segment: Segment) -> bool:
        """Whether the segment was measured before."""
        key = (segment.arm.name, segment.block)
        return any((end.arm, end.block) == key for end in self.finished)

    def add(self, record: RequestRecord) -> None:
        """Write a record; what the disk says against it is kept for `check`."""
        self._write(self._requests, record)

    def add_scrape(self, value: Scrape) -> None:
        """Write a scrape."""
        self._write(self._scrapes, value)

    def finish(self, end: SegmentEnd) -> None:
        """Count a segment as measured."""
        self.check()
        self._write(self._segments, end)
        self.check()
        self.finished.append(end)

    def check(self) -> None:
        """Raise a ConfigError if something could not be written."""
        if self._problem is not None:
            allowed = f"a disk with room ({self._problem}); --resume goes on from here"
            raise ConfigError("--out", str(self.folder), allowed)

    def _write(self, writer: LineWriter, value: object) -> None:
        if self._problem is not None:
            return
        try:
            writer.write(value)
        except OSError as error:
            self._problem = error

    def close(self) -> None:
        """Close the files."""
        for writer in (self._requests, self._scrapes, self._segments):
            writer.close()


def require_same_settings(
    before: Mapping[str, Any], after: Mapping[str, Any], but: tuple[str, ...] = ()
) -> None:
    """Raise a ConfigError if a run is gone on with, and settings `but` these differ."""
    for name in sorted(before.keys() | after.keys()):
        if name not in but and before.get(name) != after.get(name):
            allowed = f"{before.get(name)!r}, as the run had it; or another --out, without --resume"
            raise ConfigError(f"--resume: {name}", after.get(name), allowed)


def read_segments(folder: Path) -> list[SegmentEnd]:
    """The finished segments of a folder.

    Raises:
        ConfigError: a line is broken.
    """
    path = folder / SEGMENTS
    return [from_plain(SegmentEnd, v, f"{path}:{n}") for n, v in read_lines(path)]


def _keep_finished(folder: Path, finished: Sequence[SegmentEnd]) -> None:
    keys = {(end.arm, end.block) for end in finished}
    path = folder / REQUESTS
    if not path.is_file():
        return
    kept = [r for r in read_requests(folder) if (r.arm, r.block) in keys]
    whole = path.with_suffix(".whole")
    whole.unlink(missing_ok=True)
    with LineWriter(whole) as writer:
        for record in kept:
            writer.write(record)
    whole.replace(path)


Watch = Callable[[RequestRecord], None]


async def measure(segment: Segment, folder: RunFolder, start_s: float, watch: Watch) -> SegmentEnd:
    """Start the server, warm it up, drive it, and write everything down.

    Raises:
        EndpointError: the server does not start or answer.
        ConfigError: the disk is full.
    """
    # Before this segment's server is there: whatever computes now is somebody else.
    busy = await _host_busy()
    log = folder.folder / "logs" / f"{segment.arm.name}-{segment.block}.log"
    async with serving(segment.arm, log) as client:
        load_run = LoadRun(
            arm=segment.arm.name,
            block=segment.block,
            load=segment.load,
            arrival_seed=segment.arrival_seed,
            start_s=start_s,
            keep_text=segment.keep_text,
        )
        at_once = Load(concurrency=max(1, len(segment.warm_up)))
        quiet = replace(load_run, warm_up=True, load=at_once)
        await drive(client, segment.warm_up, quiet, folder.add)
        before = await scrape(client.pool)
        wall = time.time() - now()
        gauges: dict[str, float] = {}
        watcher = asyncio.create_task(_watch(client, segment, start_s, folder, gauges))

        def done(record: RequestRecord) -> None:
            folder.add(record)
            watch(record)

        try:
            seconds = await drive(client, segment.items, load_run, done)
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        after = await scrape(client.pool)
        end = SegmentEnd(
            arm=segment.arm.name,
            block=segment.block,
            seconds=seconds,
            server=client.info,
            counters=grown(before or {}, after or {}),
            gauges=gauges,
            clock_jump_s=_jump(wall),
            has_metrics=after is not None,
            host_busy=busy,
        )
    folder.finish(end)
    return end


async def _host_busy() -> float | None:
    """Share of all cores' time that is not idle, over a moment in which nothing is measured."""
    before = _cpu_seconds()
    await asyncio.sleep(_QUIET_S)
    after = _cpu_seconds()
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


def _cpu_seconds() -> tuple[float, float] | None:
    """Ticks of all cores that were not idle, and all ticks, since the system started (Linux)."""
    try:
        words = Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()[1:9]
        ticks = [float(word) for word in words]
    except (OSError, ValueError):
        return None
    waiting = sum(ticks[3:5])
    return sum(ticks) - waiting, sum(ticks)


def _jump(wall_before: float) -> float:
    jump = time.time() - now() - wall_before
    return jump if abs(jump) > _JUMP_S else 0.0


async def _watch(
    client: Client, segment: Segment, start_s: float, folder: RunFolder, gauges: dict[str, float]
) -> None:
    """Scrape now and then, on a connection of its own; not where the first page is missing."""
    pool = HttpPool(client.info.url, headers=key_headers(client.config.api_key))
    answers = False
    try:
        while True:
            found = await scrape(pool)
            if found is None and not answers:
                return
            answers, found = True, found or {}
            for name in GAUGES:
                if name in found:
                    gauges[name] = max(found[name], gauges.get(name, 0.0))
            at = now() - start_s
            values = {n: v for n, v in found.items() if n.startswith("vllm:")}
            if found:
                folder.add_scrape(
                    Scrape(time_s=at, arm=segment.arm.name, block=segment.block, values=values)
                )
            await asyncio.sleep(segment.scrape_every_s)
    finally:
        await pool.close()
