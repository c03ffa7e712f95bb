"""From the rules' answers to one word, and how it is shown.

MEASURE MORE if a rule says that the experiment cannot be right; LEAVE IT OFF if one that has to
pass or may not fail has failed; MEASURE MORE if one that has to pass is open; else USE IT.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from foretoken.lab.analysis.whole_time import draft_share_of
from foretoken.lab.decide.rules import RULES, Evidence, RuleResult
from foretoken.lab.decide.ship_policy import ShipPolicy
from foretoken.lab.records.results import AbSummary
from foretoken.lab.verdict import LEAVE_IT_OFF, MEASURE_MORE, USE_IT, Verdict

TAIL_RULES = ("tail_tpot", "ttft", "p99_tpot")
MARKS = {"pass": "green", "fail": "bold red", "inconclusive": "yellow", "invalid": "bold magenta"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    rule: str
    weight: str
    result: RuleResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    run: str
    load: float
    """Requests per second of the candidate."""
    verdict: str
    valid: bool
    """False: the numbers cannot be true, or something else made them; measure anew."""
    sentence: str
    """All that speaks against it; else what is proven, what is not, and what that takes."""
    reason: str
    """The first of it, and how many more there are."""
    command: str
    """What to type next, where the run tells."""
    rules: tuple[Judged, ...]
    num_blocks: int
    look: int
    needed_blocks: int | None
    """Blocks in total that should settle what is open; None if blocks are not what is missing."""
    more_seconds: float | None
    """How long the missing blocks take, from those that were run."""
    break_even_rate: float | None
    """By whole time; None if nothing was drafted or the server counts no verifications."""
    draft_share: float | None
    """Share of the steps that drafted; None if the server counts no verifications."""
    speed_up_low: float
    """Lower end of the speed-up, by which configurations are ranked."""

    @property
    def conclusion(self) -> Verdict:
        reason = self.reason
        if self.needed_blocks is not None:
            minutes = (self.more_seconds or 0.0) / 60
            took = f", about {minutes:.0f} minutes" if minutes >= 1.5 else ", a minute or less"
            took = took if self.more_seconds else ""
            more = max(0, self.needed_blocks - self.num_blocks)
            reason += f"; {more} more blocks would tell ({self.needed_blocks} in all{took})"
        return Verdict(word=self.verdict, reason=reason, command=self.command)


def decide(summary: AbSummary, policy: ShipPolicy, *, run: str = "") -> Decision:
    evidence = Evidence(summary=summary, slo=policy.slo)
    rules = tuple(
        Judged(rule=r.name, weight=r.weight, result=RULES[r.name](evidence, **r.parameters))
        for r in policy.rules
    )
    counted = [j for j in rules if j.weight != "note"]
    broken = [j for j in counted if j.result.outcome == "invalid"]
    failed = [j for j in counted if j.result.outcome == "fail"]
    still_open = [j for j in rules if j.weight == "must" and j.result.outcome == "inconclusive"]
    verdict = MEASURE_MORE if still_open or broken else USE_IT
    if failed and not broken:
        verdict = LEAVE_IT_OFF
    needed = None if broken or failed else _needed(evidence, still_open)
    have, seconds = evidence.num_blocks, None
    if needed is not None and have:
        spent = evidence.baseline.duration_s + evidence.candidate.duration_s
        seconds = spent / have * max(0, needed - have)
    sentence = _sentence(evidence, rules, broken or failed, still_open)
    against = broken or failed or still_open
    others = f"; and {len(against) - 1} more of its rules" if len(against) > 1 else ""
    limit = evidence.break_even
    speed_ups = [j.result.value for j in rules if j.rule == "speedup" and j.result.value]
    low = speed_ups[0].low if speed_ups else 0.0
    return Decision(
        run=run,
        load=evidence.candidate.requests_per_s,
        verdict=verdict,
        valid=not broken,
        sentence=sentence,
        reason=sentence if verdict == USE_IT else against[0].result.says + others,
        command=_next(summary, verdict, needed),
        rules=rules,
        num_blocks=have,
        look=summary.look,
        needed_blocks=needed,
        more_seconds=seconds,
        break_even_rate=limit.estimate if limit is not None else None,
        draft_share=draft_share_of(summary),
        speed_up_low=low if math.isfinite(low) else 0.0,
    )


def _next(summary: AbSummary, verdict: str, needed: int | None) -> str:
    """The server's command that is right; or that of the measurement, which then goes on."""
    if verdict != MEASURE_MORE:
        side = "candidate" if verdict == USE_IT else "baseline"
        settings = summary.config.get(side) or {}
        return str(settings.get("command") or "").replace("{port}", "8000")
    words = [str(word) for word in summary.environment.get("command_line") or ()]
    if needed is None or words[1:3] != ["lab", "ab"]:
        return ""
    return f"{shlex.join(['foretoken', *words[1:]])} --blocks {needed} --resume"


def _sentence(
    evidence: Evidence, rules: Sequence[Judged], against: list[Judged], still_open: list[Judged]
) -> str:
    if against:
        return "; ".join(f"{j.rule}: {j.result.says}" for j in against)
    parts = [f"faster: proven ({j.result.says})" for j in rules
             if j.rule == "speedup" and j.result.outcome == "pass"]  # fmt: skip
    tails = [j for j in rules if j.rule in TAIL_RULES and j.result.outcome == "inconclusive"]
    parts += [f"{j.rule}: {j.result.says}" for j in still_open if j not in tails]
    for judged in tails:
        needed, takes = _needed(evidence, [judged]), ""
        if needed is not None:
            requests = needed * evidence.requests_per_block
            takes = f", about {requests:,.0f} requests an arm would tell"
        parts.append(f"{judged.rule}: unproven ({judged.result.says}){takes}")
    if still_open:
        return "; ".join(parts)
    unknown = [
        j.rule for j in rules
        if j.weight == "veto" and j.result.outcome == "inconclusive" and j not in tails
    ]  # fmt: skip
    held = sum(j.result.outcome == "pass" for j in rules)
    parts.append(f"{held} of {len(rules)} rules hold")
    return "; ".join(parts) + (f"; not tested: {', '.join(unknown)}" if unknown else "")


def _needed(evidence: Evidence, still_open: Sequence[Judged]) -> int | None:
    """The most blocks that an open rule asks for; requests are turned into blocks."""
    size, results = evidence.requests_per_block, [j.result for j in still_open]
    wanted = [r.needed_blocks or 0 for r in results]
    wanted += [math.ceil(r.needed_requests / size) for r in results if r.needed_requests and size]
    return max(wanted, default=0) or None


def rules_table(rules: Sequence[Judged]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("rule", "weight", "answer", "what was seen"):
        table.add_column(name, no_wrap=name != "what was seen", overflow="fold")
    for judged in rules:
        result, dim = judged.result, "dim" if judged.weight == "note" else ""
        text = Text(result.says, style=dim)
        for line in result.asks:
            text.append(f"\n-> {line}", style="italic")
        outcome = Text(result.outcome, style=dim or MARKS[result.outcome])
        table.add_row(judged.rule, judged.weight, outcome, text)
    return table
