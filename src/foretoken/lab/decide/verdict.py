"""From the rules' answers to one word, from several runs to the best of them, and how it is shown.

DO NOT SHIP if a rule that has to pass or may not fail has failed; NOT YET if one that has to pass
is open; else SHIP.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foretoken.lab.decide.evidence import Evidence, RuleResult
from foretoken.lab.decide.ship_policy import ShipPolicy
from foretoken.lab.records.results import AbSummary, ArmSummary

SHIP, DO_NOT_SHIP, NOT_YET = "SHIP", "DO NOT SHIP", "NOT YET"
EXIT_CODES = {SHIP: 0, DO_NOT_SHIP: 1, NOT_YET: 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One rule with its answer."""

    rule: str
    weight: str
    result: RuleResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The verdict on one A/B."""

    run: str
    configuration: str
    """Identifies what would be shipped; runs of one configuration differ in load."""
    load: float
    """Requests per second of the candidate."""
    verdict: str
    sentence: str
    rules: tuple[Judged, ...]
    num_blocks: int
    look: int
    needed_blocks: int | None
    """Blocks in total that should settle what is open; None if blocks are not what is missing."""
    more_seconds: float | None
    """How long the missing blocks take, from those that were run."""
    break_even_rate: float | None
    speed_up_low: float
    """Lower end of the speed-up, by which configurations are ranked."""


def decide(
    summary: AbSummary, policy: ShipPolicy, *, run: str = "", reference: ArmSummary | None = None
) -> Decision:
    """Judge one A/B by every rule of the policy."""
    evidence = Evidence(summary=summary, slo=policy.slo, reference=reference)
    rules = tuple(
        Judged(
            rule=rule.kind.name,
            weight=rule.weight,
            result=rule.kind.judge(evidence, rule.parameters),
        )
        for rule in policy.rules
    )
    failed = [j for j in rules if j.weight != "note" and j.result.outcome == "fail"]
    still_open = [j for j in rules if j.weight == "must" and j.result.outcome == "inconclusive"]
    verdict = DO_NOT_SHIP if failed else (NOT_YET if still_open else SHIP)
    needed = _needed(evidence, still_open) if verdict == NOT_YET else None
    return Decision(
        run=run,
        configuration=_configuration(evidence.candidate),
        load=evidence.candidate.requests_per_s,
        verdict=verdict,
        sentence=_sentence(verdict, rules, failed, still_open),
        rules=rules,
        num_blocks=evidence.num_blocks,
        look=summary.look,
        needed_blocks=needed,
        more_seconds=_seconds(evidence, needed),
        break_even_rate=evidence.break_even_rate,
        speed_up_low=_speed_up_low(rules),
    )


def _sentence(
    verdict: str, rules: Sequence[Judged], failed: list[Judged], still_open: list[Judged]
) -> str:
    if verdict == DO_NOT_SHIP:
        return "; ".join(f"{j.rule}: {j.result.says}" for j in failed)
    if verdict == NOT_YET:
        return "; ".join(f"{j.rule}: {j.result.says}" for j in still_open)
    unknown = [j.rule for j in rules if j.weight == "veto" and j.result.outcome == "inconclusive"]
    held = sum(j.result.outcome == "pass" for j in rules)
    return f"{held} of {len(rules)} rules hold" + (
        f"; not tested: {', '.join(unknown)}" if unknown else ""
    )


def _needed(evidence: Evidence, still_open: list[Judged]) -> int | None:
    """The most blocks that an open rule asks for; requests are turned into blocks."""
    wanted = [j.result.needed_blocks or 0 for j in still_open]
    per_block = evidence.candidate.num_requests / max(1, evidence.num_blocks)
    for judged in still_open:
        if judged.result.needed_requests and per_block:
            wanted.append(math.ceil(judged.result.needed_requests / per_block))
    return max(wanted, default=0) or None


def _seconds(evidence: Evidence, needed: int | None) -> float | None:
    have = evidence.num_blocks
    if needed is None or not have:
        return None
    spent = sum(arm.duration_s for arm in (evidence.baseline, evidence.candidate))
    return spent / have * max(0, needed - have)


def _speed_up_low(rules: Sequence[Judged]) -> float:
    values = [j.result.value for j in rules if j.rule == "speedup" and j.result.value]
    return values[0].low if values and math.isfinite(values[0].low) else 0.0


def _configuration(arm: ArmSummary) -> str:
    server = arm.server
    parts = (arm.arm, server.engine, server.model, server.command, server.speculation)
    return json.dumps(parts, sort_keys=True, default=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overall:
    """The verdict over several runs."""

    verdict: str
    sentence: str
    best: Decision
    """The run that decides: of the best configuration, the load that speaks most against it."""


_ORDER = (SHIP, NOT_YET, DO_NOT_SHIP)


def best_decision(decisions: Sequence[Decision]) -> Overall:
    """The best configuration, each counted by the load at which it does worst.

    A gain with one request in flight ships nothing if it is lost at a load that was measured too.
    """
    groups: dict[str, list[Decision]] = defaultdict(list)
    for decision in decisions:
        groups[decision.configuration].append(decision)
    worst = [max(group, key=_badness) for group in groups.values()]
    best = min(worst, key=_badness)
    return Overall(
        verdict=best.verdict,
        sentence=_by_load(best, groups[best.configuration]),
        best=best,
    )


def _badness(decision: Decision) -> tuple[int, float]:
    return _ORDER.index(decision.verdict), -decision.speed_up_low


def _by_load(decision: Decision, group: Sequence[Decision]) -> str:
    """The sentence of a verdict, with the loads at which the configuration would ship."""
    shipping = sorted(d.load for d in group if d.verdict == SHIP)
    if len(group) == 1 or decision.verdict == SHIP or not shipping:
        return decision.sentence
    loads = ", ".join(f"{load:.2g}" for load in shipping)
    return (
        f"at {decision.load:.2g} requests/s: {decision.sentence}. It would ship at {loads} "
        "requests/s: let k fall to 0 above, or leave the other loads out"
    )


COLOURS = {SHIP: "green", DO_NOT_SHIP: "red", NOT_YET: "yellow"}
MARKS = {"pass": "green", "fail": "bold red", "inconclusive": "yellow"}


def print_decision(console: Console, decision: Decision, *, full: bool = True) -> None:
    """The verdict's panel, and with `full` the rules below it."""
    colour = COLOURS[decision.verdict]
    body = Text(decision.sentence)
    if decision.needed_blocks is not None:
        body.append(f"\n{measure_more(decision)}", style="bold")
    console.print(
        Panel(body, title=f"[bold {colour}]{decision.verdict}[/] {decision.run}",
              title_align="left", border_style=colour)
    )  # fmt: skip
    if full:
        console.print(_rules(decision.rules))


def measure_more(decision: Decision) -> str:
    """What is missing, in blocks and minutes."""
    needed = decision.needed_blocks or 0
    more = max(0, needed - decision.num_blocks)
    return f"measure {more} more blocks ({needed} in all{_took(decision)}) and decide again"


def _took(decision: Decision) -> str:
    if not decision.more_seconds:
        return ""
    minutes = decision.more_seconds / 60
    return f", about {minutes:.0f} minutes" if minutes >= 1.5 else ", a minute or less"


def _rules(rules: Sequence[Judged]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("rule", "weight", "answer", "what was seen"):
        table.add_column(name, no_wrap=name != "what was seen", overflow="fold")
    for judged in rules:
        result = judged.result
        style = "dim" if judged.weight == "note" else MARKS[result.outcome]
        text = Text(result.says, style="dim" if judged.weight == "note" else "")
        missing = [
            f"{n} {what} in all"
            for n, what in ((result.needed_blocks, "blocks"), (result.needed_requests, "requests"))
            if n
        ]
        if missing:
            text.append(f"\n-> {', '.join(missing)}", style="italic")
        if result.advice and result.outcome != "pass":
            text.append(f"\n-> {result.advice}", style="italic")
        table.add_row(
            judged.rule,
            judged.weight,
            Text(result.outcome, style=style),
            text,
        )
    return table
