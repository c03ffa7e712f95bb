"""Makes the checks of two servers one after another, and looks again where one is suspicious.

Knows no files and starts no servers. Plain decoding gets every look that the server gets, so that
what it does by itself is blamed on nobody.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from foretoken.config.reader import at_least, check_fields
from foretoken.errors import ConfigError, one_of
from foretoken.lab.audit.asking import Asker, Case, cases_of
from foretoken.lab.audit.check import AuditCheck, Look, Sides
from foretoken.lab.audit.checks import CHECKS
from foretoken.lab.audit.checks.greedy import GREEDY
from foretoken.lab.audit.checks.logprobs import LOGPROBS
from foretoken.lab.audit.checks.verification import VERIFICATION
from foretoken.lab.audit.judging import CheckResult, judge
from foretoken.lab.audit.parting import common
from foretoken.lab.measure import rounding

MORE = 6
"""How many times as many prompts a second look takes."""
_MOST_MEASURED = 0.25
"""Of a near tie's width, as far as it rests on answers: a few wrong ones may be among them."""
_TIMES_ROUNDING = 4.0
_ROUNDING_CASES = 8
_OF_TEXTS = (GREEDY.name, VERIFICATION.name, LOGPROBS.name)
"""Checks of what is written, whatever is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPlan:
    """How much is asked."""

    prompts: Annotated[int, at_least(1)] = 32
    """Prompts of each check."""
    max_tokens: Annotated[int, at_least(4)] = 48
    concurrency: Annotated[int, at_least(1)] = 8
    """Requests in flight at each server."""
    only: tuple[str, ...] = ()
    """Names of the checks to make; empty: all."""

    def __post_init__(self) -> None:
        """Raise a ConfigError for what is out of range."""
        check_fields(self, "plan.")
        names = [check.name for check in CHECKS]
        for name in self.only:
            if name not in names:
                raise ConfigError("--only", name, one_of(name, names))

    @property
    def checks(self) -> list[AuditCheck]:
        """The checks to make, those that read what others were answered last."""
        return [check for check in CHECKS if not self.only or check.name in self.only]

    def requests(self, compared: bool) -> int:
        """About how many requests it takes, if nothing is looked at twice."""
        sides = 2 if compared else 1
        return self.prompts * (
            self._greedy(compared) + sum(sides * check.answers for check in self.checks)
        )

    def greedy_answers(self, compared: bool) -> tuple[float, float]:
        """How many greedy answers would take as long as all of it, and what is added where the
        longest check is looked at twice."""
        sides = 2 if compared else 1
        own = [sides * check.answers * check.each for check in self.checks]
        again = [
            work + (self._greedy(compared) if check.reads_greedy else 0)
            for work, check in zip(own, self.checks, strict=True)
        ]
        once = self.prompts * (self._greedy(compared) + sum(own))
        return once, MORE * self.prompts * max(again, default=0.0)

    def _greedy(self, compared: bool) -> int:
        """Greedy answers to each prompt, which several checks read."""
        asked = 3 if compared else 1
        return asked if any(check.reads_greedy for check in self.checks) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFollower:
    """Who is told how far it is."""

    expects: Callable[[int, float, float], None] = lambda requests, seconds, again_s: None
    """About so many requests in about so many seconds are to come, and the longest check takes so
    many more if it has to look twice."""
    again: Callable[[str], None] = lambda name: None
    """A check looks a second time."""
    ended: Callable[[CheckResult], None] = lambda result: None


async def audit(
    arm: Asker,
    plain: Asker | None,
    texts: Sequence[str],
    plan: AuditPlan,
    *,
    same_seeds: bool = False,
    follow: AuditFollower | None = None,
) -> tuple[CheckResult, ...]:
    """Every check of `plan`; `same_seeds`: seeded answers are promised to be plain decoding's."""
    told = follow or AuditFollower()
    cases = cases_of(texts, plan.prompts, plan.max_tokens)
    began = time.monotonic()
    tie = await near_tie(arm, plain, cases[:_ROUNDING_CASES])
    told.expects(*_expected(arm, plain, plan, time.monotonic() - began))
    sides = Sides(arm=arm, plain=plain, tie=tie, same_seeds=same_seeds)
    found: list[CheckResult] = []
    for check in plan.checks:
        result = await _make(check, sides, cases, plan.concurrency)
        if result.suspicious and check.look is not None:
            told.again(check.name)
            more = cases_of(texts, MORE * plan.prompts, plan.max_tokens, plan.prompts)
            result = await _make(check, sides, more, plan.concurrency)
        result = followed_from(result, found)
        told.ended(result)
        found.append(result)
    return tuple(found)


def followed_from(result: CheckResult, before: Sequence[CheckResult]) -> CheckResult:
    """The result, which is open where other texts were seen and the server writes other texts
    anyhow: what stops or streams have to do with it cannot be told then."""
    faulty = [one.name for one in before if one.status == "fault" and one.name in _OF_TEXTS]
    if result.status != "fault" or result.wrong or result.name in _OF_TEXTS or not faulty:
        return result
    return replace(result, status="open", why=f"may be a consequence of {', '.join(faulty)}")


def _expected(
    arm: Asker, plain: Asker | None, plan: AuditPlan, seconds: float
) -> tuple[int, float, float]:
    """Requests to come and what they take, as the first ones went, which were greedy answers."""
    asked = arm.num_asked + (0 if plain is None else plain.num_asked)
    once, again = plan.greedy_answers(plain is not None)
    each_s = seconds / max(1, asked)
    left = max(0, plan.requests(plain is not None) - asked)
    return left, max(0.0, once - asked) * each_s, again * each_s


async def _make(
    check: AuditCheck, sides: Sides, cases: Sequence[Case], concurrency: int
) -> CheckResult:
    if check.look is None:
        return _read(check, sides, cases)
    control = None if sides.plain is None else _against_itself(sides, sides.plain)
    # Looks, not only requests, are limited: what one look asks for in turn stays close together,
    # and a prompt is not out of the cache again before it is asked to go on.
    every = []
    for side in (sides, control):
        gate = asyncio.Semaphore(concurrency)
        every += [_look(check, side, case, gate) for case in cases if side is not None]
    looks = await asyncio.gather(*every)
    plain = looks[len(cases) :] if control is not None else None
    return judge(check, looks[: len(cases)], plain)


def _against_itself(sides: Sides, plain: Asker) -> Sides:
    return Sides(arm=plain, plain=plain, tie=sides.tie, same_seeds=sides.same_seeds)


async def _look(check: AuditCheck, sides: Sides, case: Case, gate: asyncio.Semaphore) -> Look:
    assert check.look is not None, check.name
    async with gate:
        return await check.look(sides, case)


def _read(check: AuditCheck, sides: Sides, cases: Sequence[Case]) -> CheckResult:
    """A check of replies that are there already."""
    assert check.read is not None, check.name
    plain = None
    if sides.plain is not None:
        plain = [check.read(reply) for reply in sides.plain.replies if reply.ok]
    return judge(check, [check.read(reply) for reply in sides.arm.replies if reply.ok], plain)


async def near_tie(arm: Asker, plain: Asker | None, cases: Sequence[Case]) -> float:
    """How close two tokens may be to change places: as `measure.rounding` reads it off the grid
    that log-probabilities stand on, or from how much they differ when the same is asked again.

    The latter is the middle over prompts of the largest differences, so that a few answers with
    wrong numbers do not excuse what is to be found.
    """
    other = plain if plain is not None else arm
    once = await asyncio.gather(*(other.greedy(case) for case in cases))
    more = [await asyncio.gather(*(other.greedy(case, again=True) for case in cases))]
    more.append(await asyncio.gather(*(arm.greedy(case) for case in cases)))
    widest = []
    for again in more:
        apart = []
        for one, two in zip(once, again, strict=True):
            if one.tokens is None or two.tokens is None:
                continue
            length = common(one.tokens, two.tokens)
            # A row without likeliest tokens may stand for a token that nobody scored.
            scored = [at for at in range(length) if bool(one.tops[at]) == bool(two.tops[at])]
            pairs = ((one.logprobs[at], two.logprobs[at]) for at in scored)
            apart.append(max((abs(x - y) for x, y in pairs), default=0.0))
        widest.append(sorted(apart)[len(apart) // 2] if apart else 0.0)
    by_grid = rounding.near_tie([list(tops.values()) for reply in once for tops in reply.tops])
    return max(by_grid, min(_MOST_MEASURED, _TIMES_ROUNDING * max(widest)))
