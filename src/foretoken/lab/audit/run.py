"""An audit of running or started servers: the checks one after another, and their result file.

Speculation off is a server of its own, or, where the server knows it, a field of the request. Plain
decoding gets every look that the server gets, so that what it does by itself is blamed on nobody. A
check that is suspicious looks again. The folder gets audit.json and the servers' logs.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from foretoken.config.reader import at_least, check_fields
from foretoken.errors import ConfigError, one_of
from foretoken.lab.audit.asking import IN_FLIGHT, Asker, Case, OneAtATime, cases_of
from foretoken.lab.audit.checks import CHECKS, OF_TEXTS, SAMPLED_PROMPTS
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
    max_tokens: Annotated[int, at_least(4)] = 48
    samples: Annotated[int, at_least(1)] = 200
    """Draws of each of two prompts, by server and set of sampling parameters."""
    parameters: tuple[Mapping[str, Any], ...] = SETS
    temperature: float = 0.7
    """Of drawn copies, at most 1."""
    only: tuple[str, ...] = ()
    """Names of the checks to make; empty: all."""
    same_seeds: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "plan.")
        names = [check.name for check in CHECKS]
        for name in self.only:
            if name not in names:
                raise ConfigError("--only", name, one_of(name, names))

    @property
    def checks(self) -> list[AuditCheck]:
        """The checks to make, those that read what others were answered last."""
        return [check for check in CHECKS if not self.only or check.name in self.only]

    def work(self, compared: bool) -> tuple[int, float]:
        """About how many requests it takes, and as long as how many greedy answers, if nothing is
        looked at twice."""
        greedy = 3 if compared else 1  # which several checks read
        requests = greedy * self.prompts if any(one.reads_greedy for one in self.checks) else 0
        work = float(requests)
        for check in self.checks:
            asked = (1 + compared) * check.answers * self.prompts
            if check.name == "sampling" and compared:  # draws, which are few tokens each
                asked = 2 * self.samples * SAMPLED_PROMPTS * len(self.parameters)
            requests += asked
            work += asked * check.each
        return requests, work


async def audit(
    arm: Asker,
    plain: Asker | None,
    texts: Sequence[str],
    plan: AuditPlan,
    *,
    say: Callable[[str], None] = lambda text: None,
    ended: Callable[[CheckResult], None] = lambda result: None,
) -> tuple[CheckResult, ...]:
    """Every check of `plan`; `say` is told how long it takes, `ended` of each check."""
    cases = cases_of(texts, plan.prompts, plan.max_tokens)
    began = time.monotonic()
    tie = await measure_near_tie(arm, plain, cases[:_ROUNDING_CASES])
    # What is to come, as the first answers went, which were greedy ones.
    asked = arm.num_asked + (0 if plain is None else plain.num_asked)
    requests, work = plan.work(plain is not None)
    seconds = max(0.0, work - asked) * (time.monotonic() - began) / asked
    say(
        f"about {max(0, requests - asked)} requests, {_duration(seconds)}; a suspicious check "
        f"looks again with {MORE} times the prompts"
    )
    sides = Sides(arm=arm, plain=plain, tie=tie, same_seeds=plan.same_seeds,
                  samples=plan.samples, parameters=plan.parameters,
                  temperature=plan.temperature)  # fmt: skip
    found: list[CheckResult] = []
    for check in plan.checks:
        began = time.monotonic()
        result = await _make(check, sides, cases)
        if result.suspicious and check.look is not None:
            again_s = MORE * (time.monotonic() - began)
            said = f"looked at again with {MORE} times the prompts, {_duration(again_s)}"
            say(f"{check.name}: {said}")
            more = cases_of(texts, MORE * plan.prompts, plan.max_tokens, plan.prompts)
            result = await _make(check, sides, more)
        faulty = [one.name for one in found if one.status == "fault" and one.name in OF_TEXTS]
        if result.status == "fault" and not result.wrong and result.name not in OF_TEXTS and faulty:
            # Where other texts are written anyhow, nobody can tell what streams have to do with it.
            why = f"may be a consequence of {', '.join(faulty)}"
            result = replace(result, status="open", why=why)
        ended(result)
        found.append(result)
    return tuple(found)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


async def _make(check: AuditCheck, sides: Sides, cases: Sequence[Case]) -> CheckResult:
    arms = [sides, None if sides.plain is None else sides.as_plain()]
    if check.compare is not None:
        try:
            return judge(check, await check.compare(sides, cases), None)
        except EndedLook as end:
            return judge(check, [end.look], None)
    if check.read is not None:  # of replies that are there already
        ours, plain = (
            None if side is None else [check.read(one) for one in side.arm.replies if one.ok]
            for side in arms
        )
        return judge(check, ours or (), plain)
    assert check.look is not None, check.name
    # Looks, not only requests, are limited: what one look asks for in turn stays close together,
    # and a prompt is not out of the cache again before it is asked to go on.
    look = check.look

    async def one(side: Sides, case: Case, gate: asyncio.Semaphore) -> Look:
        async with gate:
            try:
                return await look(side, case)
            except EndedLook as end:
                return end.look

    every = []
    for side in arms:
        gate = asyncio.Semaphore(IN_FLIGHT)
        every += [one(side, case, gate) for case in cases if side is not None]
    looks = await asyncio.gather(*every)
    return judge(check, looks[: len(cases)], looks[len(cases) :] or None)


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
        texts = [check for check in self.checks if check.name == "greedy"]
        return next((check.why for check in texts if check.status == "unasked"), "")


def run_audit(
    config: AuditConfig, out: Path, say: Callable[[str], None], ended: Callable[[CheckResult], None]
) -> Audited:
    """Make the checks and save what they found; `say` and `ended` as in `audit`. Raises
    ConfigError: wrong settings; EndpointError: a server is not there."""
    items = load_items(config.workload)[0]
    asked = [item.prompt or str((item.messages or [{}])[-1].get("content", "")) for item in items]
    texts = [text for text in asked if text.strip()]
    make_folder(out)
    found = run_to_end(_run(config, texts, out, say, ended))
    value = {"kind": "audit", "schema": 1, "config": asdict(config), "found": asdict(found),
             "environment": describe_client()}  # fmt: skip
    write_json(out / RESULT, value)
    return found


async def _run(
    config: AuditConfig,
    texts: list[str],
    out: Path,
    say: Callable[[str], None],
    ended: Callable[[CheckResult], None],
) -> Audited:
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        on = await stack.enter_async_context(serving(config.candidate, out / "logs" / "on.log"))
        off, said, turns = None, "none", None
        fields = OFF_BY_REQUEST.get(on.info.engine)
        if config.baseline is not None:
            log = out / "logs" / "off.log"
            off = await stack.enter_async_context(serving(config.baseline, log))
            fields, said = None, f"{off.info.engine} at {off.info.url}"
            urls = (urlsplit(on.info.url), urlsplit(off.info.url))
            # Servers of one machine are asked in turns: both at once would starve each other.
            if urls[0].hostname == urls[1].hostname and urls[0] != urls[1]:
                turns = OneAtATime()
        elif fields is not None:
            off, said = on, "the same server, speculation off in the request"
        arm = _asker(on, turns)
        plain = None if off is None else _asker(off, turns, fields)
        same_seeds = off is not None and on.info.engine == off.info.engine in SAME_SEEDS
        plan = replace(config.plan, same_seeds=same_seeds)
        checks = await audit(arm, plain, texts, plan, say=say, ended=ended)
    return Audited(
        candidate=f"{on.info.engine} at {on.info.url}",
        baseline=said,
        requests=arm.num_asked + (0 if plain is None else plain.num_asked),
        seconds=time.monotonic() - began,
        checks=checks,
    )


def _asker(client: Client, turns: OneAtATime | None, fields: dict[str, Any] | None = None) -> Asker:
    """Token ids are asked for where the server knows the word."""
    known = {k: v for k, v in EXTRAS.get(client.info.engine, {}).items() if k == "return_token_ids"}
    return Asker(
        client.pool,
        client.info.model,
        extra_body={**known, **client.arm.extra_body, **(fields or {})},
        timeout_s=client.arm.timeout_s,
        turns=turns,
    )
