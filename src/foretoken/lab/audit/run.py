"""An audit of running or started servers: the checks one after another, and their result file.

Speculation off is a server of its own, or, where the server knows it, a field of the request. Plain
decoding gets every look that the server gets, so that what it does by itself is blamed on nobody. A
check that is suspicious looks again. The folder gets audit.json and the servers' logs.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from foretoken.config.reader import at_least, between, check_fields
from foretoken.errors import ConfigError, EndpointError, one_of
from foretoken.lab.audit.asking import Asker, Case, OneAtATime, cases_of
from foretoken.lab.audit.checks import CHECKS, OF_TEXTS, SAMPLED_PROMPTS
from foretoken.lab.audit.drafts import DraftWatch, drift_check, zero_check
from foretoken.lab.audit.judging import (
    ERROR,
    AuditCheck,
    CheckResult,
    EndedLook,
    Sides,
    judge,
    looks_at,
)
from foretoken.lab.audit.pressure import (
    AtDepth,
    Clock,
    DepthPlan,
    Minutes,
    depth_checks,
    load_checks,
    short,
)
from foretoken.lab.audit.rounding import measure_near_tie
from foretoken.lab.http.client import EXTRAS, Client
from foretoken.lab.http.timed import Pool
from foretoken.lab.launch.engines import given
from foretoken.lab.launch.read import read_source
from foretoken.lab.measure.driving import run_to_end
from foretoken.lab.measure.experiment import ArmConfig
from foretoken.lab.measure.servers import serving
from foretoken.lab.measure.workload import WorkloadConfig, load_items
from foretoken.lab.records.run_files import describe_client, make_folder, write_json

RESULT = "audit.json"
OFF_BY_REQUEST: dict[str, dict[str, Any]] = {"foretoken": {"speculation": {"enabled": False}}}
"""Engines that leave speculation out of a request with these fields."""
LENGTH_BY_REQUEST = ("foretoken", "mock")
"""Engines that draft as far as a request says."""
SAME_SEEDS = ("foretoken", "mock")
"""Engines that promise the same seeded answers with and without speculation."""
PRESSING = {"load": "many at once behind one long beginning are answered as one alone is",
            "depths": "every draft length that the server can be told is right",
            "zero": "no stretch of acceptance at 0 or 1, no loops, no answer changes with time",
            "drift": "acceptance at longer contexts, beside the drafter's card"}  # fmt: skip
"""Checks whose size follows the minutes, and what they say."""
UNDER_LOAD = ("copies", "logprobs", "streams", "stops", "grammars", "tools")
"""Checks that are made again under load. Seeds and draws are left out: batches of other sizes round
otherwise, and a draw may turn."""
AT_DEPTH = ("copies", "greedy")
MORE = 6
"""How many times as many prompts a second look takes."""
_LENGTH = "{k}"
"""Stands in a command for the draft length."""
_ROUNDING_CASES = 8
_LATE, _LEAST_WAIT_S = 20.0, 30.0
"""Times as long as all first answers that one may take, and seconds in any case; under load, and
behind long prompts, the server's own limit counts."""
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
    temperature: Annotated[float, between(0.01, 1.0)] = 0.7
    """Of drawn copies."""
    minutes: Annotated[float, between(0.05, 1440.0)] = 1.0
    """Of the checks whose sizes follow it."""
    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)
    """Draft lengths that are looked at one by one."""
    drafter: str = ""
    """What drafts, by which `drift` finds what is published for it."""
    only: tuple[str, ...] = ()
    """Names of the checks to make; empty: all."""
    same_seeds: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "plan.")
        names = [*(check.name for check in CHECKS), *PRESSING]
        for name in self.only:
            if name not in names:
                raise ConfigError("--only", name, one_of(name, names))

    @property
    def checks(self) -> list[AuditCheck]:
        """The checks to make, those that read what others were answered last."""
        return [check for check in CHECKS if not self.only or check.name in self.only]

    def wants(self, name: str) -> bool:
        return not self.only or name in self.only

    @property
    def pressing(self) -> list[str]:
        return list(filter(self.wants, PRESSING))

    @property
    def sentences(self) -> dict[str, str]:
        """What every check says."""
        usual = {check.name: check.sentence for check in self.checks}
        return usual | {name: PRESSING[name] for name in self.pressing}

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


@dataclass(slots=True, kw_only=True)
class _Auditing:
    """The checks of one audit as they come."""

    sides: Sides
    texts: Sequence[str]
    plan: AuditPlan
    minutes: Minutes
    watch: DraftWatch
    say: Callable[[str], None]
    ended: Callable[[CheckResult], None]
    found: list[CheckResult] = field(default_factory=list)

    @property
    def cases(self) -> list[Case]:
        return cases_of(self.texts, self.plan.prompts, self.plan.max_tokens)

    async def usual(self, *, reading: bool) -> None:
        """The checks that ask, or those that read what others were answered."""
        for check in self.plan.checks:
            if (check.read is not None) == reading:
                self.watch.part = check.name
                self._keep(await self._twice(check))

    async def _twice(self, check: AuditCheck) -> CheckResult:
        """What is suspicious is looked at again."""
        began = time.monotonic()
        result = await _make(check, self.sides, self.cases)
        if not result.suspicious or check.look is None:
            return result
        again_s = MORE * (time.monotonic() - began)
        said = f"looked at again with {MORE} times the prompts, {_duration(again_s)}"
        self.say(f"{check.name}: {said}")
        plan = self.plan
        more = cases_of(self.texts, MORE * plan.prompts, plan.max_tokens, plan.prompts)
        again = await _make(check, self.sides, more)
        return replace(again, comparisons=result.comparisons + again.comparisons)

    def _keep(self, result: CheckResult) -> None:
        faulty = [name for name in self._faulty if name in OF_TEXTS]
        if result.status == "fault" and not result.wrong and result.name not in OF_TEXTS and faulty:
            # Where other texts are written anyhow, nobody can tell what streams have to do with it.
            why = f"may be a consequence of {', '.join(faulty)}"
            result = replace(result, status="open", why=why)
        self.ended(result)
        self.found.append(result)

    @property
    def _faulty(self) -> list[str]:
        return [one.name for one in self.found if one.status == "fault"]

    async def pressed(self, at_depth: AtDepth | None) -> None:
        """The checks whose size follows the minutes, each until its share of them."""
        by_name = {check.name: check for check in CHECKS}
        plan, minutes, watch = self.plan, self.minutes, self.watch
        await watch.look()
        watch.part = "load"
        sound = [by_name[name] for name in UNDER_LOAD if name not in self._faulty]
        if plan.wants("load") and sound:
            until = minutes.until(0.5)
            async for result in load_checks(self.sides, self.texts, sound, until):
                self._keep(result)
            await watch.look()
            if watch.windows and all(one.part != "load" for one in watch.windows):
                minutes.missed.append(f"load: with drafts, since {watch.silence}")
        if plan.wants("depths") and at_depth is None:
            why = "how far to draft cannot be said to this server: give a command with {k} in it"
            sentence = PRESSING["depths"]
            self._keep(CheckResult(name="depths", sentence=sentence, status="unasked", why=why))
        elif plan.wants("depths") and at_depth is not None:
            checks = [by_name[name] for name in AT_DEPTH]
            few = self.cases[: max(2, plan.prompts // 2)]
            deep = DepthPlan(depths=plan.depths, cases=few, checks=checks)
            async for result in depth_checks(self.sides, at_depth, deep, minutes.until(0.7)):
                self._keep(result)
        if plan.wants("zero"):
            until = minutes.until(0.85)
            self._keep(await zero_check(self.sides, self.cases, watch, until))
        if plan.wants("drift"):
            args = (self.sides.arm, self.texts, watch, minutes, plan.drafter)
            self._keep(await drift_check(*args))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Who is told of an audit while it runs, and what its time is."""

    say: Callable[[str], None] = lambda text: None
    """How long it takes."""
    ended: Callable[[CheckResult], None] = lambda result: None
    clock: Clock = time.monotonic


class Findings(NamedTuple):
    """What the checks found, and what was not reached in the minutes given."""

    checks: tuple[CheckResult, ...]
    missed: tuple[str, ...]
    gone: str = ""
    """Why a server was asked no more; empty: it was asked to the end."""


async def audit(
    arm: Asker,
    plain: Asker | None,
    texts: Sequence[str],
    plan: AuditPlan,
    *,
    at_depth: AtDepth | None = None,
    hooks: Hooks | None = None,
) -> Findings:
    """Every check of `plan`; `at_depth` tells the server how far to draft. Told to stop, it keeps
    what was found."""
    hooks = hooks or Hooks()
    minutes = Minutes(60.0 * plan.minutes, hooks.clock, [])
    watch = DraftWatch(arm.manner["pool"], hooks.clock)
    arm.heard = watch.heard
    cases = cases_of(texts, plan.prompts, plan.max_tokens)
    hooks.say(f"asking for the first answers, which have {arm.timeout_s:g} s each")
    began = time.monotonic()
    tie = await measure_near_tie(arm, plain, cases[:_ROUNDING_CASES])
    # What is to come, as the first answers went, which were greedy ones.
    asked = arm.num_asked + (0 if plain is None else plain.num_asked)
    requests, work = plan.work(plain is not None)
    took = time.monotonic() - began
    seconds = max(0.0, work - asked) * took / asked
    more = (
        f", then up to {plan.minutes:g} min of {', '.join(plan.pressing)}" if plan.pressing else ""
    )
    hooks.say(
        f"about {max(0, requests - asked)} requests, {_duration(seconds)}{more}; a suspicious "
        f"check looks again with {MORE} times the prompts"
    )
    sides = Sides(arm=arm, plain=plain, tie=tie, same_seeds=plan.same_seeds,
                  samples=plan.samples, parameters=plan.parameters,
                  temperature=plan.temperature)  # fmt: skip
    run = _Auditing(sides=sides, texts=texts, plan=plan, minutes=minutes, watch=watch,
                    say=hooks.say, ended=hooks.ended)  # fmt: skip
    servers = [arm] if plain is None else [arm, plain]
    try:
        # Answers are as short as the first; what takes far longer than all of those hangs.
        for one in servers:
            one.timeout_s = min(one.timeout_s, max(_LEAST_WAIT_S, _LATE * took))
        await run.usual(reading=False)
        for one in servers:
            one.timeout_s = one.manner["timeout_s"]
        minutes.begin()
        await run.pressed(at_depth)
    except asyncio.CancelledError:
        if not run.found:
            raise
        minutes.missed.append(f"{watch.part}, and what comes after it: the audit was stopped")
    await run.usual(reading=True)
    gone = next((one.gone for one in servers if one.gone), "")
    minutes.missed += [gone] if gone else []
    return Findings(tuple(run.found), tuple(minutes.missed), gone)


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
    waiting = [looks_at(check.look, side, cases) for side in arms if side is not None]
    looks, *usual = await asyncio.gather(*waiting)
    return judge(check, looks, usual[0] if usual else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """`foretoken lab audit`."""

    candidate: ArmConfig
    baseline: ArmConfig | None
    workload: WorkloadConfig
    plan: AuditPlan = AuditPlan()
    card: str = ""
    """The device that the server runs on, as its user calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """What an audit found, and of whom."""

    engine: str
    version: str | None
    model: str
    url: str
    method: str
    """What drafts; empty: nobody said."""
    card: str
    """The device; empty: nobody said."""
    baseline: str
    """What plain decoding was: a server, a field of the request, or nothing."""
    requests: int
    seconds: float
    checks: tuple[CheckResult, ...]
    missed: tuple[str, ...] = ()
    """What was not reached in the minutes given."""
    gone: str = ""
    """Why a server was asked no more; empty: it was asked to the end."""

    @property
    def false_alarms(self) -> float:
        """At most how often such an audit accuses a right server."""
        return ERROR * sum(check.comparisons for check in self.checks)

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
        if self.gone or not self.num_asked:
            return self.gone or "nothing could be asked"
        texts = [check for check in self.checks if check.name == "greedy"]
        return next((check.why for check in texts if check.status == "unasked"), "")


def run_audit(config: AuditConfig, out: Path, hooks: Hooks) -> Audited:
    """Make the checks and save what they found. Raises ConfigError: wrong settings; EndpointError:
    a server is not there."""
    items = load_items(config.workload)[0]
    asked = [item.prompt or str((item.messages or [{}])[-1].get("content", "")) for item in items]
    texts = [text for text in asked if text.strip()]
    make_folder(out)
    found = run_to_end(_run(config, texts, out, hooks))
    value = {"kind": "audit", "schema": 1, "config": asdict(config), "found": asdict(found),
             "environment": describe_client()}  # fmt: skip
    write_json(out / RESULT, value)
    return found


def _told(arm: ArmConfig, length: int) -> ArmConfig:
    """The arm with its `{k}` filled in."""
    command = None if arm.command is None else arm.command.replace(_LENGTH, str(length))
    return replace(arm, command=command)


def _drafter_of(arm: ArmConfig) -> str:
    """What the server's command drafts with, and for whom; empty: it does not say."""
    for launch in read_source(arm.command or "").launches:
        drafting = given(launch)
        if drafting is not None:
            words = [drafting.method, drafting.model or launch.model]
            return ":".join(filter(None, words))
    return ""


async def _started(stack: AsyncExitStack, config: AuditConfig, log: Path, hooks: Hooks) -> Client:
    """The server with the longest drafts, or the shortest where it does not start with those."""
    depths = config.plan.depths
    try:
        return await stack.enter_async_context(serving(_told(config.candidate, max(depths)), log))
    except EndpointError as error:
        if _LENGTH not in (config.candidate.command or "") or len(set(depths)) < 2:
            raise
        hooks.say(f"asked with drafts of {min(depths)}; with {max(depths)}: {short(error)}")
        return await stack.enter_async_context(serving(_told(config.candidate, min(depths)), log))


async def _run(config: AuditConfig, texts: list[str], out: Path, hooks: Hooks) -> Audited:
    began = hooks.clock()
    by_start = _LENGTH in (config.candidate.command or "")
    async with AsyncExitStack() as stack:
        on = await _started(stack, config, out / "logs" / "on.log", hooks)
        off, said, turns = None, "none", None
        fields = OFF_BY_REQUEST.get(on.info.engine)
        if config.baseline is not None:
            off_log = out / "logs" / "off.log"
            off = await stack.enter_async_context(serving(config.baseline, off_log))
            fields, said = None, f"{off.info.engine} at {off.info.url}"
            urls = (urlsplit(on.info.url), urlsplit(off.info.url))
            # Servers of one machine are asked in turns: both at once would starve each other.
            if urls[0].hostname == urls[1].hostname and urls[0] != urls[1]:
                turns = OneAtATime()
        elif fields is not None:
            off, said = on, "the same server, speculation off in the request"

        @asynccontextmanager
        async def at_depth(length: int) -> AsyncIterator[Asker]:
            if not by_start:
                told = {"speculation": {"num_speculative_tokens": length}}
                yield _asker(on, turns, told, arm.manner["pool"])
                return
            own_log = out / "logs" / f"on-{length}.log"
            async with serving(_told(config.candidate, length), own_log) as other:
                yield _asker(other, turns)

        arm = _asker(on, turns)
        pool = arm.manner["pool"] if off is on else None
        plain = None if off is None else _asker(off, turns, fields, pool)
        same_seeds = off is not None and on.info.engine == off.info.engine in SAME_SEEDS
        drafter = config.plan.drafter or _drafter_of(on.arm)
        plan = replace(config.plan, same_seeds=same_seeds, drafter=drafter)
        tells = by_start or on.info.engine in LENGTH_BY_REQUEST
        found = await audit(
            arm, plain, texts, plan, at_depth=at_depth if tells else None, hooks=hooks
        )
    return Audited(
        engine=on.info.engine,
        version=on.info.version,
        model=on.info.model or "",
        url=on.info.url,
        method=plan.drafter,
        card=config.card,
        baseline=said,
        requests=arm.num_asked + (0 if plain is None else plain.num_asked),
        seconds=hooks.clock() - began,
        checks=found.checks,
        missed=found.missed,
        gone=found.gone,
    )


def _asker(
    client: Client,
    turns: OneAtATime | None,
    fields: dict[str, Any] | None = None,
    pool: Pool | None = None,
) -> Asker:
    """Token ids are asked for where the server knows the word."""
    known = {k: v for k, v in EXTRAS.get(client.info.engine, {}).items() if k == "return_token_ids"}
    return Asker(
        pool or client.pool,
        client.info.model,
        extra_body={**known, **client.arm.extra_body, **(fields or {})},
        timeout_s=client.arm.timeout_s,
        turns=turns,
    )
