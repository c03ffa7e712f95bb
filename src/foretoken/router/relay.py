"""One streamed request over the lives of several replicas, as a state machine without connections.

It keeps the output ids of each choice that the client has, and decides when a replica fails:

- the client has seen nothing: the whole request again, on any other replica
- it has seen something of a greedy or seeded request: behind it, on a replica of the same
  fingerprint, where the tokens come that would have come
- the same without a seed: behind it, on a replica of the same precision; other tokens may come than
  would have, of the same distribution, and the end says so
- there is no such replica, the deadline is over, or it failed too often: an end with the reason

A request that is refused for its own fault ends at once.

Invariants: each choice's tokens are delivered once, in order, without a gap; nothing of a choice
follows its finish reason; there is one `End`, and nothing after it. What replicas of earlier
attempts still say is unheard.
"""

from dataclasses import dataclass
from typing import assert_never, final

from foretoken.router.relay_messages import (
    Chunk,
    Deliver,
    End,
    Failed,
    Left,
    Outcome,
    Refused,
    RelayAction,
    RelayEvent,
    Restart,
    Routed,
    Seek,
)
from foretoken.router.view import ReplicaView, RouteNeeds

MOST_RESTARTS = 3
"""Of one request: one that kills whoever runs it takes no more than four replicas with it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedRequest:
    """What a relay has to know of a request."""

    choices: int = 1
    """How many outputs it has (`n`)."""
    repeatable: bool = True
    """Greedy or seeded: its tokens are a function of the request."""
    deadline: float
    """Nothing is begun again from then on; seconds of the clock that events are told with."""


@dataclass(slots=True)
class _Output:
    """One choice as the client has it."""

    token_ids: list[int]
    finish_reason: str | None = None

    @property
    def begun(self) -> bool:
        return bool(self.token_ids) or self.finish_reason is not None


@final
class Relay:
    """The state of one request."""

    def __init__(self, request: RelayedRequest) -> None:
        """Nothing was sent to anybody."""
        assert request.choices > 0, request.choices
        self._request = request
        self._outputs = [_Output([]) for _ in range(request.choices)]
        self._attempt = 0
        self._needs = RouteNeeds()
        self._replica: ReplicaView | None = None
        self._failed: frozenset[str] = frozenset()
        self._sent = 0
        self._restart = Restart.FIRST
        self._in_distribution = False
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether its `End` was given."""
        return self._ended

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        """Of each choice, the tokens that were delivered."""
        return [tuple(output.token_ids) for output in self._outputs]

    def begin(self) -> Seek:
        """The first thing to do."""
        assert self._attempt == 0, self._attempt
        self._attempt = 1
        return Seek(attempt=1, restart=Restart.FIRST, needs=self._needs, why="a new request")

    def handle(self, event: RelayEvent, now: float) -> tuple[RelayAction, ...]:
        """What is to be done about an event at the time `now`."""
        if self._ended:
            return ()
        if isinstance(event, Left):
            return (self._end(Outcome.ABANDONED, "the client left"),)
        if event.attempt != self._attempt:
            return ()
        if isinstance(event, Routed):
            return self._route(event)
        # Nobody was chosen for this attempt yet: nobody can have said anything.
        if self._replica is None:
            return ()
        if isinstance(event, Chunk):
            return self._take(event, now)
        if isinstance(event, Failed):
            return (self._fail(event.cause, now),)
        if isinstance(event, Refused):
            return (self._end(Outcome.FAILED, f"the request was refused: {event.cause}"),)
        assert_never(event)

    def _route(self, event: Routed) -> tuple[RelayAction, ...]:
        if self._replica is not None:
            return ()
        if event.replica is None:
            return (self._end(Outcome.FAILED, event.why or "no replica may serve it"),)
        assert self._needs.allows(event.replica), (self._needs, event.replica)
        self._replica = event.replica
        self._sent += 1
        return ()

    def _take(self, chunk: Chunk, now: float) -> tuple[RelayAction, ...]:
        """Pass on what is new of a chunk. A replica that says something that cannot be is treated
        as one that died: nothing of such a chunk is delivered."""
        if not 0 <= chunk.choice < len(self._outputs):
            return (self._fail(f"it sent choice {chunk.choice}", now),)
        output = self._outputs[chunk.choice]
        if output.finish_reason is not None:
            return ()
        known = len(output.token_ids) - chunk.position
        if known < 0 or chunk.position < 0:
            cause = f"it sent token {chunk.position} after {len(output.token_ids)}"
            return (self._fail(cause, now),)
        # What the client has already may come once more, and has to be the same.
        again = tuple(output.token_ids[chunk.position :][: len(chunk.token_ids)])
        short = chunk.finish_reason is not None and len(chunk.token_ids) < known
        if again != chunk.token_ids[:known] or short:
            return (self._fail("it contradicts what the client has", now),)
        fresh = chunk.token_ids[known:]
        if not fresh and chunk.finish_reason is None:
            return ()
        self._in_distribution |= bool(fresh) and self._restart is Restart.IN_DISTRIBUTION
        output.token_ids += fresh
        output.finish_reason = chunk.finish_reason
        deliver = Deliver(chunk.choice, fresh, chunk.finish_reason)
        if any(one.finish_reason is None for one in self._outputs):
            return (deliver,)
        return deliver, self._end(Outcome.COMPLETED, "every choice has finished")

    def _fail(self, cause: str, now: float) -> Seek | End:
        replica = self._replica
        assert replica is not None, self._attempt
        failure = f"replica {replica.replica_id} failed ({cause})"
        restarts = self._attempt - 1
        if now >= self._request.deadline:
            late_s = now - self._request.deadline
            why = f"{failure}, {late_s:.3g} s after the deadline"
            return self._end(Outcome.FAILED, why)
        if restarts >= MOST_RESTARTS:
            why = f"{failure}, after {restarts} restarts, which is the most"
            return self._end(Outcome.FAILED, why)
        self._replica = None
        self._attempt += 1
        self._failed |= {replica.replica_id}
        return self._seek(replica, failure)

    def _seek(self, replica: ReplicaView, failure: str) -> Seek:
        """The next attempt, after `replica` failed."""
        done = sum(len(output.token_ids) for output in self._outputs)
        outputs = {
            choice: tuple(output.token_ids)
            for choice, output in enumerate(self._outputs)
            if output.finish_reason is None
        }
        fingerprint = replica.fingerprint
        if not any(output.begun for output in self._outputs):
            self._restart, outputs = Restart.REPLAY, {}
            self._needs = RouteNeeds(without=self._failed)
            why = f"{failure} before its first token: the request goes elsewhere"
        elif self._request.repeatable:
            self._restart = Restart.EXACT
            self._needs = RouteNeeds(fingerprint=fingerprint, without=self._failed)
            why = f"{failure} after {done:,} tokens: the same tokens go on elsewhere"
        else:
            self._restart = Restart.IN_DISTRIBUTION
            self._needs = RouteNeeds(precision=fingerprint.precision, without=self._failed)
            why = f"{failure} after {done:,} tokens without a seed: it goes on in distribution"
        return Seek(
            attempt=self._attempt,
            restart=self._restart,
            needs=self._needs,
            outputs=outputs,
            why=why,
        )

    def _end(self, outcome: Outcome, why: str) -> End:
        self._ended = True
        return End(
            outcome=outcome, why=why, attempts=self._sent, in_distribution=self._in_distribution
        )
