"""Runs with their verdicts, and from several verdicts to one, with what differs between the runs.

Runs of one configuration differ in their traffic, and the configuration counts by the worst of
them; configurations compete, and the best one is the answer. Where a configuration pays for part of
its traffic only, the sentence says for which, where the gain passes the limits, and what to do.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretoken.lab.analysis.dimensions import (
    CLASS,
    CONTEXT,
    LOADS,
    TEMPERATURE,
    Crossing,
    Dimension,
    crossings_along,
    find_dimensions,
    show_value,
    with_unit,
)
from foretoken.lab.analysis.summary import counted
from foretoken.lab.analysis.warm_up import without_start
from foretoken.lab.decide.decision import Decision, decide
from foretoken.lab.decide.rules import SPLIT
from foretoken.lab.decide.ship_policy import ShipPolicy
from foretoken.lab.records.results import AbSummary, AcceptanceBucket, ArmSummary, RequestRecord
from foretoken.lab.records.run_files import ab_folders, read_ab, read_requests
from foretoken.lab.verdict import LEAVE_IT_OFF, MEASURE_MORE, USE_IT, Verdict

_PART = "for part of the traffic"


@dataclass(frozen=True, slots=True)
class JudgedRun:
    summary: AbSummary
    decision: Decision

    @property
    def arms(self) -> tuple[ArmSummary, ArmSummary]:
        return self.summary.arm(self.summary.baseline), self.summary.arm(self.summary.candidate)

    @property
    def drafts(self) -> AcceptanceBucket | None:
        return self.arms[1].all_drafts

    def read_requests(self) -> list[RequestRecord]:
        """Its requests, those of a slow start marked as warm-up, as in the summary. Raises
        ConfigError: only that is there, or a line is broken."""
        return without_start(read_requests(Path(self.decision.run))).records

    @property
    def answers(self) -> tuple[list[RequestRecord], list[RequestRecord]]:
        """Whole answers of the baseline and of the candidate. Raises ConfigError, as above."""
        requests = self.read_requests()
        base, other = (counted(requests, arm.arm) for arm in self.arms)
        return base, other


def read_runs(folders: Sequence[Path], policy: ShipPolicy) -> tuple[JudgedRun, ...]:
    """Read the summary of every run, of a grid of every cell, and judge it. Raises ConfigError: a
    folder holds no A/B."""
    found = []
    for folder in ab_folders(folders):
        summary = read_ab(folder)
        decision = decide(summary, policy, run=str(folder))
        found.append(JudgedRun(summary, decision))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overall:
    verdict: str
    says: tuple[str, ...]
    """The answer, what speaks against it, where the gain passes the limits, and cautions."""
    best: JudgedRun
    """The run that decides: of the best configuration, what speaks most against it."""
    dimensions: tuple[Dimension, ...] = ()
    """In what the runs differ; their values are in the order of the runs."""
    crossings: tuple[Crossing, ...] = ()
    """Of the best configuration."""
    in_part: bool = False
    """Whether for part of the traffic it pays, or is still open, though not for all."""

    @property
    def answer(self) -> str:
        return f"{self.verdict} {_PART}" if self.in_part else self.verdict

    @property
    def conclusion(self) -> Verdict:
        own = self.best.decision.conclusion
        if len(self.says) == 1 and not self.in_part:
            return own
        # The first sentence may only name the best configuration; the next is the reason then.
        first = ". ".join(self.says[:2])
        reason, scope = first[:1].lower() + first[1:], _PART if self.in_part else ""
        command = "" if self.in_part else own.command
        return Verdict(word=self.verdict, reason=reason, scope=scope, command=command)


_PAYS, _OPEN, _BROKEN, _LOST = range(4)
"""What a run says of its configuration, by how much it speaks against it: what is lost for part of
the traffic stays lost, whatever a run that has to be made anew says."""
_SAID = {
    _PAYS: "It pays at",
    _LOST: "It does not pay at",
    _OPEN: "Open at",
    _BROKEN: "It has to be measured anew at",
}


def _against(run: JudgedRun) -> tuple[int, float]:
    decision = run.decision
    kinds = {USE_IT: _PAYS, MEASURE_MORE: _OPEN if decision.valid else _BROKEN, LEAVE_IT_OFF: _LOST}
    return kinds[decision.verdict], -decision.speed_up_low


def judge_runs(runs: Sequence[JudgedRun], policy: ShipPolicy) -> Overall:
    """The best configuration, each counted by the traffic for which it does worst. A gain with one
    request in flight ships nothing if it is lost at a load that was measured too."""
    summaries, against = [run.summary for run in runs], [_against(run) for run in runs]
    dimensions = find_dimensions(summaries)
    traffic = [d for d in dimensions if d.is_traffic]
    chosen = [d for d in dimensions if not d.is_traffic]
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in range(len(runs)):
        groups[tuple(d.values[index] for d in chosen)].append(index)

    def merit(own: list[int]) -> tuple[float, ...]:
        """The worst run first; among equals the share that pays, then that which still may."""
        kinds, worst = [against[i][0] for i in own], max(against[i] for i in own)
        pays, may = (kinds.count(kind) / len(own) for kind in (_PAYS, _OPEN))
        return worst[0], -pays, -may, worst[1]

    best = min(groups.values(), key=merit)
    decides = max(best, key=lambda i: against[i])
    own, kinds = runs[decides], [against[i][0] for i in best]
    asked = next((rule.parameters for rule in policy.rules if rule.name == "speedup"), {})
    metric, least = asked.get("metric", "tpot_p50"), asked.get("least", 1.0)
    crossings = crossings_along(summaries, best, dimensions, metric, (least, 1.0))
    split = [
        f"{_upper(j.result.says)}: {j.result.advice}"
        for j in own.decision.rules  # some classes of requests win inside the run, though not all
        if j.result.outcome == "fail" and j.result.says.startswith(SPLIT)
    ]
    differing = [d for d in traffic if d.differs(best)]
    named = ", ".join(f"{d.name} {d.show(decides)}" for d in chosen)
    says = [f"Best of {len(groups)} configurations: {named}"] if len(groups) > 1 else []
    if differing:
        says += _by_traffic(differing, {i: runs[i] for i in best})
    else:
        says += [*split, _upper(_reason(own))] if split else [own.decision.sentence]
    says += [_upper(found.says) for found in crossings]
    seen = {d.name: {frozenset(d.values[i] for i in g) for g in groups.values()} for d in traffic}
    unequal = ", ".join(name for name, sets in seen.items() if len(sets) > 1)
    if unequal:
        fair = "Not a fair comparison: the configurations were measured at different"
        says.append(f"{fair} {unequal}")
    some, waits = _PAYS in kinds, {_OPEN, _BROKEN} & set(kinds)
    lost = own.decision.verdict == LEAVE_IT_OFF
    return Overall(
        verdict=own.decision.verdict,
        says=tuple(says),
        best=own,
        dimensions=dimensions,
        crossings=crossings,
        in_part=bool(set(kinds) > {_PAYS} if some else split or (lost and waits)),
    )


def _by_traffic(differing: Sequence[Dimension], runs: Mapping[int, JudgedRun]) -> list[str]:
    """A sentence for each kind of answer: where, the worst reason, what to do where it loses."""
    says = []
    kinds = {kind: [i for i, run in runs.items() if _against(run)[0] == kind] for kind in _SAID}
    for kind, own in kinds.items():
        if own:
            worst = max(own, key=lambda i: _against(runs[i]))
            at = f"at {_places(differing, [worst])}: " if len(own) > 1 else ""
            where = f"{_SAID[kind]} {_places(differing, own)}"
            says.append(f"{where} ({at}{_reason(runs[worst])})")
    if kinds[_PAYS] and kinds[_LOST]:
        says[1] += f": {_advice(differing, kinds[_PAYS], kinds[_LOST])}"
    return says


def _reason(run: JudgedRun) -> str:
    decision = run.decision
    if decision.verdict != USE_IT:
        return decision.reason
    return next((j.result.says for j in decision.rules if j.rule == "speedup"), "every rule holds")


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _places(differing: Sequence[Dimension], indices: Sequence[int]) -> str:
    """`temperature 0 and 0.4`, or every combination where several things differ."""
    if len(differing) == 1:
        [dimension] = differing
        if dimension.is_number:
            indices = sorted(indices, key=lambda i: float(dimension.values[i]))
        shown = list(dict.fromkeys(dimension.show(i) for i in indices))
        listed = " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
        return with_unit(listed, dimension.name)
    combined = [", ".join(f"{d.name} {d.show(i)}" for d in differing) for i in indices]
    return "; ".join(f"({text})" for text in combined)


def _advice(differing: Sequence[Dimension], pays: Sequence[int], lost: Sequence[int]) -> str:
    dimension = differing[0]
    if len(differing) == 1 and not dimension.is_number:
        split = "split the traffic" if dimension.name == CLASS else "keep them apart"
        return f"{split}, and serve the latter without speculation"
    if len(differing) == 1:
        good, bad = ([float(dimension.values[i]) for i in own] for own in (pays, lost))
        if min(bad) > max(good):
            above = _ABOVE.get(dimension.name, "serve what is above without speculation")
            return above.format(show_value(max(good)))
        if max(bad) < min(good):
            return f"serve what is below {show_value(min(good))} without speculation"
    return "speculate for the former only"


_ABOVE = {
    **dict.fromkeys(LOADS, "let k fall to 0 above {}, or leave the other loads out"),
    TEMPERATURE: "serve hotter requests than {} without speculation, or draw drafts from the "
    "draft's distribution there",
    CONTEXT: "serve prompts longer than {} tokens without speculation",
}
