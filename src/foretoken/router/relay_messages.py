"""What a relay is told, and what it says is to be done.

Events come from whoever holds the connections: a replica was chosen, said something, or failed; the
client left. Actions are theirs to carry out, in the order in which they are given.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import final

from foretoken.router.view import ReplicaView, RouteNeeds


class Restart(StrEnum):
    """How an attempt begins."""

    FIRST = "first"
    """The first attempt."""
    REPLAY = "replay"
    """The whole request again: the client has seen nothing of it."""
    EXACT = "exact"
    """Behind what the client has seen; the same tokens come that would have come."""
    IN_DISTRIBUTION = "in distribution"
    """Behind what the client has seen; other tokens may come, of the same distribution."""


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"
    """The client left."""


@final
@dataclass(frozen=True, slots=True)
class Routed:
    """Event: a replica was chosen for an attempt; None: there is none."""

    attempt: int
    replica: ReplicaView | None
    why: str = ""
    """The route's reason; shown where there is no replica."""


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """Event: a replica sent tokens of a choice, or its end, or both."""

    attempt: int
    choice: int
    position: int
    """How many output tokens of the choice come before these, earlier attempts' included."""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None


@final
@dataclass(frozen=True, slots=True)
class Failed:
    """Event: the replica of an attempt died, hung, ended its stream too early, or hands over."""

    attempt: int
    cause: str


@final
@dataclass(frozen=True, slots=True)
class Refused:
    """Event: the replica of an attempt says that the request is wrong, so others would too."""

    attempt: int
    cause: str


@final
@dataclass(frozen=True, slots=True)
class Left:
    """Event: the client is gone."""


RelayEvent = Routed | Chunk | Failed | Refused | Left


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Seek:
    """Action: choose a replica, report it as `Routed`, and send it the request."""

    attempt: int
    restart: Restart
    needs: RouteNeeds
    outputs: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Of each choice that is to be continued, the tokens that the client has; empty: all choices
    from their beginning."""
    why: str
    """One sentence for the log."""


@final
@dataclass(frozen=True, slots=True)
class Deliver:
    """Action: send the client these tokens of a choice, and its end where there is a reason."""

    choice: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Action: the last one of a request; close what is open."""

    outcome: Outcome
    why: str
    attempts: int
    """Replicas that it was sent to."""
    in_distribution: bool = False
    """Some delivered tokens are not those that an undisturbed run would have had."""


RelayAction = Seek | Deliver | End
