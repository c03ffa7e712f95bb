"""Rules about time: the gain, its tail, the first token, goodput, cost, the sample itself."""

from dataclasses import dataclass, replace

from foretoken.lab.decide.evidence import (
    GIVE_COMMANDS,
    Evidence,
    RuleKind,
    RuleResult,
    judge_ratio,
    show,
)
from foretoken.lab.stats.intervals import unknown
from foretoken.lab.stats.ratios import RESTART_SD


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """Parameters of `speedup`."""

    metric: str = "tpot_p50"
    """A gain's name: tpot_p50, e2e_p50, tokens_per_s ..."""
    least: float = 1.3
    resolution: float = 1.1
    """A truth of this times `least` should be shown by the sample that is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Parameters of rules against a loss."""

    tolerance: float = 0.05
    """Share by which it may be worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailTpot:
    """Parameters of `tail_tpot`."""

    tolerance: float = 0.05
    metric: str = "tpot_p95"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ttft:
    """Parameters of `ttft`."""

    tolerance: float = 0.20
    metric: str = "ttft_p95"
    """Its P99 takes several times the requests, and a tolerance that heavy tails allow."""


def speedup(evidence: Evidence, given: SpeedUp) -> RuleResult:
    """Fast enough to be worth having."""
    gain = evidence.summary.gain(given.metric)
    return judge_ratio(evidence, gain, given.least, given.resolution, f"speed-up ({given.metric})")


def tail_tpot(evidence: Evidence, given: TailTpot) -> RuleResult:
    """The slow requests are not slower than before, as far as some 1,000 requests can show."""
    return _not_worse(evidence, given.metric, given.tolerance)


def p99_tpot(evidence: Evidence, given: Tolerance) -> RuleResult:
    """The slowest requests are not shown to be slower than before."""
    return _not_worse(evidence, "tpot_p99", given.tolerance)


def ttft(evidence: Evidence, given: Ttft) -> RuleResult:
    """The first token is not later; where it is what is promised, not at all."""
    bound = evidence.slo == "ttft"
    found = _not_worse(evidence, given.metric, 0.0 if bound else given.tolerance)
    if bound and found.outcome != "pass":
        advice = "the promise is about the first token, which speculation does not make earlier"
        return replace(found, advice=advice)
    return found


def goodput(evidence: Evidence, given: Tolerance) -> RuleResult:
    """Requests within their service levels, per second."""
    gain = evidence.summary.gain("goodput")
    if gain is None:
        return RuleResult(outcome="inconclusive", says="no service levels were set")
    return _not_worse(evidence, "goodput", given.tolerance)


def _not_worse(evidence: Evidence, metric: str, tolerance: float) -> RuleResult:
    threshold = 1.0 / (1.0 + tolerance)
    gain = evidence.summary.gain(metric)
    resolution = max(1.0 + tolerance, 1.03)
    return judge_ratio(evidence, gain, threshold, resolution, f"gain of {metric}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """Parameters of `restarts`."""

    least_blocks: int = 5


def restarts(evidence: Evidence, given: Restarts) -> RuleResult:
    """Starts enough: two of one build differ by more than a small gain."""
    have = evidence.num_blocks
    says = f"{have} blocks, each a start of both servers; one build differs by 5 to 10 % between"
    once = [arm.arm for arm in evidence.summary.arms if not arm.server.starts_anew]
    if once:
        says = (
            f"{have} blocks, but one start of {' and '.join(once)}, given by URL: intervals are "
            f"wider by the {RESTART_SD:.0%} that starts usually differ by"
        )
    if have >= given.least_blocks:
        return RuleResult(outcome="pass", says=says, advice=GIVE_COMMANDS if once else "")
    return RuleResult(outcome="inconclusive", says=says, needed_blocks=given.least_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """A rule without parameters."""


def steady(evidence: Evidence, _: Nothing) -> RuleResult:
    """Queues did not grow: otherwise the numbers depend on how long one measured."""
    drifting = [arm.arm for arm in evidence.summary.arms if not arm.steady]
    if drifting:
        return RuleResult(
            outcome="fail",
            says=f"not steady: {', '.join(drifting)}",
            advice="offer less load, or measure longer and discard more warm-up",
        )
    return RuleResult(outcome="pass", says="all arms were steady")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductionLoad:
    """Parameters of `production_load`; None: the policy does not know it."""

    requests_per_s: float | None = None
    least_share: float = 0.8


def production_load(evidence: Evidence, given: ProductionLoad) -> RuleResult:
    """Measured at the load of production, not at a tenth of it."""
    seen = evidence.candidate.requests_per_s
    if given.requests_per_s is None:
        return RuleResult(
            outcome="inconclusive",
            says=f"measured at {seen:.2f} requests/s; the policy does not name production's load",
            advice="set production_load.requests_per_s, and measure there",
        )
    wanted = given.requests_per_s * given.least_share
    says = f"measured at {seen:.2f} requests/s, production has {given.requests_per_s:.2f}"
    return RuleResult(outcome="pass" if seen >= wanted else "fail", says=says, threshold=wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLength:
    """Parameters of `output_length`."""

    least_tokens: int = 50


def output_length(evidence: Evidence, given: OutputLength) -> RuleResult:
    """Answers long enough for time per token to matter."""
    arm = evidence.candidate
    mean = arm.output_tokens / arm.num_requests if arm.num_requests else 0.0
    gain = evidence.summary.gain("e2e_p50")
    whole = f"; whole answers: {show(evidence.ratio(gain))}" if gain else ""
    return RuleResult(
        outcome="pass" if mean >= given.least_tokens else "fail",
        says=f"{mean:.0f} tokens per answer{whole}",
        threshold=given.least_tokens,
    )


def cost(evidence: Evidence, _: Nothing) -> RuleResult:
    """What a million tokens cost in both arms."""
    prices = evidence.summary.cost_per_million_tokens
    gain = evidence.summary.gain("cost")
    if not prices or gain is None:
        return RuleResult(outcome="inconclusive", says="no price was given")
    own = ", ".join(f"{arm} {price.estimate:.3g}" for arm, price in prices.items())
    ratio = evidence.ratio(gain)
    return RuleResult(
        outcome="pass" if ratio.low >= 1 else ("fail" if ratio.high < 1 else "inconclusive"),
        says=f"per million tokens: {own}; {show(ratio)} cheaper",
        value=ratio if ratio.known else unknown(ratio.estimate),
        threshold=1.0,
    )


SPEED_RULES = (
    RuleKind("speedup", SpeedUp, speedup),
    RuleKind("tail_tpot", TailTpot, tail_tpot),
    RuleKind("p99_tpot", Tolerance, p99_tpot),
    RuleKind("ttft", Ttft, ttft),
    RuleKind("goodput", Tolerance, goodput),
    RuleKind("restarts", Restarts, restarts),
    RuleKind("steady", Nothing, steady),
    RuleKind("production_load", ProductionLoad, production_load),
    RuleKind("output_length", OutputLength, output_length),
    RuleKind("cost", Nothing, cost),
)
