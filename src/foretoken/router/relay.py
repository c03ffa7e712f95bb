"""One streamed request over the lives of several replicas, as a state machine without connections.

It keeps the output ids of each choice that the client has, and decides when a replica fails:

- the client has seen nothing: the whole request again, on any other replica
- it has seen something of a greedy or seeded request: behind it, on a replica of the same
  fingerprint, where the tokens come that would have come
- the same without a seed: behind it, on a replica of the same precision; other tokens may come than
  would have, of the same distribution
- the deadline is over, or it failed too often: an end with the reason

Whoever holds the connections chooses the replicas, and takes what they say one after the other.
Invariant: nothing of a choice follows its finish reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import final

from foretoken.router.view import ReplicaView, RouteNeeds

MOST_RESTARTS = 3
"""Of one request: one that kills whoever runs it takes no more than four replicas with it."""


class Restart(StrEnum):
    """How an attempt begins."""

    FIRST = "first"
    REPLAY = "replay"
    """The whole request again: the client has seen nothing of it."""
    EXACT = "exact"
    """Behind what the client has seen; the same tokens come that would have come."""
    IN_DISTRIBUTION = "in distribution"
    """Behind what the client has seen; other tokens may come, of the same distribution."""


@final
@dataclass(frozen=True, slots=True)
class Seek:
    """An attempt for which a replica is to be chosen."""

    restart: Restart
    needs: RouteNeeds
    why: str
    """One sentence for the log."""


class GivenUp(Exception):
    """No other replica is asked; the message is the reason."""


class WrongProgress(Exception):
    """A replica said something that cannot be."""


@dataclass(slots=True)
class _Output:
    """One choice as the client has it."""

    token_ids: list[int] = field(default_factory=list)
    ended: bool = False


@final
class Relay:
    """The state of one request."""

    def __init__(self, *, choices: int, repeatable: bool, deadline: float) -> None:
        """Nothing was sent to anybody.

        Args:
            choices: outputs that it has (`n`, of each prompt).
            repeatable: greedy or seeded: its tokens are a function of the request.
            deadline: nothing is begun again from then on; seconds of the clock of `fail`.
        """
        assert choices > 0, choices
        self._repeatable, self._deadline = repeatable, deadline
        self._outputs = [_Output() for _ in range(choices)]
        self._failed: frozenset[str] = frozenset()
        self.seek = Seek(Restart.FIRST, RouteNeeds(), "a new request")
        """The attempt that is due, or under way."""

    @property
    def begun(self) -> bool:
        return any(output.token_ids or output.ended for output in self._outputs)

    @property
    def complete(self) -> bool:
        return all(output.ended for output in self._outputs)

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], bool]]:
        """Of each choice, the tokens that were delivered, and whether it has ended."""
        return [(tuple(output.token_ids), output.ended) for output in self._outputs]

    def take(self, gained: Sequence[tuple[int, tuple[int, ...], str | None]]) -> None:
        """Tokens that the client is about to be sent: choices, their new ids and finish reasons.

        Raises:
            WrongProgress: it is of a choice that there is not, or that has ended; nothing of it
                counts.
        """
        left = {choice for choice, output in enumerate(self._outputs) if not output.ended}
        for choice, _, finish_reason in gained:
            if choice not in left:
                raise WrongProgress(f"it sent something of choice {choice}")
            if finish_reason is not None:
                left.remove(choice)
        for choice, token_ids, finish_reason in gained:
            self._outputs[choice].token_ids += token_ids
            self._outputs[choice].ended = finish_reason is not None

    def fail(self, replica: ReplicaView, cause: str, now: float) -> Seek:
        """The next attempt, after this replica died, hung, broke off or refused. Raises GivenUp:
        there is none."""
        assert self.seek.needs.allows(replica), (self.seek.needs, replica)
        failure, restarts = f"replica {replica.replica_id} failed ({cause})", len(self._failed)
        if now >= self._deadline:
            raise GivenUp(f"{failure}, {now - self._deadline:.3g} s after the deadline")
        if restarts >= MOST_RESTARTS:
            raise GivenUp(f"{failure}, after {restarts} restarts, which is the most")
        self._failed |= {replica.replica_id}
        done = sum(len(output.token_ids) for output in self._outputs)
        if not self.begun:
            restart, needs = Restart.REPLAY, RouteNeeds(without=self._failed)
            why = f"{failure} before its first token: the request goes elsewhere"
        elif self._repeatable:
            restart = Restart.EXACT
            needs = RouteNeeds(fingerprint=replica.fingerprint, without=self._failed)
            why = f"{failure} after {done:,} tokens: the same tokens go on elsewhere"
        else:
            restart = Restart.IN_DISTRIBUTION
            needs = RouteNeeds(precision=replica.fingerprint.precision, without=self._failed)
            why = f"{failure} after {done:,} tokens without a seed: it goes on in distribution"
        self.seek = Seek(restart, needs, why)
        return self.seek
