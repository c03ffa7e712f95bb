"""Rules about classes of requests: does one lose while another wins, and whose is a lost tail?

A class is a category, a temperature or a length of prompt. It is judged by the gains of its own
requests, run alone where the A/B did so, else inside the mix. Where nothing was timed by class,
acceptance against break-even stands in.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.lab.decide.evidence import (
    Evidence,
    RuleKind,
    RuleResult,
    against_break_even,
    blocks_to_support,
    show,
    show_metric,
)
from foretoken.lab.decide.rules.speed import Nothing
from foretoken.lab.records.results import ArmGain, ClassGains
from foretoken.lab.stats.intervals import Interval
from foretoken.lab.stats.ratios import at_level

SPLIT = "split the traffic"
"""How the answer begins where some classes win and others lose."""
MIDDLE, TAILS = "tpot_p50", ("tpot_p99", "tpot_p95")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassesJudged:
    """Which classes surely lose and which surely win, all of them judged at once."""

    losing: tuple[str, ...]
    """Each with its gain, interval and requests."""
    winning: tuple[str, ...]
    names: tuple[str, ...]
    """The names of those that lose."""
    alone: bool
    """Whether they were run alone, so that no other class can be to blame."""


def judge_classes(evidence: Evidence) -> ClassesJudged | None:
    """The classes of the first dimension that tells them apart; None if none was timed."""
    summary = evidence.summary
    if len(summary.diagnosis) > 1:
        return _judge(evidence, summary.diagnosis, alone=True)
    found = None
    for by in dict.fromkeys(own.by for own in summary.classes):
        judged = _judge(evidence, [c for c in summary.classes if c.by == by], alone=False)
        if judged.losing and judged.winning:
            return judged
        found = found or judged
    return found


def _judge(evidence: Evidence, classes: Sequence[ClassGains], *, alone: bool) -> ClassesJudged:
    # Several classes are looked at, so each has its share of the error of one look.
    level = 1 - (1 - evidence.level) / len(classes)
    losing, winning, names = [], [], []
    for own in classes:
        lost, won = _lost(own, level), _won(own, level)
        if lost:
            losing.append(lost)
            names.append(own.name)
        elif won:
            winning.append(won)
    return ClassesJudged(
        losing=tuple(losing), winning=tuple(winning), names=tuple(names), alone=alone
    )


def _lost(own: ClassGains, level: float) -> str:
    """The class with the gain that is surely below 1: its median, else a tail; else nothing."""
    for metric in (MIDDLE, *TAILS):
        gain = own.gain(metric)
        if gain is not None and gain.enough and _at(gain, level).high < 1.0:
            return _told(own, gain, level)
    return ""


def _won(own: ClassGains, level: float) -> str:
    gain = own.gain(MIDDLE)
    if gain is None or not gain.enough or not gain.ratio.known:
        return ""
    return _told(own, gain, level) if _at(gain, level).low > 1.0 else ""


def _told(own: ClassGains, gain: ArmGain, level: float) -> str:
    seen, metric = show(_at(gain, level)), show_metric(gain.metric)
    return f"{own.name} {seen} ({metric}, {gain.num_pairs} requests)"


def _at(gain: ArmGain, level: float) -> Interval:
    return at_level(gain.ratio, gain.num_blocks, level)


def homogeneous(evidence: Evidence, _: Nothing) -> RuleResult:
    """No class loses while another wins."""
    judged = judge_classes(evidence)
    if judged is None:
        return _by_acceptance(evidence)
    if not judged.losing:
        won = f"no class loses; {', '.join(judged.winning)}" if judged.winning else (
            "no class surely loses or wins"
        )  # fmt: skip
        return RuleResult(outcome="pass", says=won)
    where = "run alone" if judged.alone else "beside the others"
    if not judged.winning:
        says = f"loses {where}: {'; '.join(judged.losing)}; no class surely wins"
        return RuleResult(outcome="fail", says=says, advice="leave speculation off")
    lost, won = "; ".join(judged.losing), "; ".join(judged.winning)
    return RuleResult(
        outcome="fail",
        says=f"{SPLIT}: loses {where}: {lost}; wins: {won}",
        advice=f"{', '.join(judged.names)} to a server without speculation, the rest to the other",
    )


def _by_acceptance(evidence: Evidence) -> RuleResult:
    limit = evidence.break_even
    classes = [b for b in evidence.candidate.acceptance if b.by in ("category", "temperature")]
    if limit is None or not classes:
        return RuleResult(outcome="inconclusive", says="one class of requests only")
    judged = {f"{b.by} {b.value}": against_break_even(b.rate, limit) for b in classes}
    losing = [name for name, outcome in judged.items() if outcome == "fail"]
    winning = [name for name, outcome in judged.items() if outcome == "pass"]
    if losing and winning:
        return RuleResult(
            outcome="fail",
            says=f"{SPLIT}: by acceptance {', '.join(losing)} lose, {', '.join(winning)} win",
            threshold=limit.estimate,
            advice=f"{', '.join(losing)} to a server without speculation, the rest to one with it",
        )
    return RuleResult(outcome="pass", says="no class is on the other side of break-even")


def mixed_workload(evidence: Evidence, _: Nothing) -> RuleResult:
    """If the tail loses: is a class to blame, or that classes share steps?"""
    gains = [evidence.summary.gain(metric) for metric in TAILS]
    usable = [gain for gain in gains if gain is not None and gain.enough and gain.ratio.known]
    lost = [gain for gain in usable if evidence.ratio(gain).high < 1.0]
    if not lost:
        return _tail_holds(gains[0], usable)
    says = f"{show_metric(lost[0].metric)} loses: {show(evidence.ratio(lost[0]))}"
    judged = judge_classes(evidence)
    if judged is not None and judged.losing:
        blame = f"{says}; it is the loss of {', '.join(judged.names)} itself, not of the mix"
        if not judged.alone:
            blame = f"{says}; in this mix {', '.join(judged.names)} loses"
        return RuleResult(outcome="fail", says=blame, advice=_advise(judged))
    if judged is not None and judged.alone:
        return RuleResult(
            outcome="fail",
            says=f"{says}; run alone, no class does: they slow each other down in shared steps",
            advice="split the deployment by class, each with speculation",
        )
    middle = evidence.summary.gain(MIDDLE)
    if middle is None or evidence.ratio(middle).low <= 1.0:
        return RuleResult(outcome="pass", says=f"{says}, and so may the median: no sign of a mix")
    return RuleResult(
        outcome="fail",
        says=f"{says}, the median gains {show(evidence.ratio(middle))}: the sign of a mixture",
        advice="give requests a `category` in the workload, and `foretoken lab ab --diagnose` "
        "runs class by class",
    )


def _advise(judged: ClassesJudged) -> str:
    if not judged.winning:
        return "leave speculation off"
    more = "" if judged.alone else "; `foretoken lab ab --diagnose` tells whether alone, too"
    return f"split the traffic by class: {', '.join(judged.names)} without speculation{more}"


def _tail_holds(p99: ArmGain | None, usable: Sequence[ArmGain]) -> RuleResult:
    """No tail that can be told loses; what a P99 would take, if it cannot."""
    if p99 is None:
        return RuleResult(outcome="inconclusive", says="not measured")
    if p99 in usable:
        return RuleResult(outcome="pass", says="the tail does not surely lose")
    return RuleResult(
        outcome="inconclusive",
        says=f"a P99 takes about 1,000 requests an arm; there are {p99.num_pairs}",
        needed_blocks=blocks_to_support(p99),
    )


CLASS_RULES = (
    RuleKind("mixed_workload", Nothing, mixed_workload),
    RuleKind("homogeneous", Nothing, homogeneous),
)
