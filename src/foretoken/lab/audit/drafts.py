"""What became of the drafts during an audit: stretches that no chance explains, and drift.

Servers had an acceptance of exactly 0 for hours while they wrote loops, and nobody looked. The
counters of the metrics page are read again and again while all other checks run; where a server has
none, what answers tell of their own drafts stands in. A stretch is a fault if its chance is small
by what all else of the same audit shows.

Drift is no fault of a server: a drafter that was trained on short texts is worth less behind long
ones. It is measured, and held against what was published for the drafter (cards.toml).
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from foretoken.lab.audit.asking import Asker, Case, Reply
from foretoken.lab.audit.copies import SURE
from foretoken.lab.audit.judging import (
    ERROR,
    FINE,
    AuditCheck,
    CheckResult,
    Look,
    Sides,
    answered,
    judge,
    looks_at,
)
from foretoken.lab.audit.pressure import Clock, Minutes, shared_text
from foretoken.lab.audit.rounding import divergence
from foretoken.lab.http.client import PER_POSITION, scrape
from foretoken.lab.http.timed import Pool
from foretoken.lab.plain import read_table

_EVERY = 12
"""Replies between two looks at the metrics."""
_ROUNDS, _OF_ROUND, _TOKENS = 6, 8, 64
_ENOUGH = 1000
"""Drafts that an acceptance of 0 or 1 from beginning to end is believed for."""
_LONGEST_LOOP = 400
"""Characters of what is repeated."""
_STRUCTURED = ("grammars", "tools")
"""Checks whose drafts a grammar decides."""
_SPEC = "vllm:spec_decode_num_"
CONTEXTS = (500, 2_000, 8_000, 20_000)
_ANSWERS = 6
_FEW_STEPS = 30
_FALLS, _BELOW = 0.7, 0.6
"""Shares of the length at short context, and of the card's, below which it is said."""


@dataclass(frozen=True, slots=True)
class DraftWindow:
    """Drafts between two looks."""

    part: str
    """Which check asked."""
    begin_s: float
    end_s: float
    steps: int
    drafted: int
    accepted: int
    by_position: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted


class DraftWatch:
    """Reads the counters while others ask."""

    def __init__(self, pool: Pool, clock: Clock) -> None:
        self.windows: list[DraftWindow] = []
        self.part = ""
        self.began = clock()
        self._pool, self._clock = pool, clock
        self._last: dict[str, float] | None = None
        self._last_s = self.began
        self._mute = False
        self._heard = 0

    @property
    def silence(self) -> str:
        """Why there are no windows."""
        told = self._last is not None
        return "the server drafted nothing" if told else "the server tells nothing of its drafts"

    async def heard(self, reply: Reply) -> None:
        """A reply came, of any check."""
        told = reply.acceptance
        if self._mute and told is not None and told.num_steps:
            at = self._clock()
            given = (told.num_steps, told.num_drafted, told.num_accepted)
            self.windows.append(DraftWindow(self.part, self._last_s, at, *given))
            self._last_s = at
        self._heard += 1
        if self._heard % _EVERY == 0:
            await self.look()

    async def look(self) -> None:
        """End a window now."""
        if self._mute:
            return
        now, at = await scrape(self._pool), self._clock()
        if now is None or f"{_SPEC}drafts" not in now:
            self._mute = now is None or self._last is None
            return
        before, self._last = self._last or now, now
        grown = {name: max(0, int(value - before.get(name, 0.0))) for name, value in now.items()}
        steps, drafted, accepted = (
            grown.get(_SPEC + what, 0) for what in ("drafts", "draft_tokens", "accepted_tokens")
        )
        names = [name for name in grown if name.startswith(f"{PER_POSITION}.")]
        by_position = [grown[name] for name in sorted(names, key=lambda n: int(n.split(".")[-1]))]
        if drafted:
            window = (self.part, self._last_s, at, steps, drafted, accepted, tuple(by_position))
            self.windows.append(DraftWindow(*window))
        self._last_s = at


def stretches(windows: Sequence[DraftWindow], *, accepted: bool) -> list[tuple[int, int, float]]:
    """Runs of windows in which every draft was `accepted`, or none: first, behind the last, and the
    chance of it by the rest."""
    pinned = [one.accepted == (one.drafted if accepted else 0) for one in windows]
    rest = [one.rate for one, is_so in zip(windows, pinned, strict=True) if not is_so]
    found, begin = [], None
    for at, is_so in enumerate([*pinned, False]):
        if is_so and begin is None:
            begin = at
        if is_so or begin is None:
            continue
        run, first = windows[begin:at], begin
        begin = None
        if not rest:
            enough = sum(one.drafted for one in run) >= _ENOUGH
            found += [(first, at, 0.0)] if enough else []
            continue
        # A step accepts something at least as often as one of its drafts is accepted.
        usual = float(np.quantile(rest, 0.75 if accepted else 0.25))
        chance = usual if accepted else 1.0 - usual
        trials = sum(one.drafted if accepted else one.steps for one in run)
        found.append((first, at, min(1.0, chance**trials * len(windows))))
    return [one for one in found if one[2] < ERROR]


def loops(text: str) -> bool:
    """Whether a text ends in the same few characters again and again."""
    return any(
        len(tail := text[-6 * size :]) >= 24 and tail == text[-size:] * 6
        for size in range(1, 1 + min(len(text) // 6, _LONGEST_LOOP))
    )


def _odd_run(flags: Sequence[bool]) -> tuple[int, int] | None:
    """The longest run of odd answers, if its chance is small by how many others are odd."""
    best, begin = (0, 0), 0
    for at, odd in enumerate([*flags, False]):
        if not odd:
            best = max(best, (at - begin, begin))
            begin = at + 1
    length, first = best
    others = len(flags) - length
    share = (sum(flags) - length + 1) / (others + 2)
    return (first, length) if length >= 3 and share**length * len(flags) < ERROR else None


async def zero_check(
    sides: Sides, cases: Sequence[Case], watch: DraftWatch, minutes: Minutes
) -> CheckResult:
    """Stretches of acceptance, loops among drawn answers, and greedy answers that have become
    others since the audit began."""
    watch.part = "zero"
    flags: list[tuple[float, bool]] = []
    first = ""
    for number in range(_ROUNDS):
        if number and minutes.left < 0:
            minutes.missed.append(f"zero: {_ROUNDS - number} of {_ROUNDS} rounds")
            break
        await watch.look()
        asked = [_drawn(cases, number * _OF_ROUND + at) for at in range(_OF_ROUND)]
        replies = [await sides.arm.ask(body) for body in asked]  # in a row, as stretches are
        first = first or next((one.refused or one.error or "" for one in replies if not one.ok), "")
        flags += [(minutes.clock() - watch.began, loops(one.text)) for one in replies if one.ok]
    await watch.look()
    looks = [FINE] * bool(flags)
    found = _odd_run([odd for _, odd in flags])
    if found is not None:
        at, length = found
        said = f"{length} drawn answers in a row repeat themselves, from {flags[at][0]:.0f} s on"
        looks.append(Look("wrong", said))
    looks += _pinned(watch)
    looks += await looks_at(_later, sides, cases[:_OF_ROUND])
    sentence = "no stretch of acceptance at 0 or 1, no loops, no answer that changed with time"
    result = judge(
        AuditCheck("zero", sentence, comparisons=4), looks or [Look("unasked", first)], None
    )
    if not watch.windows:
        minutes.missed.append(f"zero: acceptance, since {watch.silence}")
    return result


def _drawn(cases: Sequence[Case], number: int) -> dict[str, Any]:
    case = cases[number % len(cases)]
    return {"prompt": case.prompt, "max_tokens": _TOKENS, "temperature": 1.0}


def _pinned(watch: DraftWatch) -> list[Look]:
    looks = []
    of_text = [one for one in watch.windows if one.part not in _STRUCTURED]
    # Checks ask for texts of other kinds, so a stretch is held against the rest of its own.
    parts = dict.fromkeys(one.part for one in of_text)
    groups = [(False, [one for one in of_text if one.part == part]) for part in parts]
    if not any(one.accepted for one in of_text):
        groups = [(False, of_text)]
    # Only a drawn text of the model's own has to surprise its drafter now and then.
    groups.append((True, [one for one in of_text if one.part == "zero"]))
    for accepted, windows in groups:
        for begin, end, chance in stretches(windows, accepted=accepted):
            run = windows[begin:end]
            drafted = sum(one.drafted for one in run)
            from_s, to_s = (at - watch.began for at in (run[0].begin_s, run[-1].end_s))
            said = (
                f"acceptance exactly {int(accepted)} of {drafted} drafts from {from_s:.0f} s to "
                f"{to_s:.0f} s after the start"
            )
            whole = end - begin == len(windows)
            more = ", and nothing else" if whole else f"; by the rest a chance of {chance:.0e}"
            looks.append(Look("differs" if whole and accepted else "wrong", said + more))
    return looks


async def _later(sides: Sides, case: Case) -> Look:
    """A greedy answer is what it was when the audit began."""
    first = await sides.arm.greedy(case)
    body = {key: first.body[key] for key in ("prompt", "max_tokens", "temperature")}
    later = await sides.arm.told(body)
    answered(first, later)
    found = divergence(first, later)
    if found is None:
        return FINE
    gap, why = found
    if gap is None or gap <= SURE:
        return Look("fine", "near-tie" if gap is not None and gap <= sides.tie else "")
    return Look("wrong", f"a greedy answer has become another since: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCard:
    """What is published for a drafter."""

    name: str
    lengths: dict[str, float]
    source: str
    thread: str
    trained: int | None = None

    @property
    def least(self) -> tuple[str, float]:
        """The workload with the lowest length, and that."""
        return min(self.lengths.items(), key=lambda one: one[1])


@cache
def _cards() -> tuple[PublishedCard, ...]:
    rows = read_table("foretoken.lab.audit", "cards.toml")["cards"]
    return tuple(PublishedCard(**row) for row in rows)


def card_of(drafter: str) -> PublishedCard | None:
    """What is published for a drafter, by its name."""
    return next((card for card in _cards() if re.search(card.name, drafter.lower())), None)


@dataclass(slots=True)
class _AtContext:
    """Acceptance behind so many tokens."""

    tokens: int
    steps: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    """By answer."""

    @property
    def length(self) -> float:
        return 1.0 + self.accepted / self.steps


async def drift_check(
    arm: Asker, texts: Sequence[str], watch: DraftWatch, minutes: Minutes, drafter: str
) -> CheckResult:
    """Acceptance by context, by position and by answer, beside what is published."""
    watch.part = "drift"
    check = AuditCheck("drift", "acceptance at longer contexts, beside the drafter's card")
    found: list[_AtContext] = []
    refused, took = "", 0.0
    for at, tokens in enumerate(CONTEXTS):
        began = minutes.clock()
        if at and took * tokens / CONTEXTS[at - 1] > minutes.left:
            later = ", ".join(f"{one:,}" for one in CONTEXTS[at:])
            minutes.missed.append(f"drift: contexts of {later} tokens")
            break
        behind = await _behind(arm, texts, watch, tokens)
        if isinstance(behind, str):
            refused = behind
            minutes.missed.append(f"drift: contexts from {tokens:,} tokens on: {behind}")
            break
        found += [behind] if behind.steps else []
        took = minutes.clock() - began
    if not found:
        why = refused or watch.silence
        return CheckResult(name=check.name, sentence=check.sentence, status="unasked", why=why)
    told, odd = _said(found, drafter)
    result = CheckResult(name=check.name, sentence=check.sentence, status="ok", told=tuple(told))
    return replace(result, status="open", why=odd) if odd else result


async def _behind(
    arm: Asker, texts: Sequence[str], watch: DraftWatch, tokens: int
) -> _AtContext | str:
    """Greedy answers behind one shared beginning; why not, if they are refused."""
    shared, behind = shared_text(texts, 4 * tokens, tokens), _AtContext(tokens)
    await watch.look()
    known = len(watch.windows)
    prompts = [f"{shared}\n\n{texts[at % len(texts)]}" for at in range(_ANSWERS)]
    asked = [{"prompt": one, "max_tokens": _TOKENS, "temperature": 0.0} for one in prompts]
    # The first leaves the beginning in the cache.
    replies = [await arm.ask(asked[0]), *await asyncio.gather(*map(arm.ask, asked[1:]))]
    lost = [one.refused or one.error or "" for one in replies if not one.ok]
    if len(lost) == len(replies) or any(one.refused for one in replies):
        return lost[0]
    for reply in (one for one in replies if one.ok):
        behind.tokens = reply.prompt_tokens or behind.tokens
        own = reply.acceptance
        if own is not None and own.num_steps:
            behind.lengths.append(own.length)
            _add(behind.by_position, [sum(own.histogram[j:]) for j in range(1, len(own.histogram))])
    await watch.look()
    for window in watch.windows[known:]:
        behind.steps += window.steps
        behind.accepted += window.accepted
        if not behind.lengths:
            _add(behind.by_position, window.by_position)
    return behind


def _add(to: list[int], more: Sequence[int]) -> None:
    to += [0] * (len(more) - len(to))
    for place, count in enumerate(more):
        to[place] += count


def _said(found: Sequence[_AtContext], drafter: str) -> tuple[list[str], str]:
    """What was measured, in lines, and what is odd of it."""
    told = [f"{one.length:.2f} tokens a step behind {one.tokens:,} tokens" for one in found]
    first, last = found[0], found[-1]
    if first.by_position:
        rates = ", ".join(f"{count / first.steps:.2f}" for count in first.by_position)
        told.append(f"by position: {rates}")
    if len(last.lengths) > 1:
        told.append(f"by answer: {min(last.lengths):.2f} to {max(last.lengths):.2f}")
    card = card_of(drafter)
    if card is None:
        told.append(f"no published length for {drafter or 'a drafter without a name (--method)'}")
    else:
        published = ", ".join(f"{value:.2f} {name}" for name, value in card.lengths.items())
        told.append(f"published: {published} ({card.source})")
    odd = []
    worst = min((one for one in found if one.steps >= _FEW_STEPS), key=lambda one: one.length,
                default=None)  # fmt: skip
    if card is not None and worst is not None and worst.length < _BELOW * card.least[1]:
        workload, least = card.least
        share = f"{worst.length / least:.0%} of the card's {least:.2f} ({workload})"
        odd.append(f"{worst.length:.2f} tokens a step behind {worst.tokens:,} tokens are {share}")
    if min(first.steps, last.steps) >= _FEW_STEPS and last.length < _FALLS * first.length:
        between = f"from {first.length:.2f} to {last.length:.2f}"
        odd.append(f"acceptance falls with the context, {between}")
    if odd and card is not None and card.trained and last.tokens > card.trained:
        odd.append(f"such drafters were trained on {card.trained:,} tokens: {card.thread}")
    return told, "; ".join(odd)
