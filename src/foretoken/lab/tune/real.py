"""A server under test that is started from its command and asked over HTTP, and its visits on disk.

One start answers at all loads, since starting is what takes time. Requests of one turn and load are
the same for every setting. On a server so slow that whole answers would leave no time to compare,
the first visit finds where to cut them, for all visits alike. A setting with which the server does
not start, or fails requests, is told as a problem; plain decoding has to work. A visit is a line of
`visits.jsonl`, written whole when it has ended: a search that was killed goes on after the last.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError, EndpointError
from foretoken.lab.http.client import Client
from foretoken.lab.http.timed import now
from foretoken.lab.measure.driving import LoadRun, drive, run_to_end
from foretoken.lab.measure.experiment import ArmConfig
from foretoken.lab.measure.segments import CONFIG, TAKEN, require_same_settings
from foretoken.lab.measure.servers import serving
from foretoken.lab.measure.workload import Item, Load, take
from foretoken.lab.plain import from_plain
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.records.run_files import REQUESTS, LineWriter, read_lines, write_json
from foretoken.lab.tune.settings import (
    Answered,
    LoadSeen,
    NextVisit,
    Setting,
    Visit,
    summarize_load,
)

VISITS = "visits.jsonl"
MOST_FAILED = 0.05
WARM_UP = 4
LONG = 4.0
"""Prompts are told apart by length in powers of it."""
WANTED_VISITS = 16
"""Of a search: one turn, and the fewest pairs that can prove anything."""
ASKING_SHARE = 1 / 40
"""Of the budget that a visit may ask for, however long a start takes."""
LEAST_TOKENS = 16
"""Answers are cut no shorter; also the length of those that find out how fast a server is."""


class StartedServer:
    """A server with a process of its own for each visit."""

    def __init__(
        self,
        line: Callable[[Setting], str],
        items: Sequence[Item],
        out: Path,
        *,
        budget_s: float = math.inf,
        most_tokens: int | None = None,
    ) -> None:
        """Visits write their requests and the server's log below `out`; `line` writes commands.
        `most_tokens` is where earlier visits cut answers (0: nowhere); None: to be found out, so
        that visits enough fit into `budget_s`."""
        self._line, self._items, self._out = line, list(items), out
        self._budget_s, self._most_tokens = budget_s, most_tokens
        self._kinds = []
        for item in items:  # alike are requests of a class whose prompts are roughly as long
            length = len(item.prompt) + sum(len(str(m.get("content", ""))) for m in item.messages)
            self._kinds.append(f"{item.category} {int(math.log(length + 1, LONG))}")

    def visit(self, wanted: NextVisit) -> Visit:
        """Start the server, ask, and stop it. A setting that it cannot run with comes back with the
        problem. Raises EndpointError: plain decoding does not start, or does not answer."""
        began = now()
        try:
            visit = run_to_end(self._visit(wanted))
        except EndpointError as error:
            if wanted.setting.is_off:
                raise
            visit = Visit(setting=wanted.setting, turn=wanted.turn, problem=str(error))
        return replace(visit, check=wanted.check, seconds=now() - began)

    async def _visit(self, wanted: NextVisit) -> Visit:
        began, setting = now(), wanted.setting
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in setting.name)
        arm = ArmConfig(name=setting.name, command=self._line(setting))
        with LineWriter(self._out / REQUESTS) as writer:
            async with serving(arm, self._out / "logs" / f"{name}.log") as client:
                run = LoadRun(arm=setting.name, block=wanted.turn, load=Load(), start_s=began)
                warm = await self._ask(client, run, (WARM_UP, WARM_UP))
                if self._most_tokens is None:
                    left_s = time_to_ask(self._budget_s, now() - began)
                    again = await self._ask(client, run, (WARM_UP, WARM_UP))
                    longest = max(item.max_tokens for item in self._items)
                    paces_s = (warm.pace_s, again.pace_s)
                    self._most_tokens = fitting(left_s, longest, wanted.sizes, paces_s)
                start_s = now() - began
                # Whatever comes first finds a colder server: loads change places by turn.
                order = wanted.sizes if wanted.turn % 2 else wanted.sizes[::-1]
                seen = [await self._ask(client, run, size, writer) for size in order]
        lost = [one for one in seen if one.failed > MOST_FAILED * (one.requests + one.failed)]
        problem = ""
        for one in lost[:1]:
            told = one.requests + one.failed
            problem = f"{one.failed} of {told} requests failed with {one.load} in flight"
        if problem and setting.is_off:
            raise EndpointError(f"without speculation {problem}")
        return Visit(
            setting=setting,
            turn=wanted.turn,
            loads=tuple(sorted(seen, key=lambda one: one.load)),
            start_s=start_s,
            problem=problem,
            most_tokens=self._most_tokens,
        )

    async def _ask(
        self, client: Client, run: LoadRun, size: tuple[int, int], writer: LineWriter | None = None
    ) -> LoadSeen:
        """Requests of a `size`, (load, requests): those of the turn, or, without a writer, the last
        ones to warm up."""
        load, requests = size
        warm_up = writer is None
        first = max(len(self._items) - requests, 0) if warm_up else run.block * requests
        items = take(self._items, requests, first)
        most = LEAST_TOKENS if self._most_tokens is None else self._most_tokens
        if most:
            items = [replace(item, max_tokens=min(item.max_tokens, most)) for item in items]
        records: list[RequestRecord] = []

        def done(record: RequestRecord) -> None:
            records.append(record)
            if writer is not None:
                writer.write(record)

        run = replace(run, load=Load(concurrency=load), warm_up=warm_up)
        seconds = await drive(client, items, run, done)
        answers = [
            Answered(self._kinds[one.index % len(self._items)], one.e2e_s, one.output_tokens or 0)
            for one in records
            if one.ok
        ]
        failed = [record for record in records if not record.ok]
        if warm_up and not answers:
            raise EndpointError(f"no request was answered: {failed[0].error}")
        return summarize_load(load, answers, failed=len(failed), seconds=seconds)


def time_to_ask(budget_s: float, start_s: float) -> float:
    """Seconds that one visit may ask for, of a server that takes `start_s` to start."""
    return max(budget_s / WANTED_VISITS - start_s, budget_s * ASKING_SHARE)


def fitting(
    left_s: float, longest: int, sizes: Sequence[tuple[int, int]], paces_s: Sequence[float]
) -> int:
    """Where answers have to be cut for `sizes` (load, requests) to take `left_s`; 0: nowhere.
    `paces_s` are seconds per token with WARM_UP in flight, of which the least counts: at the others
    the machine may have stood still. More at once are taken to be answered no faster in all, fewer
    as fast each."""
    pace_s = min((one for one in paces_s if one > 0.0), default=0.0)
    token_s = pace_s * sum(requests / min(load, WARM_UP) for load, requests in sizes)
    if not token_s or left_s / token_s >= longest or longest <= LEAST_TOKENS:
        return 0
    return max(int(left_s / token_s), LEAST_TOKENS)


class Journal:
    """The visits of a search, on disk as they end."""

    def __init__(self, folder: Path, settings: Any, *, resume: bool) -> None:
        """Begin, or with `resume` go on with what is there. Raises ConfigError: there is a search
        already and `resume` is not set, or its settings were others."""
        self.folder = folder
        path = folder / VISITS
        self.visits = [
            from_plain(Visit, value, f"{path}:{number}") for number, value in read_lines(path)
        ]
        if self.visits and not resume:
            raise ConfigError("--out", str(folder), TAKEN)
        if self.visits:
            # More time is a reason to go on; everything else would change what was measured.
            require_same_settings(folder, settings, but="budget_s")
        write_json(folder / CONFIG, settings)
        self._file = LineWriter.within(folder, VISITS)

    def add(self, visit: Visit) -> None:
        """Keep a visit that has ended. Raises ConfigError: the disk is full."""
        try:
            self._file.write(visit)
        except OSError as error:
            allowed = f"a disk with room ({error}); --resume goes on from here"
            raise ConfigError("--out", str(self.folder), allowed) from error
        self.visits.append(visit)

    def close(self) -> None:
        self._file.close()
