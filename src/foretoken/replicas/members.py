"""The replicas that there are, as they last said of themselves, and what they are known to hold.

Each is asked four times a second. One that does not answer is not chosen, and is lost after
`LOST_S`: whoever reads from it is told, since a machine that is gone closes no connection. The same
holds for one whose engine has not ended a step for `STALLED_S`. A lost replica comes back, with
nothing known of it, if it answers again. Knows no requests and no Ray.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import fmean
from typing import NamedTuple, final

import httpx
from pydantic import ValidationError

from foretoken.router.choosing import Route, choose
from foretoken.router.prefix_index import PrefixIndex
from foretoken.router.prompt import RoutedPrompt
from foretoken.router.view import ReplicaView, RouteNeeds
from foretoken.server.replica_protocol.origin import INTERNAL_HEADER
from foretoken.server.replica_protocol.pace import Paces
from foretoken.server.replica_protocol.report import PATH, Report

logger = logging.getLogger("foretoken")

ASKED_EVERY_S = 0.25
FOUND_EVERY_S = 0.5
LOST_S = 10.0
STALLED_S = 60.0
_ANSWER_S = 5.0
MOST_PAGES = 1 << 16
"""Pages of a replica whose names are remembered: 2 M tokens."""


@final
@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Where a replica listens."""

    replica_id: str
    """Of one start."""
    url: str


Directory = Callable[[], Awaitable[Sequence[ReplicaPlace]]]
"""Says which replicas have been started; may name some that are gone."""


@final
@dataclass(slots=True)
class _Member:
    place: ReplicaPlace
    asking: "asyncio.Task[None] | None" = None
    report: Report | None = None
    well: bool = False
    """Whether it may be chosen: it answered when it was asked last."""
    given: dict[int, int] = field(default_factory=dict)
    """Prompt tokens to compute of requests that it was given since it reported, by a number."""
    open: set[int] = field(default_factory=set)
    """Requests that it has not ended."""
    reported: frozenset[int] = frozenset()
    """Those that it had when it reported. Some may have ended since: else whoever asks again at
    once would find a replica busy with the answer that he has just read."""
    well_at: float = field(default_factory=time.monotonic)
    listeners: set[Callable[[], None]] = field(default_factory=set)
    """Called when it is lost."""

    def view(self, all_paces: Mapping[tuple[str, str, str], Paces]) -> ReplicaView | None:
        """As it reported, with what it was given since; None: it is not to be chosen just now."""
        if self.report is None or not self.well:
            return None
        ended = len(self.reported - self.open)
        paces = all_paces[self.report.fingerprint]
        paces = paces._replace(step_s=self.report.paces.step_s or paces.step_s)
        view = self.report.view(self.place.replica_id, paces, ended)
        for missing_tokens in self.given.values():
            view = view.given(missing_tokens)
        return view

    def take(self, report: Report) -> None:
        """It answered: what it was given until now is in what it says."""
        self.report, self.well_at, self.well = report, time.monotonic(), True
        self.given.clear()
        self.reported = frozenset(self.open)

    def settle(self, number: int) -> None:
        """A request has been begun, or will not be."""
        self.given.pop(number, None)

    def end(self, number: int) -> None:
        """A request has ended, or was never begun."""
        self.settle(number)
        self.open.discard(number)


@final
class Assigned(NamedTuple):
    """Where a request goes."""

    route: Route
    settle: Callable[[], None] = lambda: None
    """To be called when it has begun to answer, or will not: then it is no load beyond what the
    replica reports. More than once is fine."""
    end: Callable[[], None] = lambda: None
    """To be called when the replica has nothing more to do with it. More than once is fine."""
    refuse: Callable[[], None] = lambda: None
    """To be called when it was refused for its own fault: its prompt was not computed."""


@final
class Members:
    """Who may be asked. Belongs to the loop."""

    def __init__(self, directory: Directory, client: httpx.AsyncClient, internal_key: str) -> None:
        self._directory = directory
        self._client = client
        self._headers = {INTERNAL_HEADER: internal_key}
        self._members: dict[str, _Member] = {}
        self._index = PrefixIndex(MOST_PAGES)
        self._numbers = count()
        self._heard = asyncio.Event()
        """Set and renewed whenever there may be one more to choose."""

    @property
    def views(self) -> list[ReplicaView]:
        """Of those that can be asked."""
        members = self._members.values()
        paces = _all_paces([one.report for one in members if one.report is not None])
        views = (one.view(paces) for one in members)
        return [view for view in views if view is not None]

    def url(self, replica_id: str) -> str | None:
        member = self._members.get(replica_id)
        return None if member is None else member.place.url

    def choose(self, prompt: RoutedPrompt, needs: RouteNeeds) -> Assigned:
        """A replica for a request, which counts as given to it until that is settled."""
        route = choose(prompt, self.views, self._index, needs)
        if route.replica is None:
            return Assigned(route)
        replica_id = route.replica.replica_id
        new = prompt.names[self._index.known(prompt.names).get(replica_id, 0) :]
        self._index.store(replica_id, prompt.names)
        member, number = self._members[replica_id], next(self._numbers)
        member.given[number] = prompt.tokens - route.hit_tokens
        member.open.add(number)
        return Assigned(
            route,
            settle=partial(member.settle, number),
            end=partial(member.end, number),
            refuse=partial(self._index.remove, replica_id, new),
        )

    def anyone(self, without: frozenset[str]) -> ReplicaView | None:
        """The same one as long as it is there, for what all would answer alike."""
        able = (view for view in self.views if view.replica_id not in without)
        return min(able, key=lambda view: (view.draining, view.replica_id), default=None)

    async def changed(self, deadline: float) -> bool:
        """Wait until there may be one more to choose; False: not before `deadline` (loop time)."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._heard.wait()
        except TimeoutError:
            return False
        return True

    def doubt(self, replica_id: str) -> None:
        """It failed somebody: it is not chosen before it has answered again."""
        member = self._members.get(replica_id)
        if member is not None:
            member.well = False

    def listen(self, replica_id: str, on_lost: Callable[[], None]) -> Callable[[], None]:
        """Have `on_lost` called if the replica is lost; the result ends that."""
        member = self._members.get(replica_id)
        if member is None:
            on_lost()
            return lambda: None
        member.listeners.add(on_lost)
        return lambda: member.listeners.discard(on_lost)

    async def run(self) -> None:
        """Look for replicas and ask each, until cancelled."""
        try:
            while True:
                await self._find()
                await asyncio.sleep(FOUND_EVERY_S)
        finally:
            for member in self._members.values():
                if member.asking is not None:
                    member.asking.cancel()

    async def _find(self) -> None:
        try:
            places = await self._directory()
        except Exception:
            logger.exception("the replicas cannot be listed")  # those known are still asked
            return
        for place in places:
            if place.replica_id not in self._members:
                member = _Member(place)
                self._members[place.replica_id] = member
                member.asking = asyncio.create_task(self._watch(member))

    async def _watch(self, member: _Member) -> None:
        """Ask one replica, until it is lost."""
        replica_id = member.place.replica_id
        while time.monotonic() - member.well_at < LOST_S:
            began = time.monotonic()
            report = await self._ask(member.place.url)
            if report is not None and report.stalled_s < STALLED_S:
                if member.report is None:
                    logger.info("replica %s is there", replica_id)
                    self._index.add(replica_id)
                member.take(report)
                self._heard.set()
                self._heard = asyncio.Event()
            elif member.well:
                member.well = False
                logger.warning("replica %s does not answer", replica_id)
            await asyncio.sleep(max(0.0, began + ASKED_EVERY_S - time.monotonic()))
        del self._members[replica_id]
        self._index.drop(replica_id)
        if member.report is not None:
            logger.error("replica %s is lost: no answer for %g s", replica_id, LOST_S)
        for on_lost in list(member.listeners):
            on_lost()

    async def _ask(self, url: str) -> Report | None:
        try:
            answer = await self._client.get(url + PATH, headers=self._headers, timeout=_ANSWER_S)
            return Report.model_validate_json(answer.content) if answer.is_success else None
        except (httpx.HTTPError, ValidationError):
            return None


def _all_paces(reports: Sequence[Report]) -> dict[tuple[str, str, str], Paces]:
    """What replicas of one fingerprint have measured, together: each has seen few requests, and one
    that has just been started none. Only how long its steps are depends on its own load."""
    means = {}
    for fingerprint in {report.fingerprint for report in reports}:
        alike = [report.paces for report in reports if report.fingerprint == fingerprint]
        means[fingerprint] = Paces(*map(_mean, zip(*alike, strict=True)))
    return means


def _mean(measured: Sequence[float]) -> float:
    """Of what was measured; 0 where nothing was."""
    found = [one for one in measured if one > 0.0]
    return fmean(found) if found else 0.0
