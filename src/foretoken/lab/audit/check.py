"""What a check is: one sentence, and one look at one answer or more.

A look at a server's answers to a case ends in one of few ways. `wrong`: no right server answers so.
`differs`: another answer was expected, which rounding may explain. `fine`. `unasked`: the server
cannot be asked. The same looks at the server without speculation tell what is usual: `judging`
compares both.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from foretoken.lab.audit.asking import Asker, Case
from foretoken.lab.audit.replies import Reply

Sort = Literal["fine", "differs", "wrong", "unasked", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How one look ended."""

    sort: Sort
    why: str = ""
    """What was seen, where it is not fine."""
    score: float | None = None
    """A number whose mean is to be the same with and without speculation."""


FINE = Look(sort="fine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Who is looked at, and what it is compared with."""

    arm: Asker
    plain: Asker | None
    """Without speculation; None: nobody gave one. The arm itself, where plain decoding is compared
    with itself."""
    tie: float
    """Log-probabilities this close may turn with rounding."""
    same_seeds: bool = False
    """Whether seeded answers are promised to be those of plain decoding."""

    @property
    def control(self) -> bool:
        """Whether plain decoding is compared with itself."""
        return self.arm is self.plain


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCheck:
    """One thing that is looked at."""

    name: str
    sentence: str
    look: Callable[[Sides, Case], Awaitable[Look]] | None = None
    """Asks about a case; None for a check that only reads."""
    read: Callable[[Reply], Look] | None = None
    """Reads any reply that other checks got."""
    answers: int = 1
    """Answers that a look asks each server for, about."""
    each: float = 1.0
    """What one of them takes, in greedy answers; measured on the packaged server."""
    reads_greedy: bool = False
    """Whether it looks at greedy answers, which are asked for once for all that do."""


def unanswered(*replies: Reply) -> Look | None:
    """The look at replies of which one is missing; None if all are there."""
    for reply in replies:
        if reply.refused is not None:
            return Look(sort="unasked", why=reply.refused)
        if reply.error is not None:
            return Look(sort="failed", why=reply.error)
    return None


NO_PLAIN = Look(sort="unasked", why="it needs a server without speculation: give --baseline")
