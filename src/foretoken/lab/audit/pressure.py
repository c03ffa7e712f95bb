"""The checks again where engines broke: under load, and at each draft length.

Engines were right alone and wrong at twelve requests in flight: pages of another request, state
that was freed in the middle of a step. Every stage of the load has more clients and a longer shared
beginning, as far as the minutes go. A quarter more are long requests; whenever an answer ends, the
oldest of them is cancelled and another one comes, so that pages are freed,
evicted, preempted and taken again under those that are looked at. The same requests alone are the
truth. Every client has words that stand in its prompt only: one in another's answer is a leak.

A server was right at 3, 4, 6 and 7 drafts and wrong at 5, so each length gets a line of its own.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b

from foretoken.errors import EndpointError
from foretoken.lab.audit.asking import Asker, Case, OneAtATime, PatientPool, Reply
from foretoken.lab.audit.copies import SURE, identifiers
from foretoken.lab.audit.judging import (
    FINE,
    AuditCheck,
    CheckResult,
    Look,
    Sides,
    answered,
    judge,
    looks_at,
    plain_of,
)
from foretoken.lab.audit.rounding import divergence
from foretoken.lab.http.timed import Answer, TransportError

Clock = Callable[[], float]
_TIMES = 4
"""Copies of a stage, in clients: the later ones come while others are answered."""
_TRIES = 3
"""Of the request that leaves the shared beginning in the cache."""
_LONG_TOKENS = 400
_CLIENT = "\n\nClient "
_TOKENS = 32
"""Of greedy texts under load."""
_CHARACTERS = 4.0
"""Of a token, where the server does not count them."""


@dataclass(frozen=True, slots=True)
class LoadStage:
    """How many clients there are, and how many tokens they share."""

    in_flight: int
    shared_tokens: int

    @property
    def said(self) -> str:
        return f"{self.in_flight} in flight behind {self.shared_tokens:,} shared tokens"


STAGES = (
    LoadStage(12, 2_000),
    LoadStage(24, 5_000),
    LoadStage(40, 10_000),
    LoadStage(64, 20_000),
)


class Minutes:
    """What is left of the time that a user gives; it begins once."""

    def __init__(self, seconds: float, clock: Clock, missed: list[str], began: float = 0.0) -> None:
        self.clock, self._seconds, self._began = clock, seconds, began
        self.missed = missed
        """What was not reached."""

    def begin(self) -> None:
        """The time counts from now on."""
        self._began = self.clock()

    def until(self, share: float) -> "Minutes":
        """The first `share` of it, with the same list."""
        return Minutes(share * self._seconds, self.clock, self.missed, self._began)

    @property
    def left(self) -> float:
        return self._seconds - (self.clock() - self._began)


class _Churned:
    """A pool of many clients at once: while any request is open, long ones come and are
    cancelled, one for every answer that ends."""

    def __init__(self, asker: Asker, num_long: int, shared: str) -> None:
        self.num_cancelled = 0
        self._pool: PatientPool = asker.manner["pool"]
        self._fixed = {"model": asker.manner["model"], **(asker.manner["extra_body"] or {})}
        self._num_long, self._shared = num_long, shared
        self._num_open = self._num_longs = 0
        self._long: list[asyncio.Task[None]] = []

    async def send(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> Answer:
        self._num_open += 1
        self._fill(timeout_s)
        try:
            return await self._pool.send(method, path, body, timeout_s=timeout_s)
        finally:
            self._num_open -= 1
            # The last to end leaves nobody behind: what comes next is to be alone.
            count = 1 if self._num_open else len(self._long)
            gone, self._long = self._long[:count], self._long[count:]
            self.num_cancelled += sum(task.cancel() for task in gone)
            await asyncio.gather(*gone, return_exceptions=True)
            if self._num_open:
                self._fill(timeout_s)

    def _fill(self, timeout_s: float) -> None:
        """Long requests come for those that were cancelled, or have ended by themselves."""
        self._long = [task for task in self._long if not task.done()]
        while len(self._long) < self._num_long:
            self._long.append(asyncio.create_task(self._another(timeout_s)))

    async def _another(self, timeout_s: float) -> None:
        self._num_longs += 1
        words = " ".join(identifiers(900_000 + self._num_longs))
        prompt = f"{self._shared}\nA long report about {words}:"
        asked = {**self._fixed, "prompt": prompt, "max_tokens": _LONG_TOKENS, "temperature": 1.0}
        with suppress(TransportError):
            body = json.dumps(asked).encode()
            await self._pool.server.send("POST", "/v1/completions", body, timeout_s=timeout_s)


async def load_checks(
    sides: Sides, texts: Sequence[str], checks: Sequence[AuditCheck], minutes: Minutes
) -> AsyncIterator[CheckResult]:
    """One result for every stage that the minutes allow, the first in any case."""
    ratio, took = _CHARACTERS, 0.0
    for number, stage in enumerate(STAGES):
        began = minutes.clock()
        if number and took * stage.in_flight / STAGES[number - 1].in_flight > minutes.left:
            minutes.missed += [f"load: {later.said}" for later in STAGES[number:]]
            return
        shared = shared_text(texts, int(stage.shared_tokens * ratio), number)
        body = {"prompt": shared, "max_tokens": 1, "temperature": 0.0}
        for _ in range(_TRIES):
            first = await sides.arm.ask(body)
            if first.error is None:
                break
        if not first.ok:
            said = first.refused or first.error or ""
            minutes.missed.append(f"load: {stage.said}: {said}")
            return
        ratio = len(shared) / first.prompt_tokens if first.prompt_tokens else ratio
        yield await _stage(sides, stage, _cases(texts, stage, shared, number), checks, minutes)
        took = minutes.clock() - began


def shared_text(texts: Sequence[str], characters: int, number: int) -> str:
    """The beginning that all clients share; of another stage another one."""
    rows, have = [f"# {number}"], 0
    for at in range(characters):
        if have >= characters:
            break
        rows.append(f"{at}. {texts[(at + number) % len(texts)]}")
        have += len(rows[-1]) + 1
    return "\n".join(rows)[:characters]


def _cases(texts: Sequence[str], stage: LoadStage, shared: str, number: int) -> list[Case]:
    found = []
    for at in range(_TIMES * stage.in_flight):
        case = 10_000 * (number + 1) + at
        tag = tag_of(case)
        before = f"{shared}{_CLIENT}{tag}\n"
        found.append(Case(case, f"{before}{texts[at % len(texts)]} ({tag})", _TOKENS, before))
    return found


def tag_of(case: int) -> str:
    """The name of a client, which stands in its prompts only."""
    return f"zq{blake2b(str(case).encode(), digest_size=4).hexdigest()}"


async def _text(sides: Sides, case: Case) -> Look:
    """At temperature 0 the text is that of the same request alone."""
    alone = plain_of(sides)
    given, expected = await sides.arm.greedy(case), await alone.greedy(case, again=sides.control)
    answered(given, expected)
    found = divergence(expected, given)
    if found is None:
        return FINE
    gap, why = found
    if gap is not None and gap <= sides.tie:
        return Look("fine", "near-tie")
    return Look("wrong" if gap is not None and gap > SURE else "differs", why)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a server was seen to do under a load."""

    looks: list[Look]
    bad: list[AuditCheck]
    """Checks that found something."""
    left: list[str]
    """Checks that there was no time for."""
    num_cancelled: int


async def _stage(
    sides: Sides,
    stage: LoadStage,
    cases: Sequence[Case],
    checks: Sequence[AuditCheck],
    minutes: Minutes,
) -> CheckResult:
    """A stage; what is not as it is alone is asked of plain decoding under the same load."""
    every = [*checks[:1], AuditCheck("greedy", "", look=_text), *checks[1:]]
    found = await _loaded(sides, stage, cases, every, minutes)
    if found.left:
        minutes.missed.append(f"load: {', '.join(found.left)} at {stage.said}")
    sentence = f"{stage.said}, {found.num_cancelled} cancelled: answers are those of one alone"
    check = AuditCheck(f"load-{stage.in_flight}", sentence)
    result = judge(check, found.looks, None)
    if result.status not in ("fault", "open") or sides.plain is None:
        return result
    usual = await _loaded(sides.as_plain(), stage, cases, found.bad or every[:1], minutes)
    plain = judge(check, usual.looks, None)
    result = replace(result, plain_answers=plain.answers, plain_wrong=plain.wrong,
                     plain_differs=plain.differs)  # fmt: skip
    both = plain.status == "fault" or plain.status == result.status
    return replace(result, status="both") if both else result


async def _loaded(
    sides: Sides,
    stage: LoadStage,
    cases: Sequence[Case],
    checks: Sequence[AuditCheck],
    minutes: Minutes,
) -> _Loaded:
    turns = OneAtATime()
    shared = cases[0].before.rpartition(_CLIENT)[0]
    churned = _Churned(sides.arm, stage.in_flight // 4, shared)
    manner = {**sides.arm.manner, "pool": churned}
    loaded = Asker(**manner, turns=turns, in_flight=stage.in_flight)
    loaded.heard = sides.arm.heard
    alone = Asker(**sides.arm.manner, turns=turns, in_flight=1)
    under = replace(sides, arm=loaded, plain=alone)
    looks: list[Look] = []
    bad: list[AuditCheck] = []
    left: list[str] = []
    for at, check in enumerate(checks):
        if at and minutes.left < 0:
            left = [one.name for one in checks[at:]]
            break
        assert check.look is not None, check.name
        asked = cases if not at else cases[: stage.in_flight]
        look_at = _in_time(check, cases[: stage.in_flight], minutes)
        for case, look in zip(asked, await looks_at(look_at, under, asked), strict=True):
            if look.sort in ("wrong", "differs"):
                [usual] = await looks_at(check.look, under.as_plain(), [case])
                if usual.sort == look.sort:
                    look = replace(FINE, counts=look.counts)
            if look.sort in ("wrong", "differs") and check not in bad:
                bad.append(check)
            looks.append(replace(look, why=f"{check.name}: {look.why}" if look.why else ""))
    words = {word: tag_of(case.number) for case in cases
             for word in (tag_of(case.number), *identifiers(case.number))}  # fmt: skip
    leaks = [_leaked(reply, words) for reply in loaded.replies if reply.ok]
    sides.arm.num_asked += loaded.num_asked + alone.num_asked + churned.num_cancelled
    sides.arm.replies += loaded.replies
    return _Loaded([*leaks, *looks], bad, left, churned.num_cancelled)


def _in_time(
    check: AuditCheck, first: Sequence[Case], minutes: Minutes
) -> Callable[[Sides, Case], Awaitable[Look]]:
    """A check's look, without those clients beyond the `first` that there is no time for."""

    async def look(sides: Sides, case: Case) -> Look:
        assert check.look is not None, check.name
        if case.number > first[-1].number and minutes.left < 0:
            return Look("unasked", "no time was left")
        return await check.look(sides, case)

    return look


def _leaked(reply: Reply, words: Mapping[str, str]) -> Look:
    """Words of another client; `words` are those of every client with its name."""
    prompt = str(reply.body.get("prompt") or reply.body.get("messages"))
    text = reply.text + "".join(arguments for _, arguments in reply.calls)
    for word, owner in words.items():
        if word in text and word not in prompt:
            own = next((name for name in words.values() if name in prompt), "?")
            said = f"leak: the answer to client {own} has {word!r} of client {owner}'s prompt"
            return Look("wrong", said)
    return FINE


AtDepth = Callable[[int], AbstractAsyncContextManager[Asker]]
"""The server, told to draft so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthPlan:
    """What is looked at with each draft length."""

    depths: Sequence[int]
    cases: Sequence[Case]
    checks: Sequence[AuditCheck]


async def depth_checks(
    sides: Sides, at_depth: AtDepth, plan: DepthPlan, minutes: Minutes
) -> AsyncIterator[CheckResult]:
    """One result for every draft length that the minutes allow, the first in any case; one that the
    server refuses, or does not start with, is `unasked`, and the next is looked at."""
    usual: list[Look] | None = None
    for at, depth in enumerate(plan.depths):
        if at and minutes.left < 0:
            rest = ", ".join(map(str, plan.depths[at:]))
            minutes.missed.append(f"depths: {rest}")
            return
        try:
            async with at_depth(depth) as arm:
                looks = await _looks(plan, replace(sides, arm=arm))
                sides.arm.num_asked += arm.num_asked
                if sides.plain is not None and usual is None:
                    usual = await _looks(plan, sides.as_plain())
        except EndpointError as error:
            looks = [Look("unasked", short(error))]
        sentence = f"drafts of {depth}: texts and copies are right"
        yield judge(AuditCheck(f"depth-{depth}", sentence), looks, usual)


def short(error: EndpointError) -> str:
    """Why a server does not start, and the last line of its log."""
    first, *log = str(error).splitlines()
    return " ".join([first, *log[-1:]])


async def _looks(plan: DepthPlan, sides: Sides) -> list[Look]:
    found: list[Look] = []
    for check in plan.checks:
        assert check.look is not None, check.name
        found += await looks_at(check.look, sides, plan.cases)
    return found
