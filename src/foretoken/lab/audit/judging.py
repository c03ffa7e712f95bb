"""What a check is, and what its looks at a server come to beside the same looks at plain decoding.

A look at a server's answers to a case ends in one of few ways. `wrong`: no right server answers so.
`differs`: another answer was expected, which rounding may explain. `fine`. `unasked`: the server
cannot be asked. `failed`: no answer came.

A thing that no right server does is a fault at its first sight, unless plain decoding does it too.
What rounding may explain is compared in number (Fisher's exact test), scores in their mean (a
permutation test). What is only suspicious is looked at again with other prompts, several times as
many: a false alarm must be unlucky in numbers that nobody has seen before.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import Any, Literal

import numpy as np

from foretoken.lab.audit.asking import Asker, Case, Reply

ERROR = 0.00005
"""Chance of a false alarm of one comparison."""
_SUSPICIOUS = 0.3
"""Comparisons this unlikely are made again; of right servers' not many are."""
_PERMUTATIONS = 20_000

Sort = Literal["fine", "differs", "wrong", "unasked", "failed"]


@dataclass(frozen=True, slots=True)
class Look:
    """How one look ended."""

    sort: Sort
    why: str = ""
    """What was seen, where it is not fine."""
    score: float | None = None
    """A number whose mean is to be the same with and without speculation."""
    counts: tuple[int, int] = (0, 0)
    """Of a copy: identifiers that came altered, and all that were judged."""


FINE = Look("fine")


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
    samples: int = 200
    parameters: tuple[Mapping[str, Any], ...] = ()
    temperature: float = 0.7
    """Of drawn copies."""

    @property
    def control(self) -> bool:
        return self.arm is self.plain

    def as_plain(self) -> "Sides":
        """Plain decoding, to be held against itself."""
        assert self.plain is not None, "nobody gave one"
        return replace(self, arm=self.plain)


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """One thing that is looked at."""

    name: str
    sentence: str
    look: Callable[[Sides, Case], Awaitable[Look]] | None = None
    compare: Callable[[Sides, Sequence[Case]], Awaitable[list[Look]]] | None = None
    """Compares both servers by itself: `wrong` is what no chance explains."""
    read: Callable[[Reply], Look] | None = None
    """Reads any reply that other checks got."""
    answers: int = 0
    """Answers that a look asks each server for, about, greedy ones aside."""
    each: float = 1.0
    """What one of them takes, in greedy answers; measured on the packaged server."""
    comparisons: int = 0
    """Tests that it makes by itself, each with a false alarm as often as ERROR says."""
    reads_greedy: bool = False
    """Whether it looks at greedy answers, which are asked for once for all that do."""


class EndedLook(Exception):
    """A look that cannot go on, for want of an answer or of plain decoding."""

    def __init__(self, look: Look) -> None:
        self.look = look
        super().__init__(look.why)


def answered(*replies: Reply) -> None:
    """End the look if one of the replies is no answer."""
    for reply in replies:
        if reply.refused is not None:
            raise EndedLook(Look("unasked", reply.refused))
        if reply.error is not None:
            raise EndedLook(Look("failed", reply.error))


def plain_of(sides: Sides) -> Asker:
    """Plain decoding; without it the look ends."""
    if sides.plain is None:
        raise EndedLook(Look("unasked", "it needs a server without speculation: give --baseline"))
    return sides.plain


async def looks_at(
    look: Callable[[Sides, Case], Awaitable[Look]], sides: Sides, cases: Sequence[Case]
) -> list[Look]:
    """A look at every case. Looks, not only requests, are limited: what one look asks for in turn
    stays close together, and a prompt is not out of the cache again before it is asked to go on."""
    gate = asyncio.Semaphore(sides.arm.in_flight)

    async def one(case: Case) -> Look:
        async with gate:
            try:
                return await look(sides, case)
            except EndedLook as end:
                return end.look

    return list(await asyncio.gather(*map(one, cases)))


Status = Literal["ok", "fault", "both", "open", "unasked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What one check found."""

    name: str
    sentence: str
    status: Status
    """`both`: plain decoding does it as well. `open`: without a baseline nobody can say."""
    why: str = ""
    answers: int = 0
    """Looks that ended in something."""
    wrong: int = 0
    differs: int = 0
    plain_answers: int = 0
    plain_wrong: int = 0
    plain_differs: int = 0
    near_ties: int = 0
    failed: int = 0
    altered: int = 0
    """Identifiers that came altered, of `identifiers`, and by plain decoding."""
    identifiers: int = 0
    plain_altered: int = 0
    plain_identifiers: int = 0
    p_value: float | None = None
    """The least likely of the comparisons with plain decoding."""
    examples: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()
    """Parts of a comparison that the server cannot be asked."""
    comparisons: int = 0
    """Tests, each with a false alarm as often as ERROR says."""
    told: tuple[str, ...] = ()
    """What was measured, in lines."""
    suspicious: bool = False
    """Worth another look, with more prompts."""


def judge(check: AuditCheck, looks: Sequence[Look], plain: Sequence[Look] | None) -> CheckResult:
    """What the looks at a server come to; `plain` are those at plain decoding, if there is any."""
    seen, usual = (
        [look for look in own or () if look.sort not in ("unasked", "failed")]
        for own in (looks, plain)
    )
    ours, theirs = Counter(look.sort for look in looks), Counter(look.sort for look in usual)
    base = CheckResult(
        name=check.name,
        sentence=check.sentence,
        status="ok",
        answers=len(seen),
        wrong=ours["wrong"],
        differs=ours["differs"],
        plain_answers=len(usual),
        plain_wrong=theirs["wrong"],
        plain_differs=theirs["differs"],
        near_ties=sum(look.why == "near-tie" for look in seen),
        failed=ours["failed"],
        comparisons=check.comparisons,
        altered=sum(look.counts[0] for look in seen),
        identifiers=sum(look.counts[1] for look in seen),
        plain_altered=sum(look.counts[0] for look in usual),
        plain_identifiers=sum(look.counts[1] for look in usual),
        examples=tuple(look.why for look in seen if look.sort in ("wrong", "differs"))[:3],
        untested=tuple(look.why for look in looks if check.compare and look.sort == "unasked"),
    )
    if not seen:
        why = next((look.why for look in looks if look.why), "nothing was answered")
        return replace(base, status="unasked", why=why)
    return _judge_seen(base, seen, usual, compared=plain is not None)


def _judge_seen(
    base: CheckResult, seen: Sequence[Look], usual: Sequence[Look], *, compared: bool
) -> CheckResult:
    example = base.examples[0] if base.examples else ""
    if base.wrong and not base.plain_wrong:
        example = next(look.why for look in seen if look.sort == "wrong")
        return replace(base, status="fault", why=example)
    if not compared:
        return replace(base, status="open" if base.differs else "ok", why=example)
    if not usual:
        return replace(base, status="open", why="plain decoding could not be asked")
    p_values = [
        exceeds(base.wrong, base.answers, base.plain_wrong, base.plain_answers),
        exceeds(base.differs, base.answers, base.plain_differs, base.plain_answers),
    ]
    ours = [look.score for look in seen if look.score is not None]
    theirs = [look.score for look in usual if look.score is not None]
    if ours and theirs:
        p_values.append(compare_means(ours, theirs))
    base = replace(base, comparisons=base.comparisons + len(p_values))
    least = min(p_values)
    if least < ERROR:
        if not example:
            mean, plain = float(np.mean(ours)), float(np.mean(theirs))
            example = f"scores are {mean:.2f} in the mean, plain decoding's own {plain:.2f}"
            told = [(look.score, look.why) for look in seen if look.score is not None and look.why]
            example += f": {min(told)[1]}" if told and mean < plain else ""
        return replace(base, status="fault", p_value=least, why=example)
    usually = 2 * base.plain_differs > base.plain_answers and 2 * base.differs > base.answers
    both = base.wrong > 0 or usually
    return replace(
        base,
        status="both" if both else "ok",
        why=example if both else "",
        p_value=least,
        suspicious=least < _SUSPICIOUS or base.differs > base.plain_differs,
    )


def exceeds(ours: int, of_ours: int, theirs: int, of_theirs: int) -> float:
    """Fisher's exact test, one-sided: the chance of `ours` or more, given their sum."""
    total, marked = of_ours + of_theirs, ours + theirs
    more = range(ours, min(of_ours, marked) + 1)
    ways = sum(comb(of_ours, i) * comb(of_theirs, marked - i) for i in more)
    return ways / comb(total, marked)


def compare_means(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """A two-sided permutation test of equal means."""
    values_N = np.array([*ours, *theirs])
    if float(np.ptp(values_N)) < 1e-9:
        return 1.0
    rng = np.random.default_rng(0)
    shuffled = rng.permuted(np.broadcast_to(values_N, (_PERMUTATIONS, values_N.size)), axis=1)
    middle, size = float(values_N.mean()), len(ours)
    real = abs(float(values_N[:size].mean()) - middle)
    apart = np.abs(shuffled[:, :size].mean(axis=1) - middle)
    return (1 + int((apart >= real - 1e-12).sum())) / (1 + _PERMUTATIONS)
