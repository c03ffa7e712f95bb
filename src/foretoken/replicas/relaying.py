"""One client's request over the lives of several replicas: carries out what `router.relay` decides.

Invariants: an answer that has begun to go out is of one piece, whoever wrote which part; what a
replica sent after its last mark goes to nobody; every request to a replica is closed.

An attempt at one replica (`Upstream`) owns its connection and what is read from it: the whole of an
answer, or the events of a stream up to each mark (`server.replica_protocol.progress`). Whatever
breaks it off is a `ReplicaFailed`. `FrontMetrics` are the front's own, and those of every replica
with a label that names it; it knows the text that Prometheus scrapes, not what is in it.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar, final

import httpx
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from foretoken.replicas.members import Assigned, Members
from foretoken.router.choosing import Route
from foretoken.router.prompt import RoutedPrompt
from foretoken.router.relay import GivenUp, Relay, Restart, WrongProgress
from foretoken.router.view import ReplicaView
from foretoken.server.problems import Problem, draining
from foretoken.server.replica_protocol.progress import StreamProgress, read_mark
from foretoken.server.transport.events import DONE, Events

MOST_UNMARKED = 64 << 20
"""Bytes between two marks; a replica that sends more does not speak our language."""
_END = b"\n\n"
Result = TypeVar("Result")


class ReplicaFailed(Exception):
    """The replica died, hung, or broke off; caught by whoever sends the request elsewhere."""


class StreamPart(NamedTuple):
    """Events up to a mark, or behind the last one of a stream that came to its end."""

    events: bytes
    """As a client takes them; empty where there is nothing for it."""
    gained: list[StreamProgress] | None
    """What the mark says; None: there is none, and the events are an error."""


@final
class Upstream:
    """An open request; `close` it whatever happens."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self._url = url
        self._response: httpx.Response | None = None
        self._waiting: asyncio.Timeout | None = None
        self._lost = False
        self.forget: Callable[[], None] = lambda: None
        """Called when it is closed."""

    async def open(self, body: bytes, headers: dict[str, str]) -> httpx.Response:
        """Send the request; the head of the answer. Raises ReplicaFailed: there is none."""
        request = self._client.build_request("POST", self._url, content=body, headers=headers)
        self._response = await self._wait_for(self._client.send(request, stream=True))
        return self._response

    async def whole(self) -> bytes:
        """All of the answer. Raises ReplicaFailed: it broke off."""
        assert self._response is not None, "nothing was sent"
        return await self._wait_for(self._response.aread())

    async def parts(self) -> AsyncGenerator[StreamPart, None]:
        """The events of a stream; the last part has no mark. Raises ReplicaFailed: it broke off, or
        cannot be read."""
        assert self._response is not None, "nothing was sent"
        pieces = self._response.aiter_raw()
        waiting, whole = b"", bytearray()
        while True:
            piece = await self._wait_for(anext(pieces, None))
            if piece is None:
                raise ReplicaFailed("its stream ended in the middle")
            *events, waiting = (waiting + piece).split(_END)
            for event in events:
                try:
                    gained = read_mark(event)
                except ValueError as error:
                    raise ReplicaFailed(f"it sent a mark that is none ({error})") from error
                if gained is not None:
                    yield StreamPart(bytes(whole), gained)
                    whole.clear()
                elif event + _END == DONE:
                    yield StreamPart(bytes(whole), None)
                    return
                elif event != b":":  # an empty comment: it wanted to know whether we are there
                    whole += event + _END
            if len(whole) + len(waiting) > MOST_UNMARKED:
                raise ReplicaFailed(f"it sent {len(whole):,} bytes without a mark")

    def lose(self) -> None:
        """The replica is known to be gone: end the waiting for it."""
        self._lost = True
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Hang up; a replica that is still writing ends the request."""
        self.forget()
        if self._response is not None:
            with suppress(httpx.HTTPError, OSError):
                await self._response.aclose()

    async def _wait_for(self, work: Awaitable[Result]) -> Result:
        try:
            async with asyncio.timeout(0.0 if self._lost else None) as self._waiting:
                return await work
        except TimeoutError:
            raise ReplicaFailed("it does not answer any more") from None
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise ReplicaFailed(str(error) or type(error).__name__) from error
        finally:
            self._waiting = None


@final
class FrontMetrics:
    """What the front counts."""

    def __init__(self, prefix: str) -> None:
        self._registry = CollectorRegistry()
        self.http = Counter(
            f"{prefix}:front_http_responses",
            "Answers of the front by path and status.",
            ("path", "status"),
            registry=self._registry,
        )
        self._routes = Counter(
            f"{prefix}:routed_requests",
            "Requests that were sent to a replica, by what decided.",
            ("replica", "reason"),
            registry=self._registry,
        )
        self._hits = Counter(
            f"{prefix}:routed_known_tokens",
            "Prompt tokens that the chosen replicas were known to hold, estimated from text.",
            registry=self._registry,
        )
        self._restarts = Counter(
            f"{prefix}:request_restarts",
            "Requests that were begun again at another replica, by how.",
            ("how",),
            registry=self._registry,
        )
        self._replicas = Gauge(
            f"{prefix}:replicas", "Replicas that can be asked.", registry=self._registry
        )

    def count_route(self, route: Route) -> None:
        assert route.replica is not None, route
        self._routes.labels(route.replica.replica_id, str(route.reason)).inc()
        self._hits.inc(route.hit_tokens)

    def count_restart(self, how: Restart) -> None:
        self._restarts.labels(str(how)).inc()

    def render(self, pages: Mapping[str, str]) -> bytes:
        """What Prometheus scrapes: with the replicas' own pages, by their ids."""
        self._replicas.set(len(pages))
        merged = CollectorRegistry()
        merged.register(_Labelled(pages))
        return generate_latest(self._registry) + generate_latest(merged)


@final
class _Labelled(Collector):
    """The families of several pages, each once, with the label `replica`."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for replica_id, page in sorted(self._pages.items()):
            for family in text_string_to_metric_families(page):
                kept = found.get(family.name)
                if kept is None:
                    kept = Metric(family.name, family.documentation, family.type)
                    found[family.name] = kept
                for sample in family.samples:
                    labels = {"replica": replica_id, **sample.labels}
                    kept.add_sample(sample.name, labels, sample.value)
        return found.values()


logger = logging.getLogger("foretoken")

AGAIN = (429, 500, 502, 503)
"""Answers of a replica that another one may not give."""
_FAULTS = ("internal_server_error", "service_unavailable_error")
"""Kinds of errors within a stream that are the replica's fault."""
_RETURN_S = 60.0
"""How long a request that has lost its replica waits for one that can go on with it."""
_NOTE = b": the answer goes on at another replica, in distribution, as it brought no seed\n\n"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as the front sends it on."""

    request_id: str
    path: str
    body: bytes
    """A JSON object with at least one member, as the client wrote it."""
    headers: Mapping[str, str]
    prompt: RoutedPrompt
    choices: int
    repeatable: bool
    """Greedy or seeded."""
    deadline: float
    """Of the loop's clock: nothing is begun again from then on."""


@final
class RelayedRequests:
    """Those that are open; what a draining server waits for."""

    def __init__(self) -> None:
        self.open: set[RelayedAnswer] = set()

    @property
    def num_open(self) -> int:
        return len(self.open)

    def end_all(self) -> None:
        """End them; whoever reads one is told."""
        for one in list(self.open):
            one.end()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RelayParts:
    """What all requests of a front share."""

    members: Members
    client: httpx.AsyncClient
    metrics: FrontMetrics
    requests: RelayedRequests


@final
class RelayedAnswer:
    """The answer to one request; `close` it whatever happens."""

    def __init__(self, asked: Asked, around: RelayParts) -> None:
        self._asked = asked
        self._around = around
        self._relay = Relay(
            choices=asked.choices, repeatable=asked.repeatable, deadline=asked.deadline
        )
        self._upstream: Upstream | None = None
        self._replica: ReplicaView | None = None
        """That of the attempt."""
        self._assigned: Assigned | None = None
        self._refusal: Problem | None = None
        """What the last replica answered, if it could not take the request."""
        self._ending = False
        around.requests.open.add(self)

    async def whole(self) -> bytes:
        """An answer in one piece; a replica that fails has written for nobody. Raises Problem: it
        was refused, or no replica could give it."""
        while True:
            upstream = await self.begin()
            try:
                answer = await upstream.whole()
                self._leave()
                return answer
            except ReplicaFailed as failure:
                await self._fail(str(failure))

    async def events(self) -> Events:
        """The events of a stream that has begun. Raises Problem: no replica could go on with it, or
        the server is going away."""
        while True:
            assert self._upstream is not None, "begun before"
            try:
                async with aclosing(self._upstream.parts()) as parts:
                    async for events, gained in parts:
                        if gained is not None:
                            self._take(gained)
                        else:
                            self._check_end(events)
                            self._leave()
                        if events:
                            yield events
                        if gained is None:
                            return
            except ReplicaFailed as failure:
                if self._relay.complete:
                    return  # all of it had been delivered
                await self._fail(str(failure))
            if self._relay.seek.restart is Restart.IN_DISTRIBUTION:
                yield _NOTE
            await self._go_on()

    def end(self) -> None:
        """The server goes away, and the time of what it had taken is over."""
        self._ending = True
        if self._upstream is not None:
            self._upstream.lose()

    async def close(self) -> None:
        self._leave()
        self._around.requests.open.discard(self)
        if self._upstream is not None:
            await self._upstream.close()

    def _leave(self) -> None:
        """The replica has nothing more to do with it."""
        if self._assigned is not None:
            self._assigned.end()

    async def begin(self) -> Upstream:
        """Send it to replicas until one takes it, which begins to answer. Raises Problem: it was
        refused, or no replica could take it."""
        while True:
            upstream = await self._route()
            try:
                response = await upstream.open(self._body(), dict(self._asked.headers))
                if response.status_code == 200:
                    self._refusal = None
                    return upstream
                refusal = problem_from(response, await upstream.whole())
            except ReplicaFailed as failure:
                self._refusal = None
                await self._fail(str(failure))
                continue
            if response.status_code not in AGAIN:
                assert self._assigned is not None, "asked somebody"
                self._assigned.refuse()
                raise refusal
            self._refusal = refusal
            await self._fail(f"it answered {response.status_code}")

    async def _go_on(self) -> None:
        """Have another replica take a stream that has begun."""
        try:
            await self.begin()
        except Problem as problem:
            if problem.status >= 500:
                raise
            logger.error("request %s cannot go on: %s", self._asked.request_id, problem.message)
            raise Problem(500, "the answer broke off, and no replica could go on with it") from None

    async def _route(self) -> Upstream:
        """Choose a replica for the attempt, waiting for one if one was lost."""
        seek, members = self._relay.seek, self._around.members
        until = min(_now() + _RETURN_S, self._asked.deadline)
        waits = seek.restart is not Restart.FIRST and self._refusal is None
        assigned = members.choose(self._asked.prompt, seek.needs)
        while assigned.route.replica is None and waits and not self._ending:
            waits = await members.changed(until)
            assigned = members.choose(self._asked.prompt, seek.needs)
        self._assigned, self._replica = assigned, assigned.route.replica
        if self._replica is None:
            self._give_up(assigned.route.why)
        self._around.metrics.count_route(assigned.route)
        replica_id = self._replica.replica_id
        url = f"{members.url(replica_id)}{self._asked.path}"
        self._upstream = upstream = Upstream(self._around.client, url)
        upstream.forget = members.listen(replica_id, upstream.lose)
        return upstream

    def _body(self) -> bytes:
        """The client's, with what it has already of each choice."""
        if not self._relay.begun:
            return self._asked.body
        resume = [{"output_ids": ids, "ended": ended} for ids, ended in self._relay.outputs]
        beginning = self._asked.body.rstrip().removesuffix(b"}")
        return beginning + b',"resume":' + json.dumps(resume).encode() + b"}"

    def _take(self, gained: list[StreamProgress]) -> None:
        assert self._assigned is not None, "somebody sent it"
        self._assigned.settle()
        try:
            self._relay.take(gained)
        except WrongProgress as error:
            raise ReplicaFailed(str(error)) from error

    def _check_end(self, events: bytes) -> None:
        """Raise a ReplicaFailed for an end that another replica can put off."""
        if not events and not self._relay.complete:
            raise ReplicaFailed("its stream ended too early")
        if events:
            error = _error_in(events)
            if error.get("type") in _FAULTS:
                raise ReplicaFailed(str(error.get("message")))

    async def _fail(self, cause: str) -> None:
        """The replica failed: find out what to do next. Raises Problem: nothing can be done."""
        assert self._upstream is not None and self._replica is not None, "sent to somebody"
        self._leave()
        await self._upstream.close()
        if self._ending:
            raise draining()
        if self._refusal is None:
            self._around.members.doubt(self._replica.replica_id)
        try:
            seek = self._relay.fail(self._replica, cause, _now())
        except GivenUp as reason:
            self._give_up(str(reason))
        self._around.metrics.count_restart(seek.restart)
        logger.warning("request %s: %s", self._asked.request_id, seek.why)

    def _give_up(self, why: str) -> NoReturn:
        logger.error("request %s has failed: %s", self._asked.request_id, why)
        if self._refusal is not None:
            raise self._refusal
        if self._ending:
            raise draining()
        raise nobody()


def nobody() -> Problem:
    """No replica can be asked."""
    headers = {"retry-after": "5"}
    return Problem(503, "no replica can answer just now", code="no_replica", headers=headers)


def problem_from(response: httpx.Response, body: bytes) -> Problem:
    """A replica's error as the front's own."""
    error = _error_in(b"data: " + body)
    code = error.get("code")
    kept = {name: response.headers[name] for name in ("retry-after",) if name in response.headers}
    return Problem(
        response.status_code,
        str(error.get("message", f"a replica answered {response.status_code}")),
        error.get("param"),
        code=code if isinstance(code, str) else None,
        headers=kept,
    )


def _error_in(event: bytes) -> dict[str, Any]:
    """The error that an event carries; nothing if it is no error as we write them."""
    try:
        found = json.loads(event.partition(b"data: ")[2])["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _now() -> float:
    return asyncio.get_running_loop().time()
