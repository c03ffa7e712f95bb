"""An audit of running or started servers: the checks one after another, and their result file.

Speculation off is a server of its own, or, where the server knows it, a field of the request. Plain
decoding gets every look that the server gets, so that what it does by itself is blamed on nobody. A
check that is suspicious looks again. The folder gets audit.json and the servers' logs.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from foretoken.config.reader import at_least, check_fields
from foretoken.errors import ConfigError, one_of
from foretoken.lab.audit.asking import Asker, Case, OneAtATime, cases_of
from foretoken.lab.audit.checks import CHECKS, GREEDY, OF_TEXTS, SAMPLED_PROMPTS
from foretoken.lab.audit.judging import AuditCheck, CheckResult, EndedLook, Look, Sides, judge
from foretoken.lab.audit.rounding import measure_near_tie
from foretoken.lab.http.client import EXTRAS, Client
from foretoken.lab.measure.driving import run_to_end
from foretoken.lab.measure.experiment import ArmConfig
from foretoken.lab.measure.servers import serving
from foretoken.lab.measure.workload import WorkloadConfig, load_items
from foretoken.lab.records.run_files import describe_client, make_folder, write_json

RESULT = "audit.json"
OFF_BY_REQUEST: dict[str, dict[str, Any]] = {"foretoken": {"speculation": {"enabled": False}}}
"""Engines that leave speculation out of a request with these fields."""
SAME_SEEDS = ("foretoken", "mock")
"""Engines that promise the same seeded answers with and without speculation."""
MORE = 6
"""How many times as many prompts a second look takes."""
_ROUNDING_CASES = 8
SETS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5},
)
"""Sets of sampling parameters that are drawn with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPlan:
    """How much is asked."""

    prompts: Annotated[int, at_least(1)] = 32
    """Prompts of each check."""
    max_tokens: Annotated[int, at_least(4)] = 48
    samples: Annotated[int, at_least(1)] = 200
    """Draws of each of two prompts, by server and set of sampling parameters."""
    parameters: tuple[Mapping[str, Any], ...] = SETS
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
        looks = sum(sides * check.answers for check in self.checks)
        return self.prompts * (self._greedy(compared) + looks) + self._sampled(compared)

    def greedy_answers(self, compared: bool) -> tuple[float, float]:
        """How many greedy answers would take as long as all of it, and what is added where the
        longest check is looked at twice."""
        sides = 2 if compared else 1
        own = [sides * check.answers * check.each for check in self.checks]
        again = [
            work + (self._greedy(compared) if check.reads_greedy else 0)
            for work, check in zip(own, self.checks, strict=True)
        ]
        drawn = sum(check.each for check in self.checks if check.compare) * self._sampled(compared)
        once = self.prompts * (self._greedy(compared) + sum(own)) + drawn
        return once, MORE * self.prompts * max(again, default=0.0)

    def _greedy(self, compared: bool) -> int:
        """Greedy answers to each prompt, which several checks read."""
        asked = 3 if compared else 1
        return asked if any(check.reads_greedy for check in self.checks) else 0

    def _sampled(self, compared: bool) -> int:
        """Draws, which are few tokens each."""
        drawn = compared and any(check.compare for check in self.checks)
        return 2 * self.samples * SAMPLED_PROMPTS * len(self.parameters) if drawn else 0


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
    tie = await measure_near_tie(arm, plain, cases[:_ROUNDING_CASES])
    told.expects(*_expected(arm, plain, plan, time.monotonic() - began))
    sides = Sides(
        arm=arm,
        plain=plain,
        tie=tie,
        same_seeds=same_seeds,
        samples=plan.samples,
        parameters=plan.parameters,
    )
    found: list[CheckResult] = []
    for check in plan.checks:
        result = await _make(check, sides, cases, plan.concurrency)
        if result.suspicious and check.look is not None:
            told.again(check.name)
            more = cases_of(texts, MORE * plan.prompts, plan.max_tokens, plan.prompts)
            result = await _make(check, sides, more, plan.concurrency)
        result = _followed_from(result, found)
        told.ended(result)
        found.append(result)
    return tuple(found)


def _followed_from(result: CheckResult, before: Sequence[CheckResult]) -> CheckResult:
    """The result, which is open where other texts were seen and the server writes other texts
    anyhow: what stops or streams have to do with it cannot be told then."""
    faulty = [one.name for one in before if one.status == "fault" and one.name in OF_TEXTS]
    if result.status != "fault" or result.wrong or result.name in OF_TEXTS or not faulty:
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
    arms = [sides, None if sides.plain is None else replace(sides, arm=sides.plain)]
    if check.compare is not None:
        return judge(check, await _compare(check, sides, cases), None)
    if check.read is not None:  # of replies that are there already
        replies = [side.arm.replies if side is not None else None for side in arms]
        ours, plain = (
            None if own is None else [check.read(reply) for reply in own if reply.ok]
            for own in replies
        )
        return judge(check, ours or (), plain)
    # Looks, not only requests, are limited: what one look asks for in turn stays close together,
    # and a prompt is not out of the cache again before it is asked to go on.
    every = []
    for side in arms:
        gate = asyncio.Semaphore(concurrency)
        every += [_look(check, side, case, gate) for case in cases if side is not None]
    looks = await asyncio.gather(*every)
    return judge(check, looks[: len(cases)], looks[len(cases) :] or None)


async def _look(check: AuditCheck, sides: Sides, case: Case, gate: asyncio.Semaphore) -> Look:
    assert check.look is not None, check.name
    async with gate:
        try:
            return await check.look(sides, case)
        except EndedLook as end:
            return end.look


async def _compare(check: AuditCheck, sides: Sides, cases: Sequence[Case]) -> list[Look]:
    assert check.compare is not None, check.name
    try:
        return await check.compare(sides, cases)
    except EndedLook as end:
        return [end.look]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """`foretoken lab audit`."""

    candidate: ArmConfig
    baseline: ArmConfig | None
    workload: WorkloadConfig
    plan: AuditPlan = AuditPlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """What an audit found, and of whom."""

    candidate: str
    baseline: str
    """What plain decoding was: a server, a field of the request, or nothing."""
    requests: int
    seconds: float
    checks: tuple[CheckResult, ...]

    @property
    def faults(self) -> list[str]:
        """Checks that found one."""
        return [check.name for check in self.checks if check.status == "fault"]

    @property
    def num_asked(self) -> int:
        """Checks that could be made."""
        return sum(check.status != "unasked" for check in self.checks)

    @property
    def missing(self) -> str:
        """Why too little could be compared to say that there is no fault; empty: enough was."""
        if not self.num_asked:
            return "nothing could be asked"
        texts = [check for check in self.checks if check.name == GREEDY.name]
        return next((check.why for check in texts if check.status == "unasked"), "")


def run_audit(config: AuditConfig, out: Path, follow: AuditFollower | None = None) -> Audited:
    """Make the checks and save what they found.

    Raises:
        ConfigError: wrong settings. EndpointError: a server is not there.
    """
    items = load_items(config.workload)[0]
    asked = [item.prompt or str((item.messages or [{}])[-1].get("content", "")) for item in items]
    texts = [text for text in asked if text.strip()]
    make_folder(out)
    found = run_to_end(_run(config, texts, out, follow))
    value = {"kind": "audit", "schema": 1, "config": asdict(config), "found": asdict(found),
             "environment": describe_client()}  # fmt: skip
    write_json(out / RESULT, value)
    return found


async def _run(
    config: AuditConfig, texts: list[str], out: Path, follow: AuditFollower | None
) -> Audited:
    began = time.monotonic()
    async with serving(config.candidate, out / "logs" / "on.log") as on:
        async with _plain(config.baseline, on, out / "logs" / "off.log") as (off, fields, said):
            turns = None if off is None else _turns_of(on, off)
            arm = _asker(on, config.plan, turns)
            plain = None if off is None else _asker(off, config.plan, turns, fields)
            same_seeds = off is not None and on.info.engine == off.info.engine in SAME_SEEDS
            checks = await audit(
                arm, plain, texts, config.plan, same_seeds=same_seeds, follow=follow
            )
    return Audited(
        candidate=f"{on.info.engine} at {on.info.url}",
        baseline=said,
        requests=arm.num_asked + (0 if plain is None else plain.num_asked),
        seconds=time.monotonic() - began,
        checks=checks,
    )


@asynccontextmanager
async def _plain(
    baseline: ArmConfig | None, on: Client, log: Path
) -> AsyncIterator[tuple[Client | None, dict[str, Any], str]]:
    """Whom to ask without speculation, with which fields, and how that is said."""
    if baseline is not None:
        async with serving(baseline, log) as off:
            yield off, {}, f"{off.info.engine} at {off.info.url}"
        return
    fields = OFF_BY_REQUEST.get(on.info.engine)
    if fields is None:
        yield None, {}, "none"
        return
    yield on, fields, "the same server, speculation off in the request"


def _turns_of(on: Client, off: Client) -> OneAtATime | None:
    """Servers of one machine are asked in turns: both at once would starve each other."""
    same_machine = urlsplit(on.info.url).hostname == urlsplit(off.info.url).hostname
    return OneAtATime() if same_machine and on.info.url != off.info.url else None


def _asker(
    client: Client,
    plan: AuditPlan,
    turns: OneAtATime | None,
    fields: dict[str, Any] | None = None,
) -> Asker:
    """Token ids are asked for where the server knows the word."""
    known = {k: v for k, v in EXTRAS.get(client.info.engine, {}).items() if k == "return_token_ids"}
    return Asker(
        client.pool,
        client.info.model,
        extra_body={**known, **client.arm.extra_body, **(fields or {})},
        concurrency=plan.concurrency,
        timeout_s=client.arm.timeout_s,
        turns=turns,
    )
