"""Rules about acceptance: does it pay, for whom, at which temperature, after quantization.

A rate is never compared with a fixed number, but with the rate at which this server at this load
breaks even, which follows from the whole time that both arms took. Steps that draft nothing are
plain steps in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretoken.lab.decide.evidence import (
    Evidence,
    RuleKind,
    RuleResult,
    against_break_even,
    show_break_even,
    show_share,
)
from foretoken.lab.decide.rules.speed import Nothing
from foretoken.lab.records.results import AcceptanceBucket
from foretoken.lab.stats.intervals import Interval


def acceptance_pays(evidence: Evidence, _: Nothing) -> RuleResult:
    """The rate against its own break-even, in place of 0.4, 0.5, 0.65 or 0.7."""
    bucket, limit = evidence.candidate.all_drafts, evidence.break_even
    if bucket is None or limit is None:
        uncounted = "the server does not say how many verifications there were"
        says = evidence.without_drafts(uncounted)
        advice = "vLLM and Foretoken: --per-request-spec-decode-metrics detailed"
        return RuleResult(
            outcome="inconclusive", says=says, advice=advice if says == uncounted else ""
        )
    return _against(bucket.rate, limit, "acceptance rate", where=evidence.drafting)


def _against(
    rate: Interval, limit: Interval, name: str, *, where: str = "", requests: int = 0
) -> RuleResult:
    """Above, below or astride break-even."""
    says = f"{name} {show_share(rate)}{where}, {show_break_even(limit)}"
    outcome, apart = against_break_even(rate, limit), abs(rate.estimate - limit.estimate)
    needed = None
    if outcome == "inconclusive" and requests and rate.known and limit.known and apart:
        half = math.hypot(rate.high - rate.low, limit.high - limit.low) / 2
        needed = math.ceil(requests * max(1.1, (half / apart) ** 2))
    return RuleResult(
        outcome=outcome, says=says, value=rate, threshold=limit.estimate, needed_requests=needed
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LowTail:
    """Parameters of `p10_acceptance`."""

    least_requests: int = 30


def p10_acceptance(evidence: Evidence, given: LowTail) -> RuleResult:
    """The tenth of requests with the worst drafts does not lose, its sampling noise taken out."""
    bucket, limit = evidence.candidate.all_drafts, evidence.break_even
    if bucket is None or limit is None:
        says = evidence.without_drafts("no acceptance per request")
        return RuleResult(outcome="inconclusive", says=says)
    usable = bucket.num_requests - bucket.num_too_short
    if usable < given.least_requests:
        return RuleResult(
            outcome="inconclusive",
            says=f"{usable} requests are long enough to say anything ({bucket.num_too_short} are "
            "too short)",
            needed_requests=bucket.num_requests + given.least_requests - usable,
        )
    found = _against(bucket.p10, limit, "P10 of requests", where=evidence.drafting, requests=usable)
    noise = f" (as measured, noise included: {bucket.raw_p10:.0%})"
    return replace(found, says=found.says + noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperatures:
    """Parameters of `temperatures`."""

    production: tuple[float, ...] = ()
    """Temperatures that must have been measured; empty: whatever was."""
    least_requests: int = 20


def temperatures(evidence: Evidence, given: Temperatures) -> RuleResult:
    """At the temperatures of production, each bucket above break-even."""
    buckets = evidence.candidate.buckets("temperature")
    seen = {_number(b.value): b for b in buckets}
    missing = [
        t for t in given.production if t not in seen or seen[t].num_requests < given.least_requests
    ]
    if missing:
        return RuleResult(
            outcome="inconclusive",
            says=f"too few requests at temperature {', '.join(f'{t:g}' for t in missing)}",
            needed_requests=given.least_requests * len(missing),
        )
    limit = evidence.break_even
    if not buckets or limit is None:
        says = evidence.without_drafts("no acceptance by temperature")
        return RuleResult(outcome="inconclusive", says=says)
    return _worst(buckets, limit, evidence.drafting)


def _worst(buckets: Sequence[AcceptanceBucket], limit: Interval, where: str) -> RuleResult:
    judged = {
        b.value: _against(b.rate, limit, f"T={b.value}: rate", requests=b.num_requests)
        for b in buckets
    }
    losing = [value for value, result in judged.items() if result.outcome == "fail"]
    open_ones = [value for value, result in judged.items() if result.outcome == "inconclusive"]
    says = "; ".join(f"T={b.value}: {show_share(b.rate)}" for b in buckets)
    says += f"{where}; {show_break_even(limit)}"
    if losing:
        return RuleResult(
            outcome="fail",
            says=says,
            threshold=limit.estimate,
            advice=f"send temperature {', '.join(losing)} to servers without speculation, or draft "
            "from the draft's distribution there",
        )
    if open_ones:
        needed = [judged[value].needed_requests or 0 for value in open_ones]
        return RuleResult(
            outcome="inconclusive",
            says=says,
            threshold=limit.estimate,
            needed_requests=max(needed) or None,
        )
    return RuleResult(outcome="pass", says=says, threshold=limit.estimate)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationDrop:
    """Parameters of `quantization_drop`."""

    most_drop: float = 0.05
    """Difference of acceptance rates, not of percent."""


def quantization_drop(evidence: Evidence, given: QuantizationDrop) -> RuleResult:
    """Acceptance against the same prompts with the unquantized model."""
    reference, bucket = evidence.reference, evidence.candidate.all_drafts
    before = reference.all_drafts if reference else None
    if before is None or bucket is None:
        return RuleResult(
            outcome="inconclusive", says="no reference run (--reference) to compare acceptance with"
        )
    drop = _difference(before.rate, bucket.rate)
    says = f"acceptance {show_share(bucket.rate)} after {show_share(before.rate)}"
    if drop.low > given.most_drop:
        advice = "a wider quantization of the target (int8 instead of int4), or another draft"
        return RuleResult(
            outcome="fail", says=says, value=drop, threshold=given.most_drop, advice=advice
        )
    outcome = "pass" if drop.high <= given.most_drop else "inconclusive"
    return RuleResult(outcome=outcome, says=says, value=drop, threshold=given.most_drop)


def _difference(before: Interval, after: Interval) -> Interval:
    """Difference of two independent rates; their half-widths are added in squares."""
    middle = before.estimate - after.estimate
    down = math.hypot(before.estimate - before.low, after.high - after.estimate)
    up = math.hypot(before.high - before.estimate, after.estimate - after.low)
    return Interval(middle, middle - down, middle + up)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureMix:
    """Parameters of `temperature_mix`."""

    most_gap: float = 0.03


def temperature_mix(evidence: Evidence, given: TemperatureMix) -> RuleResult:
    """The server's average weighs tokens; the users are requests."""
    buckets = [b for b in evidence.candidate.buckets("temperature") if b.num_drafted]
    if len(buckets) < 2:
        return RuleResult(outcome="inconclusive", says="one temperature only")
    requests = sum(b.num_requests for b in buckets)
    by_request = sum(b.rate.estimate * b.num_requests for b in buckets) / requests
    by_token = sum(b.num_accepted for b in buckets) / sum(b.num_drafted for b in buckets)
    return RuleResult(
        outcome="pass" if abs(by_request - by_token) <= given.most_gap else "fail",
        says=f"{by_token:.0%} of drafted tokens were accepted; the mean over requests by "
        f"temperature is {by_request:.0%}",
        threshold=given.most_gap,
    )


ACCEPTANCE_RULES = (
    RuleKind("acceptance_pays", Nothing, acceptance_pays),
    RuleKind("p10_acceptance", LowTail, p10_acceptance),
    RuleKind("temperatures", Temperatures, temperatures),
    RuleKind("quantization_drop", QuantizationDrop, quantization_drop),
    RuleKind("temperature_mix", TemperatureMix, temperature_mix),
)
