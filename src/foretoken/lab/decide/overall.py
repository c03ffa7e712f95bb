"""From the verdicts on several runs to one, with what differs between them by its name.

Runs of one configuration differ in their traffic, and the configuration counts by the worst of
them; configurations compete, and the best one is the answer. Where a configuration pays for part of
its traffic only, the sentence says for which, where the gain passes the limits, and what to do.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.lab.analysis.crossover import Crossing, crossings_along
from foretoken.lab.analysis.dimensions import (
    CLASS,
    CONTEXT,
    LOADS,
    TEMPERATURE,
    Dimension,
    find_dimensions,
    show_value,
    with_unit,
)
from foretoken.lab.decide.decision import Decision
from foretoken.lab.decide.rules import SPLIT
from foretoken.lab.decide.ship_policy import ShipPolicy
from foretoken.lab.records.results import AbSummary
from foretoken.lab.verdict import LEAVE_IT_OFF, MEASURE_MORE, USE_IT, Verdict

Indices = Sequence[int]
Differing = Sequence[Dimension]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overall:
    verdict: str
    says: tuple[str, ...]
    """The answer, what speaks against it, where the gain passes the limits, and cautions."""
    best: Decision
    """The run that decides: of the best configuration, what speaks most against it."""
    dimensions: tuple[Dimension, ...] = ()
    """In what the runs differ; their values are in the order of the runs."""
    crossings: tuple[Crossing, ...] = ()
    """Of the best configuration."""
    in_part: bool = False
    """Whether for part of the traffic it pays, or is still open, though not for all."""

    @property
    def sentence(self) -> str:
        return ". ".join(self.says)

    @property
    def answer(self) -> str:
        return f"{self.verdict} {_PART}" if self.in_part else self.verdict

    @property
    def conclusion(self) -> Verdict:
        own = self.best.conclusion
        if len(self.says) == 1 and not self.in_part:
            return own
        # The first sentence may only name the best configuration; the next is the reason then.
        first = ". ".join(self.says[:2])
        reason = first[:1].lower() + first[1:]
        if self.in_part:
            return Verdict(word=self.verdict, reason=reason, scope=_PART)
        return Verdict(word=self.verdict, reason=reason, command=own.command)


_PART = "for part of the traffic"


def judge_runs(runs: Sequence[tuple[AbSummary, Decision]], policy: ShipPolicy) -> Overall:
    """The best configuration, each counted by the traffic for which it does worst. A gain with one
    request in flight ships nothing if it is lost at a load that was measured too."""
    summaries, decisions = [run for run, _ in runs], [decision for _, decision in runs]
    dimensions = find_dimensions(summaries)
    traffic = [d for d in dimensions if d.is_traffic]
    chosen = [d for d in dimensions if not d.is_traffic]
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in range(len(runs)):
        groups[tuple(d.values[index] for d in chosen)].append(index)
    best = min(groups.values(), key=lambda own: _merit([decisions[i] for i in own]))
    decides = max(best, key=lambda i: _severity(decisions[i]))
    verdict = decisions[decides].verdict
    asked = next((rule.parameters for rule in policy.rules if rule.name == "speedup"), {})
    metric, least = asked.get("metric", "tpot_p50"), asked.get("least", 1.0)
    crossings = crossings_along(summaries, best, dimensions, metric, (least, 1.0))
    pays = sum(decisions[i].verdict == USE_IT for i in best)
    split = bool(_split(decisions[decides]))
    waits = any(decisions[i].verdict == MEASURE_MORE for i in best)
    named = ", ".join(f"{d.name} {d.show(decides)}" for d in chosen)
    says = [
        f"Best of {len(groups)} configurations: {named}" if len(groups) > 1 else "",
        *_by_traffic(decisions, best, traffic, decides),
        *(_upper(found.says) for found in crossings),
    ]
    seen = {d.name: {frozenset(d.values[i] for i in g) for g in groups.values()} for d in traffic}
    unequal = ", ".join(name for name, sets in seen.items() if len(sets) > 1)
    if unequal:
        fair = "Not a fair comparison: the configurations were measured at different"
        says.append(f"{fair} {unequal}")
    return Overall(
        verdict=verdict,
        says=tuple(filter(None, says)),
        best=decisions[decides],
        dimensions=dimensions,
        crossings=crossings,
        in_part=0 < pays < len(best) or (not pays and split) or (verdict == LEAVE_IT_OFF and waits),
    )


def _merit(own: Sequence[Decision]) -> tuple[float, ...]:
    """The worst run first; among equals the share that pays, then that which still may."""
    worst = max(map(_severity, own))
    pays = sum(d.verdict == USE_IT for d in own) / len(own)
    waits = sum(d.verdict == MEASURE_MORE and d.valid for d in own) / len(own)
    return worst[0], -pays, -waits, worst[1]


def _severity(decision: Decision) -> tuple[int, float]:
    """How much a run speaks against its configuration: what is lost for part of the traffic stays
    lost, whatever a run that has to be made anew says."""
    kinds = {USE_IT: 0, MEASURE_MORE: 1 if decision.valid else 2, LEAVE_IT_OFF: 3}
    return kinds[decision.verdict], -decision.speed_up_low


def _split(decision: Decision) -> list[str]:
    """What to do where some classes of requests win inside the run, though not all."""
    return [
        f"{_upper(j.result.says)}: {j.result.advice}"
        for j in decision.rules
        if j.result.outcome == "fail" and j.result.says.startswith(SPLIT)
    ]


def _by_traffic(
    decisions: Sequence[Decision], own: Indices, traffic: Differing, decides: int
) -> list[str]:
    differing = [d for d in traffic if len({d.values[i] for i in own}) > 1]
    if not differing:
        split = _split(decisions[decides])
        last = _upper(_reason(decisions[decides])) if split else decisions[decides].sentence
        return [*split, last]
    pays, waiting, lost, broken = (
        [i for i in own if (decisions[i].verdict, decisions[i].valid) == kind]
        for kind in ((USE_IT, True), (MEASURE_MORE, True), (LEAVE_IT_OFF, True),
                     (MEASURE_MORE, False))
    )  # fmt: skip
    against = f"{_places(differing, [decides])}: {_reason(decisions[decides])}"
    if len(pays) == len(own):
        where = _places(differing, pays)
        return [f"It pays wherever it was measured ({where}), least at {against}"]
    says = [f"It pays at {_places(differing, pays)}"] if pays else []
    rest = [i for i in own if i in waiting or i in lost]
    if pays and lost:
        advice = _advice(differing, pays, rest)
        says[0] += f", not at {_places(differing, rest)}: {advice}"
    elif pays and waiting:
        says[0] += f", and is open at {_places(differing, rest)}"
    elif lost and waiting:
        says.append(f"It does not pay at {_places(differing, lost)}")
    elif lost:
        judged = "could be judged" if broken else "was measured"
        says.append(f"It pays at no {' and '.join(d.name for d in differing)} that {judged}")
    if waiting and not pays:
        says.append(f"Open at {_places(differing, waiting)}: {_reason(decisions[waiting[0]])}")
    if lost or (pays and waiting):
        says.append(f"At {against}")
    if broken:
        cause = _reason(decisions[broken[0]])
        says.append(f"It cannot be judged at {_places(differing, broken)}, measure anew: {cause}")
    return says


def _reason(decision: Decision) -> str:
    if decision.verdict != USE_IT:
        return decision.reason
    return next((j.result.says for j in decision.rules if j.rule == "speedup"), "every rule holds")


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _places(differing: Differing, indices: Indices) -> str:
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


def _advice(differing: Differing, pays: Indices, others: Indices) -> str:
    dimension = differing[0]
    if len(differing) == 1 and not dimension.is_number:
        split = "split the traffic" if dimension.name == CLASS else "keep them apart"
        return f"{split}, and serve the latter without speculation"
    if len(differing) == 1:
        good, bad = ([float(dimension.values[i]) for i in own] for own in (pays, others))
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
