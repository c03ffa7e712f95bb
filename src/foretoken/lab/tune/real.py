"""A server under test that is started from its command and asked over HTTP.

One start answers at all loads, since starting is what takes time. Requests of one turn and load are
the same for every setting. On a server so slow that whole answers would leave no time to compare,
the first visit finds where to cut them, for all visits alike. A setting with which the server does
not start, or fails requests, is told as a problem; plain decoding has to work.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

from foretoken.errors import EndpointError
from foretoken.lab.http.client import Client
from foretoken.lab.http.timed import now
from foretoken.lab.measure.driving import LoadRun, drive, run_to_end
from foretoken.lab.measure.experiment import ArmConfig
from foretoken.lab.measure.servers import serving
from foretoken.lab.measure.workload import Item, Load, take
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.records.run_files import REQUESTS, LineWriter
from foretoken.lab.tune.settings import Setting
from foretoken.lab.tune.visits import Answered, LoadSeen, Visit, summarize_load

MOST_FAILED = 0.05
WARM_UP = 4
ALONE = 3
"""Short requests one after the other that a search begins with, of which one may stand still."""
LONG = 4.0
"""Prompts are told apart by length where the longest tenth are so many times the shortest."""

WANTED_VISITS = 16
"""Of a search: one turn, and the fewest pairs that can prove anything."""
ASKING_SHARE = 1 / 40
"""Of the budget that a visit may ask for, however long a start takes."""
LEAST_TOKENS = 16
"""Answers are cut no shorter; also the length of those that find out how fast a server is."""

Line = Callable[[Setting], str]


@final
class StartedServer:
    """A ServerUnderTest with a process of its own for each visit."""

    def __init__(
        self,
        line: Line,
        items: Sequence[Item],
        out: Path,
        *,
        budget_s: float = math.inf,
        most_tokens: int | None = None,
    ) -> None:
        """Visits write their requests and the server's log below `out`.

        `most_tokens` is where earlier visits cut answers (0: nowhere); None: to be found out, so
        that visits enough fit into `budget_s`.
        """
        self._line, self._items, self._out = line, list(items), out
        self._budget_s, self._most_tokens = budget_s, most_tokens
        self._kinds = kinds_of(items)
        self.watch: Callable[[int, int, int], None] = lambda load, done, requests: None
        """Told of the requests that have ended at a load."""

    def visit(self, setting: Setting, turn: int, sizes: Sequence[tuple[int, int]]) -> Visit:
        """Start the server, ask, and stop it.

        Raises:
            EndpointError: plain decoding does not start, or does not answer.
        """
        began = now()
        try:
            visit = run_to_end(self._visit(setting, turn, sizes))
        except EndpointError as error:
            if setting.is_off:
                raise
            visit = Visit(setting=setting, turn=turn, problem=str(error))
        return replace(visit, seconds=now() - began)

    async def _visit(self, setting: Setting, turn: int, sizes: Sequence[tuple[int, int]]) -> Visit:
        began = now()
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in setting.name)
        arm = ArmConfig(name=setting.name, command=self._line(setting))
        seen: list[LoadSeen] = []
        with LineWriter(self._out / REQUESTS) as writer:
            async with serving(arm, self._out / "logs" / f"{name}.log") as client:
                warm = await self._ask(client, (setting, turn, WARM_UP, WARM_UP), began, None)
                if self._most_tokens is None:
                    left_s = time_to_ask(self._budget_s, now() - began)
                    alone = await self._ask(client, (setting, turn, 1, ALONE), began, None)
                    longest = max(item.max_tokens for item in self._items)
                    self._most_tokens = fitting(left_s, longest, sizes, (alone, warm))
                start_s = now() - began
                # Whatever comes first finds a colder server: loads change places by turn.
                for load, requests in sizes if turn % 2 else sizes[::-1]:
                    asked = (setting, turn, load, requests)
                    seen.append(await self._ask(client, asked, began, writer))
        problem = next((self._failed(one) for one in seen if self._failed(one)), "")
        if problem and setting.is_off:
            raise EndpointError(f"without speculation {problem}")
        return Visit(
            setting=setting,
            turn=turn,
            loads=tuple(sorted(seen, key=lambda one: one.load)),
            start_s=start_s,
            problem=problem,
            most_tokens=self._most_tokens,
        )

    async def _ask(
        self,
        client: Client,
        asked: tuple[Setting, int, int, int],
        began: float,
        writer: LineWriter | None,
    ) -> LoadSeen:
        setting, turn, load, requests = asked
        records: list[RequestRecord] = []
        warm_up = writer is None
        first = len(self._items) - requests if warm_up else turn * requests
        items = take(self._items, requests, max(first, 0))
        most = LEAST_TOKENS if self._most_tokens is None else self._most_tokens
        if most:
            items = [replace(item, max_tokens=min(item.max_tokens, most)) for item in items]

        def done(record: RequestRecord) -> None:
            records.append(record)
            if writer is not None:
                writer.write(record)
                self.watch(load, len(records), requests)

        run = LoadRun(
            arm=setting.name,
            block=turn,
            load=Load(concurrency=load),
            warm_up=warm_up,
            start_s=began,
        )
        seconds = await drive(client, items, run, done)
        answers = [
            Answered(self._kind(record), record.e2e_s, record.output_tokens or 0)
            for record in records
            if record.ok
        ]
        failed = [record for record in records if not record.ok]
        if failed and warm_up and len(failed) == len(records):
            raise EndpointError(f"no request was answered: {failed[0].error}")
        return summarize_load(load, answers, failed=len(failed), seconds=seconds)

    def _kind(self, record: RequestRecord) -> str:
        return self._kinds.get(record.index % len(self._items), "")

    @staticmethod
    def _failed(seen: LoadSeen) -> str:
        asked = seen.requests + seen.failed
        if seen.failed <= MOST_FAILED * asked:
            return ""
        return f"{seen.failed} of {asked} requests failed with {seen.load} in flight"


def time_to_ask(budget_s: float, start_s: float) -> float:
    """Seconds that one visit may ask for, of a server that takes `start_s` to start."""
    return max(budget_s / WANTED_VISITS - start_s, budget_s * ASKING_SHARE)


def fitting(
    left_s: float,
    longest: int,
    sizes: Sequence[tuple[int, int]],
    seen: tuple[LoadSeen, LoadSeen],
) -> int:
    """Where answers have to be cut for `sizes` (load, requests) to take `left_s`; 0: nowhere.

    `seen` is how fast the server answered one request alone, and several at once; more at once
    are taken to be answered no faster in all. Several are no slower in all than one: where they
    were, the machine stood still.
    """
    rates = [one.load / one.pace_s for one in seen if one.pace_s > 0.0]
    if not rates:
        return 0
    most, more = max(one.load for one in seen), max(rates) - rates[0]
    each_s = sum(
        requests / (rates[0] + more * (min(load, most) - 1) / max(most - 1, 1))
        for load, requests in sizes
    )
    fit = left_s / each_s
    return 0 if fit >= longest or longest <= LEAST_TOKENS else max(int(fit), LEAST_TOKENS)


def kinds_of(items: Sequence[Item]) -> Mapping[int, str]:
    """Class and context of each item, in words; empty where all are alike."""
    lengths = [_length(item) for item in items]
    ordered = sorted(lengths)
    tenth = len(ordered) // 10
    differ = ordered[-1 - tenth] > LONG * max(ordered[tenth], 1)
    border = (ordered[tenth] * ordered[-1 - tenth]) ** 0.5
    kinds = {}
    for place, (item, length) in enumerate(zip(items, lengths, strict=True)):
        words = [item.category] if item.category else []
        if differ:
            words.append("long prompts" if length > border else "short prompts")
        kinds[place] = ", ".join(words)
    return kinds if len(set(kinds.values())) > 1 else dict.fromkeys(kinds, "")


def _length(item: Item) -> int:
    return len(item.prompt) + sum(len(str(said.get("content", ""))) for said in item.messages)
