"""Rules about what may break: outputs, errors, refused requests, memory, blindness."""

from dataclasses import dataclass

from foretoken.lab.decide.evidence import Evidence, RuleKind, RuleResult
from foretoken.lab.decide.rules.speed import Nothing
from foretoken.lab.lint.names import engine_table
from foretoken.lab.records.results import ArmSummary
from foretoken.lab.stats.intervals import share_interval

PREEMPTIONS = "vllm:num_preemptions"
KV_USAGE = "vllm:kv_cache_usage_perc"
DRAFTED = "vllm:spec_decode_num_draft_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Parameters of `outputs`."""

    least_equal: float = 0.9
    """Share of deterministic requests with the same text. Near-ties may flip where the server is
    not batch-invariant; `foretoken lab audit` tells those apart."""


def outputs(evidence: Evidence, given: Outputs) -> RuleResult:
    """Both arms wrote the same where they had to."""
    equality = evidence.summary.equality
    if equality is None or not equality.num_compared:
        return RuleResult(
            outcome="inconclusive",
            says="no deterministic requests to compare",
            advice="foretoken lab audit tests losslessness on its own",
        )
    share = equality.share or share_interval(equality.num_equal, equality.num_compared)
    says = f"{equality.num_equal} of {equality.num_compared} deterministic answers are equal"
    if share.high < given.least_equal:
        advice = "foretoken lab audit: is it near-ties, or wrong output?"
        return RuleResult(
            outcome="fail", says=says, value=share, threshold=given.least_equal, advice=advice
        )
    outcome = "pass" if equality.num_equal >= given.least_equal * equality.num_compared else (
        "inconclusive"
    )  # fmt: skip
    return RuleResult(outcome=outcome, says=says, value=share, threshold=given.least_equal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Parameters of `errors`."""

    most_more: float = 0.001
    """Share of requests by which the candidate may fail more often."""


def errors(evidence: Evidence, given: Errors) -> RuleResult:
    """Speculation does not break requests."""
    shares = {}
    for arm in (evidence.baseline, evidence.candidate):
        shares[arm.arm] = arm.num_errors / arm.num_requests if arm.num_requests else 0.0
    before, after = shares[evidence.baseline.arm], shares[evidence.candidate.arm]
    says = f"failed requests: {before:.2%} without, {after:.2%} with"
    kinds = ", ".join(f"{name} {n}" for name, n in evidence.candidate.errors.items())
    says += f" ({kinds})" if kinds else ""
    if after <= before + given.most_more:
        return RuleResult(outcome="pass", says=says)
    own = share_interval(evidence.candidate.num_errors, evidence.candidate.num_requests)
    outcome = "fail" if own.low > before + given.most_more else "inconclusive"
    return RuleResult(
        outcome=outcome,
        says=says,
        value=own,
        threshold=before + given.most_more,
        needed_requests=2 * evidence.candidate.num_requests if outcome != "fail" else None,
    )


def parameters_refused(evidence: Evidence, _: Nothing) -> RuleResult:
    """No request of this traffic is refused once speculation is on."""
    refused = engine_table(evidence.candidate.server.engine).get("refused_with_speculation", {})
    seen: dict[str, int] = {}
    for arm in (evidence.baseline, evidence.candidate):
        for name, count in arm.parameters_seen.items():
            seen[name] = max(seen.get(name, 0), count)
    hit = {name: seen[name] for name in refused if seen.get(name)}
    if hit:
        shown = ", ".join(f"{name} ({count} requests)" for name, count in hit.items())
        return RuleResult(
            outcome="fail",
            says=f"{evidence.candidate.server.engine} refuses {shown} once speculation is on",
            advice="route these requests to servers without speculation",
        )
    return RuleResult(outcome="pass", says="no parameter of this traffic is refused")


def monitoring(evidence: Evidence, _: Nothing) -> RuleResult:
    """Somebody will notice when the acceptance falls."""
    arm = evidence.candidate
    if DRAFTED in arm.counters:
        return RuleResult(outcome="pass", says=f"the server exports {DRAFTED}_total")
    if any(bucket.num_drafted for bucket in arm.acceptance):
        return RuleResult(outcome="pass", says="the server reports acceptance per request")
    return RuleResult(
        outcome="fail",
        says="the server reports no acceptance at all",
        advice="turn on its metrics (llama.cpp: --metrics), and load deploy/foretoken-rules.yml",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSqueeze:
    """Parameters of `kv_squeeze`."""

    most_preemptions_per_request: float = 0.01
    """More than the baseline's."""
    most_usage: float = 0.95


def kv_squeeze(evidence: Evidence, given: KvSqueeze) -> RuleResult:
    """The draft did not take the memory that requests needed."""
    before, after = evidence.baseline, evidence.candidate
    if PREEMPTIONS not in after.counters:
        return RuleResult(outcome="inconclusive", says="the server does not count preemptions")
    more = _per_request(after) - _per_request(before)
    usage = after.gauges.get(KV_USAGE)
    says = f"{more:+.3f} preemptions per request"
    says += f", keys and values filled to {usage:.0%}" if usage is not None else ""
    if more > given.most_preemptions_per_request:
        return RuleResult(
            outcome="fail",
            says=says,
            threshold=given.most_preemptions_per_request,
            advice="a smaller draft, fp8 keys and values, or fewer requests at once; the P99 loss "
            "is memory, not verification",
        )
    if usage is not None and usage > given.most_usage:
        return RuleResult(
            outcome="inconclusive", says=says, advice="the next busy hour will preempt"
        )
    return RuleResult(outcome="pass", says=says)


def _per_request(arm: ArmSummary) -> float:
    return arm.counters.get(PREEMPTIONS, 0.0) / arm.num_requests if arm.num_requests else 0.0


SAFETY_RULES = (
    RuleKind("outputs", Outputs, outputs),
    RuleKind("errors", Errors, errors),
    RuleKind("parameters_refused", Nothing, parameters_refused),
    RuleKind("monitoring", Nothing, monitoring),
    RuleKind("kv_squeeze", KvSqueeze, kv_squeeze),
)
