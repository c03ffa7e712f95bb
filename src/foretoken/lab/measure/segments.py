"""A segment: one block of one arm on one started server, and the folder its records go to.

Everything measured is on disk before the next segment begins. A segment counts once its line is in
segments.jsonl; records of one that was cut short are dropped when the run is resumed.
"""

import asyncio
import json
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from foretoken.errors import ConfigError
from foretoken.lab.http.client import KV_USAGE, grown, scrape
from foretoken.lab.http.timed import HttpPool
from foretoken.lab.measure.driving import LoadRun, drive
from foretoken.lab.measure.experiment import ArmConfig
from foretoken.lab.measure.servers import serving
from foretoken.lab.measure.workload import Item, Load
from foretoken.lab.plain import from_plain, to_plain
from foretoken.lab.records.results import RequestRecord, ServerInfo
from foretoken.lab.records.run_files import (
    REQUESTS,
    LineWriter,
    read_lines,
    read_requests,
    write_json,
)

SEGMENTS = "segments.jsonl"
TAKEN = "a new folder, or --resume, which goes on with the run that is there"
CONFIG = "config.json"
_QUIET_S = 0.25
_SCRAPE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    arm: ArmConfig
    block: int
    items: tuple[Item, ...]
    warm_up: tuple[Item, ...]
    load: Load
    arrival_seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEnd:
    arm: str
    block: int
    seconds: float
    server: ServerInfo
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    has_metrics: bool = True
    host_busy: float | None = None
    """Share of this machine's time that others took just before; None where it does not tell."""


Watch = Callable[[Segment, RequestRecord | None], None]
"""Told of every segment that begins (None) and of every request that ends."""


def require_new(folder: Path) -> None:
    """Say that a run is there already, before anything is asked or started. Raises ConfigError:
    something was measured in this folder."""
    if _is_taken(folder):
        raise ConfigError("--out", str(folder), TAKEN)


def _is_taken(folder: Path) -> bool:
    # Where nothing was measured, as for want of a server, there is nothing to lose.
    files = [folder / name for name in (REQUESTS, SEGMENTS)]
    return any(file.is_file() and file.stat().st_size for file in files)


class RunFolder:
    """The files of a run, appended to while it goes."""

    def __init__(self, folder: Path, settings: object, *, resume: bool) -> None:
        """Begin, or with `resume` go on with what is there. Raises ConfigError: there is a run
        already and `resume` is not set, or more than how much is measured differs from the settings
        of the run that is there."""
        self.folder = folder
        self.finished: list[SegmentEnd] = []
        self._problem: OSError | None = None
        if not resume:
            require_new(folder)
        if _is_taken(folder):
            require_same_settings(folder, settings, but="sizes")
            self.finished = read_segments(folder)
            _drop_unfinished(folder, {(end.arm, end.block) for end in self.finished})
        write_json(folder / CONFIG, settings)
        self._requests = LineWriter.within(folder, REQUESTS)
        self._segments = LineWriter.within(folder, SEGMENTS)

    def add(self, record: RequestRecord) -> None:
        """Write a record; what the disk says against it is raised by `finish`."""
        self._write(self._requests, record)

    def finish(self, end: SegmentEnd) -> None:
        """Count a segment as measured. Raises ConfigError: something of it could not be written."""
        self._write(self._segments, end)
        if self._problem is not None:
            allowed = f"a disk with room ({self._problem}); --resume goes on from here"
            raise ConfigError("--out", str(self.folder), allowed)
        self.finished.append(end)

    def _write(self, writer: LineWriter, value: object) -> None:
        if self._problem is None:
            try:
                writer.write(value)
            except OSError as error:
                self._problem = error

    def close(self) -> None:
        self._requests.close()
        self._segments.close()


def require_same_settings(folder: Path, settings: object, *, but: str) -> None:
    """Raise a ConfigError if the run in `folder` is gone on with, and settings `but` this one are
    not its own, or cannot be read."""
    path = folder / CONFIG
    try:
        before = dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        allowed = f"what a run wrote ({error}); name another --out"
        raise ConfigError("--resume", str(path), allowed) from error
    after = to_plain(settings)
    for name in sorted(before.keys() | after.keys()):
        if name != but and before.get(name) != after.get(name):
            allowed = f"{before.get(name)!r}, as the run had it; or another --out, without --resume"
            raise ConfigError(f"--resume: {name}", after.get(name), allowed)


def read_segments(folder: Path) -> list[SegmentEnd]:
    """The finished segments of a folder. Raises ConfigError: a line is broken."""
    path = folder / SEGMENTS
    return [from_plain(SegmentEnd, v, f"{path}:{n}") for n, v in read_lines(path)]


def _drop_unfinished(folder: Path, keys: Set[tuple[str, int]]) -> None:
    path = folder / REQUESTS
    if not path.is_file():
        return
    whole = path.with_suffix(".whole")
    whole.unlink(missing_ok=True)
    with LineWriter(whole) as writer:
        for record in read_requests(folder):
            if (record.arm, record.block) in keys:
                writer.write(record)
    whole.replace(path)


async def measure(segment: Segment, folder: RunFolder, start_s: float, watch: Watch) -> None:
    """Start the server, warm it up, drive it, and write everything down. Raises EndpointError: the
    server does not start or answer; ConfigError: the disk is full."""
    # Before this segment's server is there: whatever computes now is somebody else.
    busy = await _host_busy()
    arm = segment.arm
    log = folder.folder / "logs" / f"{arm.name}-{segment.block}.log"
    load_run = LoadRun(
        arm=arm.name,
        block=segment.block,
        load=segment.load,
        arrival_seed=segment.arrival_seed,
        start_s=start_s,
    )
    at_once = Load(concurrency=max(1, len(segment.warm_up)))

    def done(record: RequestRecord) -> None:
        folder.add(record)
        watch(segment, record)

    async with serving(arm, log) as client:
        quiet = replace(load_run, warm_up=True, load=at_once)
        await drive(client, segment.warm_up, quiet, folder.add)
        before = await scrape(client.pool)
        gauges: dict[str, float] = {}
        watcher = asyncio.create_task(_watch_usage(arm, client.info.url, gauges))
        try:
            seconds = await drive(client, segment.items, load_run, done)
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        after = await scrape(client.pool)
    folder.finish(SegmentEnd(
        arm=arm.name,
        block=segment.block,
        seconds=seconds,
        server=client.info,
        counters=grown(before or {}, after or {}),
        gauges=gauges,
        has_metrics=after is not None,
        host_busy=busy,
    ))  # fmt: skip


async def _host_busy() -> float | None:
    """Share of all cores' time that is not idle, over a moment in which nothing is measured, by
    their ticks since the system started (Linux)."""
    told = []
    for wait_s in (0.0, _QUIET_S):
        await asyncio.sleep(wait_s)
        try:
            words = Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()[1:9]
            told.append([float(word) for word in words])
        except (OSError, ValueError):
            return None
    ticks = [after - before for before, after in zip(*told, strict=True)]
    return (sum(ticks) - sum(ticks[3:5])) / sum(ticks) if sum(ticks) > 0 else None


async def _watch_usage(arm: ArmConfig, url: str, gauges: dict[str, float]) -> None:
    """Note the fullest that the KV cache gets, asked on a connection of its own; not where the
    first page is missing."""
    pool = HttpPool(url, headers=arm.headers)
    try:
        found = await scrape(pool)
        while found is not None:
            if KV_USAGE in found:
                gauges[KV_USAGE] = max(found[KV_USAGE], gauges.get(KV_USAGE, 0.0))
            await asyncio.sleep(_SCRAPE_EVERY_S)
            found = await scrape(pool) or {}
    finally:
        await pool.close()
