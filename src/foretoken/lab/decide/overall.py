"""From the verdicts on several runs to one, with what differs between them by its name.

Runs of one configuration differ in their traffic, and the configuration counts by the worst of
them; configurations compete, and the best one is the answer. Where a configuration ships for part
of its traffic only, the sentence says for which, where the gain passes the limits, and what to do.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.lab.analysis.dimensions import (
    CLASS,
    CONTEXT,
    LOADS,
    TEMPERATURE,
    Dimension,
    find_dimensions,
    show_value,
)
from foretoken.lab.decide.crossings import NamedCrossing, crossings_along, with_unit
from foretoken.lab.decide.rules.classes import SPLIT
from foretoken.lab.decide.ship_policy import ShipPolicy
from foretoken.lab.decide.verdict import DO_NOT_SHIP, INVALID, NOT_YET, SHIP, Decision
from foretoken.lab.records.results import AbSummary

MOST_OTHERS = 4
"""Configurations that are told of beside the best."""
Pair = tuple[AbSummary, Decision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overall:
    """The verdict over several runs."""

    verdict: str
    says: tuple[str, ...]
    """The answer, what speaks against it, where the gain passes the limits, and cautions."""
    best: Decision
    """The run that decides: of the best configuration, what speaks most against it."""
    dimensions: tuple[Dimension, ...] = ()
    """In what the runs differ; their values are in the order of the runs."""
    crossings: tuple[NamedCrossing, ...] = ()
    """Of the best configuration."""
    ships_for_some: bool = False
    """Whether it would ship for part of the traffic, though not for all."""
    open_for_some: bool = False
    """Whether more measuring may still tell for part of the traffic."""

    @property
    def sentence(self) -> str:
        """All that it says, in a row."""
        return ". ".join(self.says)

    @property
    def answer(self) -> str:
        """The verdict for someone who reads no further."""
        if self.ships_for_some:
            return "For part of the traffic only"
        if self.verdict == DO_NOT_SHIP and self.open_for_some:
            return "Not for all of the traffic"
        return _ANSWERS.get(self.verdict, "These numbers cannot be judged")


_ANSWERS = {
    SHIP: "Yes, speculate",
    NOT_YET: "Not known yet: measure more",
    DO_NOT_SHIP: "No, leave speculation off",
}


def judge_runs(runs: Sequence[Pair], policy: ShipPolicy) -> Overall:
    """The best configuration, each counted by the traffic for which it does worst.

    A gain with one request in flight ships nothing if it is lost at a load that was measured too.
    """
    dimensions = find_dimensions([summary for summary, _ in runs])
    traffic = [d for d in dimensions if d.is_traffic]
    chosen = [d for d in dimensions if not d.is_traffic]
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in range(len(runs)):
        groups[tuple(d.values[index] for d in chosen)].append(index)
    decisions = [decision for _, decision in runs]
    best = min(groups.values(), key=lambda own: _merit([decisions[i] for i in own]))
    decides = max(best, key=lambda i: _severity(decisions[i]))
    metric, least = limit_of(policy)
    summaries = [summary for summary, _ in runs]
    crossings = crossings_along(summaries, best, dimensions, metric, (least, 1.0))
    split = _split(decisions[decides])
    shipping = sum(decisions[i].verdict == SHIP for i in best)
    others = [own for own in groups.values() if own is not best]
    says = [
        _choice(chosen, decides, len(groups)),
        *_by_traffic(decisions, best, traffic, decides),
        *(_upper(found.says) for found in crossings),
        *(_other(decisions, own, dimensions) for own in others[:MOST_OTHERS]),
        _unequal(list(groups.values()), traffic),
    ]
    return Overall(
        verdict=decisions[decides].verdict,
        says=tuple(filter(None, says)),
        best=decisions[decides],
        dimensions=dimensions,
        crossings=crossings,
        ships_for_some=0 < shipping < len(best) or (not shipping and split != []),
        open_for_some=any(decisions[i].verdict in (NOT_YET, INVALID) for i in best),
    )


def _merit(own: Sequence[Decision]) -> tuple[float, ...]:
    """The worst run first; among equals the share that would ship, then that which still may."""
    worst = max(map(_severity, own))
    shares = [sum(d.verdict == verdict for d in own) / len(own) for verdict in (SHIP, NOT_YET)]
    return worst[0], -shares[0], -shares[1], worst[1]


def _split(decision: Decision) -> list[str]:
    """What to do where some classes of requests win inside the run, though not all."""
    return [
        f"{_upper(j.result.says)}: {j.result.advice}"
        for j in decision.rules
        if j.result.outcome == "fail" and j.result.says.startswith(SPLIT)
    ]


def _severity(decision: Decision) -> tuple[int, float]:
    """How much a run speaks against its configuration."""
    return _SEVERITIES[decision.verdict], -decision.speed_up_low


_SEVERITIES = {SHIP: 0, NOT_YET: 1, INVALID: 2, DO_NOT_SHIP: 3}
"""What is lost for part of the traffic stays lost, whatever a run that has to be made anew says."""


def _choice(chosen: Sequence[Dimension], decides: int, num: int) -> str:
    if num < 2:
        return ""
    named = ", ".join(f"{d.name} {d.show(decides)}" for d in chosen)
    return f"Best of {num} configurations: {named}"


def _by_traffic(
    decisions: Sequence[Decision], own: Sequence[int], traffic: Sequence[Dimension], decides: int
) -> list[str]:
    """What the configuration does for which traffic, what to do about it, and why."""
    differing = [d for d in traffic if len({d.values[i] for i in own}) > 1]
    if not differing:
        split = _split(decisions[decides])
        if split:
            return [*split, _upper(_reason(decisions[decides]))]
        return [decisions[decides].sentence]
    ships = [i for i in own if decisions[i].verdict == SHIP]
    others = [i for i in own if decisions[i].verdict != SHIP]
    if not others:
        least = f"{_places(differing, [decides])}: {_reason(decisions[decides])}"
        where = _places(differing, ships)
        return [f"It ships wherever it was measured ({where}), least at {least}"]
    why = _upper(f"at {_places(differing, [decides])}: {_reason(decisions[decides])}")
    unknown = _cannot_be_judged(decisions, others, differing)
    others = [i for i in others if decisions[i].verdict != INVALID]
    if not others:
        would = f"It would ship at {_places(differing, ships)}" if ships else ""
        return list(filter(None, [would, *unknown]))
    if not ships:
        return [*_without_ship(decisions, others, differing, why, unknown), *unknown]
    advice = _advice(differing, ships, others)
    return [
        f"It would ship at {_places(differing, ships)}, not at {_places(differing, others)}: "
        f"{advice}",
        why,
        *unknown,
    ]


def _cannot_be_judged(
    decisions: Sequence[Decision], own: Sequence[int], differing: Sequence[Dimension]
) -> list[str]:
    """Where something else made the numbers, which do not tell whether it pays."""
    broken = [i for i in own if decisions[i].verdict == INVALID]
    if not broken:
        return []
    where, why = _places(differing, broken), _reason(decisions[broken[0]])
    return [f"It cannot be judged at {where}, measure anew: {why}"]


def _without_ship(
    decisions: Sequence[Decision],
    own: Sequence[int],
    differing: Sequence[Dimension],
    why: str,
    unknown: Sequence[str],
) -> list[str]:
    """Where nothing ships: what is lost, and what more measuring may still tell."""
    waiting = [i for i in own if decisions[i].verdict == NOT_YET]
    lost = [i for i in own if i not in waiting]
    names = " and ".join(d.name for d in differing)
    if not waiting:
        judged = "could be judged" if unknown else "was measured"
        return [f"It ships at no {names} that {judged}", why]
    where = _places(differing, waiting)
    seen = f"Open at {where}: {_reason(decisions[waiting[0]])}"
    if not lost:
        return [seen]
    return [f"It does not ship at {_places(differing, lost)}", seen, why]


def _reason(decision: Decision) -> str:
    """The first rule that decides, and how many more there are."""
    against = "invalid" if decision.verdict == INVALID else "fail"
    counted = [j for j in decision.rules if j.weight != "note" and j.result.outcome == against]
    if not counted:
        counted = [j for j in decision.rules if j.weight == "must" and j.result.outcome != "pass"]
    if not counted:
        return next(
            (j.result.says for j in decision.rules if j.rule == "speedup"), "every rule holds"
        )
    more = len(counted) - 1
    return counted[0].result.says + (f"; and {more} more of its rules" if more else "")


def _other(
    decisions: Sequence[Decision], own: Sequence[int], dimensions: Sequence[Dimension]
) -> str:
    """What a configuration that was not chosen comes to."""
    named = ", ".join(f"{d.name} {d.show(own[0])}" for d in dimensions if not d.is_traffic)
    differing = [d for d in dimensions if d.is_traffic and len({d.values[i] for i in own}) > 1]
    ships = [i for i in own if decisions[i].verdict == SHIP]
    worst = max(own, key=lambda i: _severity(decisions[i]))
    if differing and 0 < len(ships) < len(own):
        return f"{named} would ship at {_places(differing, ships)} only"
    where = f" at {_places(differing, [worst])}" if differing else ""
    return f"{named}: {decisions[worst].verdict}{where}, {_reason(decisions[worst])}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _unequal(groups: Sequence[Sequence[int]], traffic: Sequence[Dimension]) -> str:
    """A warning where configurations were not measured with the same traffic."""
    names = [
        d.name for d in traffic if len({frozenset(d.values[i] for i in own) for own in groups}) > 1
    ]
    if not names:
        return ""
    return (
        f"Not a fair comparison: the configurations were measured at different {', '.join(names)}"
    )


def _places(differing: Sequence[Dimension], indices: Sequence[int]) -> str:
    """`temperature 0 and 0.4`, or every combination where several things differ."""
    if len(differing) == 1:
        [dimension] = differing
        shown = list(dict.fromkeys(dimension.show(i) for i in _sorted(dimension, indices)))
        listed = " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
        return with_unit(listed, dimension.name)
    combined = [", ".join(f"{d.name} {d.show(i)}" for d in differing) for i in indices]
    return "; ".join(f"({text})" for text in combined)


def _sorted(dimension: Dimension, indices: Sequence[int]) -> list[int]:
    if not dimension.is_number:
        return list(indices)
    return sorted(indices, key=lambda i: float(dimension.values[i]))


def _advice(differing: Sequence[Dimension], ships: Sequence[int], others: Sequence[int]) -> str:
    if len(differing) > 1:
        return "speculate for the former only"
    [dimension] = differing
    if not dimension.is_number:
        split = "split the traffic" if dimension.name == CLASS else "keep them apart"
        return f"{split}, and serve the latter without speculation"
    good = [float(dimension.values[i]) for i in ships]
    bad = [float(dimension.values[i]) for i in others]
    if min(bad) > max(good):
        return _ABOVE.get(dimension.name, "serve what is above without speculation").format(
            show_value(max(good))
        )
    if max(bad) < min(good):
        return f"serve what is below {show_value(min(good))} without speculation"
    return "speculate for the former only"


_ABOVE = {
    **dict.fromkeys(LOADS, "let k fall to 0 above {}, or leave the other loads out"),
    TEMPERATURE: "serve hotter requests than {} without speculation, or draw drafts from the "
    "draft's distribution there",
    CONTEXT: "serve prompts longer than {} tokens without speculation",
}


def limit_of(policy: ShipPolicy) -> tuple[str, float]:
    """The gain that a policy asks for, by its name, and how much of it."""
    for rule in policy.rules:
        if rule.kind.name == "speedup":
            return rule.parameters.metric, rule.parameters.least
    return "tpot_p50", 1.0
