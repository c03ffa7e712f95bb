"""Every rule of a policy, what it looks at, and what it answers.

Evidence is an A/B's summary with intervals corrected for repeated looks. The docstring of a rule
says what has to hold; parameters are the rule's keys.

In order: time; the experiment; acceptance; what may break; classes of requests.

A rule about the experiment answers `invalid` where a result cannot be true, or something else made
it: that says nothing about the candidate, and more blocks of the same do not help. An acceptance
rate is never compared with a fixed number, but with the rate at which this server at this load
breaks even, which follows from the whole time that both arms took. A class is a category, a
temperature or a length of prompt, judged by the gains of its own requests inside the mix.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from urllib.parse import urlsplit

from foretoken.lab.analysis.dimensions import show_metric
from foretoken.lab.analysis.summary import STATISTICS
from foretoken.lab.analysis.whole_time import NOTHING_DRAFTED, break_even_of, draft_share_of
from foretoken.lab.http.client import KV_USAGE
from foretoken.lab.lint.names import engine_table
from foretoken.lab.records.results import AbSummary, ArmGain, ArmSummary, ClassGains
from foretoken.lab.stats.intervals import Interval, share_interval
from foretoken.lab.stats.ratios import (
    FEWEST_BLOCKS,
    RESTART_SD,
    TAIL_VALUES,
    at_level,
    blocks_to_exceed,
    level_of_look,
    standard_error,
)
from foretoken.lab.verdict import WORTH_IT

WEIGHTS = ("must", "veto", "note")
BOTH_SIDES_LEVEL = 0.9
"""Over all looks together, so that one side errs in 5 % at most; the first look is at 95 %."""
POWER = 0.95
"""Chance that the sample asked for settles a rule, before the uncertainty of the spread."""
FIRST_BLOCKS = 8
"""Fewer say so little about their spread that the blocks asked for would be hundreds or none."""
GIVE_COMMANDS = (
    "give commands with {port} in place of URLs, or --restart-command with them, so that every "
    "block is a start"
)
_TOO_CLOSE = "the truth is near the limit: more measuring may not settle it, another limit would"


@dataclass(frozen=True, slots=True)
class RuleResult:
    outcome: str
    """pass, fail, inconclusive or invalid."""
    says: str
    advice: str = ""
    value: Interval | None = None
    threshold: float | None = None
    needed_blocks: int | None = None
    """Blocks in total that should settle it; None if blocks are not what is missing."""
    needed_requests: int | None = None
    """Requests in total that should settle it."""

    @property
    def asks(self) -> tuple[str, ...]:
        asked = ((self.needed_blocks, "blocks"), (self.needed_requests, "requests"))
        missing = ", ".join(f"{n} {what} in all" for n, what in asked if n)
        return tuple(filter(None, (missing, self.advice if self.outcome != "pass" else "")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    summary: AbSummary
    slo: str

    @property
    def baseline(self) -> ArmSummary:
        return self.summary.arm(self.summary.baseline)

    @property
    def candidate(self) -> ArmSummary:
        return self.summary.arm(self.summary.candidate)

    @property
    def num_blocks(self) -> int:
        return max((gain.num_blocks for gain in self.summary.gains), default=0)

    @property
    def requests_per_block(self) -> float:
        """Of one arm."""
        return self.candidate.num_requests / max(1, self.num_blocks)

    @property
    def level(self) -> float:
        return level_of_look(BOTH_SIDES_LEVEL, self.summary.look)

    def ratio(self, gain: ArmGain) -> Interval:
        return at_level(gain.ratio, gain.num_blocks, self.level)

    def blocks_to_show(self, gain: ArmGain, threshold: float, resolution: float) -> int | None:
        """Blocks after which the next look shows `threshold` to be exceeded, with POWER. Assumes a
        truth of `resolution` x threshold, or the estimate less its standard error if that is
        further away. None if no number of blocks would, as where a server starts once."""
        if gain.num_blocks < FIRST_BLOCKS:
            return FIRST_BLOCKS
        error = standard_error(gain.ratio, gain.num_blocks)
        if not math.isfinite(error):
            return 2 * gain.num_blocks
        seen = abs(math.log(gain.ratio.estimate / threshold)) - error
        distance = max(math.log(resolution), seen)
        # A spread estimated from few blocks: its 70 % upper bound, roughly.
        caution = 1.0 + 0.52 / math.sqrt(max(1, 2 * (gain.num_blocks - 1)))
        spread = error * math.sqrt(gain.num_blocks) * caution
        chances = (level_of_look(BOTH_SIDES_LEVEL, self.summary.look + 1), POWER)
        fewest = gain.num_blocks + 1
        return blocks_to_exceed(spread, gain.ratio.unseen_sd, distance, chances, fewest)

    @property
    def break_even(self) -> Interval | None:
        """By whole time; None if nothing was drafted or the server counts no verifications."""
        return break_even_of(self.summary)

    @property
    def drafting(self) -> str:
        """` in the 35% of steps that draft`, or nothing if that is not known."""
        share = draft_share_of(self.summary)
        return "" if share is None else f" in the {show_part(share)} of steps that draft"

    def without_drafts(self, otherwise: str) -> str:
        """Why there is no break-even: nothing was drafted, or `otherwise`."""
        return NOTHING_DRAFTED if draft_share_of(self.summary) == 0.0 else otherwise


def judge_ratio(
    evidence: Evidence, gain: ArmGain | None, threshold: float, resolution: float, name: str
) -> RuleResult:
    """Whether a gain is above `threshold`: its whole interval above, below, or neither."""
    if gain is None:
        return RuleResult("inconclusive", f"{name} was not measured")
    ratio = evidence.ratio(gain)
    shown = f"{name} {show(ratio)} against {threshold:.2f}x"
    if gain.enough and ratio.known and (ratio.low >= threshold or ratio.high < threshold):
        outcome = "pass" if ratio.low >= threshold else "fail"
        return RuleResult(outcome, shown, value=ratio, threshold=threshold)
    needed = evidence.blocks_to_show(gain, threshold, resolution)
    if not gain.enough:
        shown += ": too few requests for this statistic"
        needed = max(needed or 0, blocks_to_support(gain), gain.num_blocks + 1)
    advice = _TOO_CLOSE if evidence.summary.look > 2 else ""
    if needed is None and ratio.unseen_sd:
        advice = f"more blocks of the same start will not tell: {GIVE_COMMANDS}"
    return RuleResult("inconclusive", shown, advice, ratio, threshold, needed)


def blocks_to_support(gain: ArmGain) -> int:
    """Blocks, of as many requests as those that there are, that can tell about the gain at all."""
    q = STATISTICS.get(gain.metric.rsplit("_", 1)[-1])
    if q is None or not gain.num_pairs:
        return FEWEST_BLOCKS
    requests = TAIL_VALUES / min(q, 1 - q)
    return max(FEWEST_BLOCKS, math.ceil(round(requests * gain.num_blocks / gain.num_pairs, 6)))


def requests_to_support(gain: ArmGain) -> int:
    """Requests an arm that can tell about the gain at all, in blocks as large as these."""
    return math.ceil(blocks_to_support(gain) * gain.num_pairs / max(1, gain.num_blocks))


def show(interval: Interval) -> str:
    """`1.42x [1.35, 1.50]`."""
    if math.isnan(interval.estimate):
        return "unknown"
    if not interval.known:
        return f"{interval.estimate:.2f}x (interval unknown)"
    return f"{interval.estimate:.2f}x [{interval.low:.2f}, {interval.high:.2f}]"


def against_break_even(rate: Interval, limit: Interval) -> str:
    """`pass` where a rate is surely above its break-even, `fail` where surely below. Both are
    estimates: the half-widths are added in squares."""
    over = rate.estimate - limit.estimate
    if over >= math.hypot(rate.estimate - rate.low, limit.high - limit.estimate):
        return "pass"
    below = math.hypot(rate.high - rate.estimate, limit.estimate - limit.low)
    return "fail" if -over > below else "inconclusive"


def show_break_even(limit: Interval) -> str:
    if limit.estimate > 1.0:
        return "no acceptance would pay: a verification costs more than all its drafts can yield"
    if limit.estimate <= 0:
        return "pays at any acceptance"
    return f"breaks even at {show_share(limit)}"


def show_part(share: float) -> str:
    """`35%`, and `0.4%` of what is not nothing."""
    return f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"


def show_share(interval: Interval) -> str:
    """`52% [48%, 56%]`."""
    if not interval.known:
        return f"{interval.estimate:.0%} (interval unknown)"
    return f"{interval.estimate:.0%} [{interval.low:.0%}, {interval.high:.0%}]"


LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0")
PREEMPTIONS = "vllm:num_preemptions"
DRAFTED = "vllm:spec_decode_num_draft_tokens"
SPLIT = "split the traffic"
"""How the answer begins where some classes win and others lose."""
MIDDLE, TAILS = "tpot_p50", ("tpot_p99", "tpot_p95")


def speedup(
    evidence: Evidence, metric: str = "tpot_p50", least: float = WORTH_IT, resolution: float = 1.1
) -> RuleResult:
    """Fast enough to be worth having. A truth of `resolution` times `least` should be shown by the
    sample that is asked for."""
    gain = evidence.summary.gain(metric)
    return judge_ratio(evidence, gain, least, resolution, f"speed-up ({metric})")


def tail_tpot(evidence: Evidence, tolerance: float = 0.05, metric: str = "tpot_p95") -> RuleResult:
    """The slow requests are not slower than before, as far as some 1,000 requests can show."""
    return _not_worse(evidence, metric, tolerance)


def p99_tpot(evidence: Evidence, tolerance: float = 0.05) -> RuleResult:
    """The slowest requests are not shown to be slower than before."""
    return _not_worse(evidence, "tpot_p99", tolerance)


def ttft(evidence: Evidence, tolerance: float = 0.20, metric: str = "ttft_p95") -> RuleResult:
    """The first token is not later; where it is what is promised, not at all. Its P99 takes several
    times the requests, and a tolerance that heavy tails allow."""
    bound = evidence.slo == "ttft"
    found = _not_worse(evidence, metric, 0.0 if bound else tolerance)
    if bound and found.outcome != "pass":
        advice = "the promise is about the first token, which speculation does not make earlier"
        return replace(found, advice=advice)
    return found


def goodput(evidence: Evidence, tolerance: float = 0.05) -> RuleResult:
    """Requests within their service levels, per second."""
    if evidence.summary.gain("goodput") is None:
        return RuleResult("inconclusive", "no service levels were set")
    return _not_worse(evidence, "goodput", tolerance)


def _not_worse(evidence: Evidence, metric: str, tolerance: float) -> RuleResult:
    gain, resolution = evidence.summary.gain(metric), max(1.0 + tolerance, 1.03)
    return judge_ratio(evidence, gain, 1.0 / (1.0 + tolerance), resolution, f"gain of {metric}")


def output_length(evidence: Evidence, least_tokens: int = 50) -> RuleResult:
    """Answers long enough for time per token to matter."""
    arm, gain = evidence.candidate, evidence.summary.gain("e2e_p50")
    mean = arm.output_tokens / arm.num_requests if arm.num_requests else 0.0
    whole = f"; whole answers: {show(evidence.ratio(gain))}" if gain else ""
    outcome = "pass" if mean >= least_tokens else "fail"
    return RuleResult(outcome, f"{mean:.0f} tokens per answer{whole}", threshold=least_tokens)


def restarts(evidence: Evidence, least_blocks: int = 5) -> RuleResult:
    """Starts enough: two of one build differ by more than a small gain."""
    have = evidence.num_blocks
    says = f"{have} blocks, each a start of both servers; one build differs by 5 to 10 % between"
    once = [arm.arm for arm in evidence.summary.arms if not arm.server.starts_anew]
    if once:
        says = (
            f"{have} blocks, but one start of {' and '.join(once)}, given by URL: intervals are "
            f"wider by the {RESTART_SD:.0%} that starts usually differ by"
        )
    if have >= least_blocks:
        return RuleResult("pass", says, GIVE_COMMANDS if once else "")
    return RuleResult("inconclusive", says, needed_blocks=least_blocks)


def steady(evidence: Evidence) -> RuleResult:
    """Queues did not grow: otherwise the numbers depend on how long one measured."""
    drifting = [arm.arm for arm in evidence.summary.arms if not arm.steady]
    if not drifting:
        return RuleResult("pass", "all arms were steady")
    advice = "offer less load, or measure longer and discard more warm-up"
    return RuleResult("fail", f"not steady: {', '.join(drifting)}", advice)


def production_load(
    evidence: Evidence, requests_per_s: float | None = None, least_share: float = 0.8
) -> RuleResult:
    """Measured at the load of production, not at a tenth of it; None: the policy does not know."""
    seen = evidence.candidate.requests_per_s
    if requests_per_s is None:
        says = f"measured at {seen:.2f} requests/s; the policy does not name production's load"
        advice = "set production_load.requests_per_s, and measure there"
        return RuleResult("inconclusive", says, advice)
    wanted = requests_per_s * least_share
    says = f"measured at {seen:.2f} requests/s, production has {requests_per_s:.2f}"
    return RuleResult("pass" if seen >= wanted else "fail", says, threshold=wanted)


def plausible(evidence: Evidence) -> RuleResult:
    """No speed-up above the acceptance length, no break-even that every loss would contradict."""
    gain = evidence.summary.gain("tpot_mean") or evidence.summary.gain("tpot_p50")
    bucket = evidence.candidate.all_drafts
    if gain is None or bucket is None or bucket.length is None or not bucket.exact:
        unsaid = "the server does not say how many tokens a verification yields"
        return RuleResult("inconclusive", evidence.without_drafts(unsaid))
    ratio, length = evidence.ratio(gain), bucket.length
    says = f"{gain.metric} {show(ratio)} at an acceptance length of {length.estimate:.2f}"
    load = evidence.summary.config.get("load") or {}
    if load.get("kind", "closed") != "closed":
        # The faster arm of an open loop has fewer requests in flight, whose steps are shorter.
        return RuleResult("pass", f"{says}; in an open loop it may be above")
    if ratio.known and length.known and ratio.low > length.high:
        says += ": a verification takes at least as long as a plain step, so the gain cannot be "
        advice = "was the baseline held up, or did the arms write different lengths? See the notes "
        advice += "of the run, and measure again on a quiet machine"
        return RuleResult("invalid", f"{says}above what it yields", advice)
    limit = evidence.break_even
    if limit is not None and limit.low > 1.0 and not ratio.high < 1.0:
        says += f": by that {show_break_even(limit)}, and yet no loss is shown"
        advice = "the counts of drafts and the times contradict each other: measure again"
        return RuleResult("invalid", says, advice)
    return RuleResult("pass", says)


def busy_host(evidence: Evidence, most_share: float = 0.2) -> RuleResult:
    """Nothing else kept the machine busy that servers and client run on, on average over blocks."""
    busy = evidence.summary.environment.get("host_busy")
    servers = [arm.server for arm in evidence.summary.arms]
    if not any(own.command is not None or urlsplit(own.url).hostname in LOCAL for own in servers):
        return RuleResult("pass", "the servers run on other machines")
    if busy is None:
        return RuleResult("inconclusive", "this system does not tell how busy it is")
    says = f"before its blocks the machine was {busy:.0%} busy with something else"
    if busy <= most_share:
        return RuleResult("pass", says)
    advice = "end what else runs there (top shows it), and measure again"
    return RuleResult("invalid", says, advice, threshold=most_share)


def client_lag(evidence: Evidence, most_share: float = 0.05) -> RuleResult:
    """The measuring client kept up with its own schedule: its lag over the median TTFT."""
    worst, share = "", 0.0
    for arm in evidence.summary.arms:
        if arm.ttft is not None and arm.ttft.p50.estimate > 0:
            own = arm.client_lag_p99_s / arm.ttft.p50.estimate
            worst, share = (arm.arm, own) if own > share else (worst, share)
    if share <= most_share:
        return RuleResult("pass", f"the client was at most {share:.1%} of TTFT late")
    says = f"the client was late by {share:.0%} of the median TTFT in arm {worst}"
    return RuleResult("invalid", says, "run the client on another machine or with less load")


def acceptance_pays(evidence: Evidence) -> RuleResult:
    """The rate against its own break-even, in place of 0.4, 0.5, 0.65 or 0.7."""
    bucket, limit = evidence.candidate.all_drafts, evidence.break_even
    if bucket is None or limit is None:
        uncounted = "the server does not say how many verifications there were"
        says = evidence.without_drafts(uncounted)
        advice = "vLLM and Foretoken: --per-request-spec-decode-metrics detailed"
        return RuleResult("inconclusive", says, advice if says == uncounted else "")
    return _against(bucket.rate, limit, "acceptance rate", where=evidence.drafting)


def _against(
    rate: Interval, limit: Interval, name: str, *, where: str = "", requests: int = 0
) -> RuleResult:
    says = f"{name} {show_share(rate)}{where}, {show_break_even(limit)}"
    outcome, apart = against_break_even(rate, limit), abs(rate.estimate - limit.estimate)
    needed = None
    if outcome == "inconclusive" and requests and rate.known and limit.known and apart:
        half = math.hypot(rate.high - rate.low, limit.high - limit.low) / 2
        needed = math.ceil(requests * max(1.1, (half / apart) ** 2))
    return RuleResult(outcome, says, "", rate, limit.estimate, needed_requests=needed)


def p10_acceptance(evidence: Evidence, least_requests: int = 30) -> RuleResult:
    """The tenth of requests with the worst drafts does not lose, its sampling noise taken out."""
    bucket, limit = evidence.candidate.all_drafts, evidence.break_even
    if bucket is None or limit is None:
        return RuleResult("inconclusive", evidence.without_drafts("no acceptance per request"))
    usable = bucket.num_requests - bucket.num_too_short
    if usable < least_requests:
        says = f"{usable} requests are long enough to say anything ({bucket.num_too_short} are "
        needed = bucket.num_requests + least_requests - usable
        return RuleResult("inconclusive", f"{says}too short)", needed_requests=needed)
    found = _against(bucket.p10, limit, "P10 of requests", where=evidence.drafting, requests=usable)
    noise = f" (as measured, noise included: {bucket.raw_p10:.0%})"
    return replace(found, says=found.says + noise)


def temperatures(
    evidence: Evidence, production: tuple[float, ...] = (), least_requests: int = 20
) -> RuleResult:
    """At the temperatures of production, each bucket above break-even; without: whatever was."""
    buckets = evidence.candidate.buckets("temperature")
    seen = {b.value: b.num_requests for b in buckets}
    missing = [t for t in production if seen.get(f"{t:g}", 0) < least_requests]
    if missing:
        says = f"too few requests at temperature {', '.join(f'{t:g}' for t in missing)}"
        return RuleResult("inconclusive", says, needed_requests=least_requests * len(missing))
    limit = evidence.break_even
    if not buckets or limit is None:
        return RuleResult("inconclusive", evidence.without_drafts("no acceptance by temperature"))
    judged = {b.value: _against(b.rate, limit, "", requests=b.num_requests) for b in buckets}
    says = "; ".join(f"T={b.value}: {show_share(b.rate)}" for b in buckets)
    says += f"{evidence.drafting}; {show_break_even(limit)}"
    losing = [value for value, result in judged.items() if result.outcome == "fail"]
    if losing:
        advice = f"send temperature {', '.join(losing)} to servers without speculation, or draw "
        advice += "drafts from the draft's distribution there"
        return RuleResult("fail", says, advice, threshold=limit.estimate)
    still_open = [own for own in judged.values() if own.outcome == "inconclusive"]
    needed = max((own.needed_requests or 0 for own in still_open), default=0)
    outcome = "inconclusive" if still_open else "pass"
    return RuleResult(outcome, says, threshold=limit.estimate, needed_requests=needed or None)


def outputs(evidence: Evidence, least_equal: float = 0.9) -> RuleResult:
    """Both arms wrote the same where they had to, in this share of deterministic requests.
    Near-ties may flip where the server is not batch-invariant; `lab audit` tells those apart."""
    equality = evidence.summary.equality
    if equality is None or not equality.num_compared:
        advice = "foretoken lab audit tests losslessness on its own"
        return RuleResult("inconclusive", "no deterministic requests to compare", advice)
    share = equality.share or share_interval(equality.num_equal, equality.num_compared)
    says = f"{equality.num_equal} of {equality.num_compared} deterministic answers are equal"
    if share.high < least_equal:
        advice = "foretoken lab audit: is it near-ties, or wrong output?"
        return RuleResult("fail", says, advice, share, least_equal)
    enough = equality.num_equal >= least_equal * equality.num_compared
    return RuleResult("pass" if enough else "inconclusive", says, "", share, least_equal)


def errors(evidence: Evidence, most_more: float = 0.001) -> RuleResult:
    """Speculation does not break requests: the share by which the candidate may fail more often."""
    arms = (evidence.baseline, evidence.candidate)
    before, after = (a.num_errors / a.num_requests if a.num_requests else 0.0 for a in arms)
    says = f"failed requests: {before:.2%} without, {after:.2%} with"
    kinds = ", ".join(f"{name} {n}" for name, n in evidence.candidate.errors.items())
    says += f" ({kinds})" if kinds else ""
    limit = before + most_more
    if max(before, after) == 1.0:
        return RuleResult("invalid", f"{says}: nothing was answered")
    if after <= limit:
        return RuleResult("pass", says)
    requests = evidence.candidate.num_requests
    own = share_interval(evidence.candidate.num_errors, requests)
    if own.low > limit:
        return RuleResult("fail", says, "", own, limit)
    return RuleResult("inconclusive", says, "", own, limit, needed_requests=2 * requests)


def parameters_refused(evidence: Evidence) -> RuleResult:
    """No request of this traffic is refused once speculation is on."""
    engine = evidence.candidate.server.engine
    seen: dict[str, int] = {}
    for arm in (evidence.baseline, evidence.candidate):
        for name, count in arm.parameters_seen.items():
            seen[name] = max(seen.get(name, 0), count)
    refused = engine_table(engine).get("refused_with_speculation", {})
    shown = ", ".join(f"{name} ({seen[name]} requests)" for name in refused if seen.get(name))
    if not shown:
        return RuleResult("pass", "no parameter of this traffic is refused")
    advice = "route these requests to servers without speculation"
    return RuleResult("fail", f"{engine} refuses {shown} once speculation is on", advice)


def monitoring(evidence: Evidence) -> RuleResult:
    """Somebody will notice when the acceptance falls."""
    arm = evidence.candidate
    if DRAFTED in arm.counters:
        return RuleResult("pass", f"the server exports {DRAFTED}_total")
    if any(bucket.num_drafted for bucket in arm.acceptance):
        return RuleResult("pass", "the server reports acceptance per request")
    advice = "turn on its metrics (llama.cpp: --metrics), and load deploy/foretoken-rules.yml"
    return RuleResult("fail", "the server reports no acceptance at all", advice)


def kv_squeeze(
    evidence: Evidence, most_preemptions_per_request: float = 0.01, most_usage: float = 0.95
) -> RuleResult:
    """The draft did not take the memory that requests needed: preemptions beyond the baseline's."""
    after = evidence.candidate
    if PREEMPTIONS not in after.counters:
        return RuleResult("inconclusive", "the server does not count preemptions")
    old, new = (
        arm.counters.get(PREEMPTIONS, 0.0) / max(1, arm.num_requests)
        for arm in (evidence.baseline, after)
    )
    more, usage = new - old, after.gauges.get(KV_USAGE)
    says = f"{more:+.3f} preemptions per request"
    says += f", keys and values filled to {usage:.0%}" if usage is not None else ""
    if more > most_preemptions_per_request:
        advice = "a smaller draft, fp8 keys and values, or fewer requests at once; the P99 loss is "
        advice += "memory, not verification"
        return RuleResult("fail", says, advice, threshold=most_preemptions_per_request)
    if usage is not None and usage > most_usage:
        return RuleResult("inconclusive", says, "the next busy hour will preempt")
    return RuleResult("pass", says)


class ClassesJudged(NamedTuple):
    """Which classes surely lose and which surely win, all of them judged at once."""

    losing: dict[str, str]
    """By name: the gain, its interval and requests."""
    winning: dict[str, str]


def judge_classes(evidence: Evidence) -> ClassesJudged | None:
    """The classes of the first dimension that tells them apart; None if none was timed."""
    classes, found = evidence.summary.classes, None
    for by in dict.fromkeys(own.by for own in classes):
        judged = _judge(evidence, [own for own in classes if own.by == by])
        if judged.losing and judged.winning:
            return judged
        found = found or judged
    return found


def _judge(evidence: Evidence, classes: Sequence[ClassGains]) -> ClassesJudged:
    # Several classes are looked at, so each has its share of the error of one look.
    level = 1 - (1 - evidence.level) / len(classes)
    losing, winning = {}, {}
    for own in classes:
        seen = {
            gain.metric: (gain, at_level(gain.ratio, gain.num_blocks, level))
            for name in (MIDDLE, *TAILS)
            if (gain := own.gain(name)) is not None and gain.enough
        }
        told = {
            metric: f"{own.name} {show(ratio)} ({show_metric(metric)}, {gain.num_pairs} requests)"
            for metric, (gain, ratio) in seen.items()
        }
        lost = [metric for metric, (_, ratio) in seen.items() if ratio.high < 1.0]
        if lost:
            losing[own.name] = told[lost[0]]
        elif MIDDLE in seen and seen[MIDDLE][0].ratio.known and seen[MIDDLE][1].low > 1.0:
            winning[own.name] = told[MIDDLE]
    return ClassesJudged(losing, winning)


def homogeneous(evidence: Evidence) -> RuleResult:
    """No class loses while another wins."""
    judged = judge_classes(evidence)
    if judged is None:
        return RuleResult("pass", "one class of requests only")
    lost, won = (own.values() for own in judged)
    if not lost:
        none = "no class surely loses or wins"
        return RuleResult("pass", f"no class loses; {', '.join(won)}" if won else none)
    if not won:
        says = f"loses beside the others: {'; '.join(lost)}; no class surely wins"
        return RuleResult("fail", says, "leave speculation off")
    says = f"{SPLIT}: loses beside the others: {'; '.join(lost)}; wins: {'; '.join(won)}"
    advice = f"{', '.join(judged.losing)} to a server without speculation, the rest to the other"
    return RuleResult("fail", says, advice)


def mixed_workload(evidence: Evidence) -> RuleResult:
    """If the tail loses: is a class to blame, or that classes share steps?"""
    p99, p95 = (evidence.summary.gain(metric) for metric in TAILS)
    usable = [g for g in (p99, p95) if g is not None and g.enough and g.ratio.known]
    lost = [gain for gain in usable if evidence.ratio(gain).high < 1.0]
    if not lost and p99 in usable:
        return RuleResult("pass", "the tail does not surely lose")
    if not lost:
        if p99 is None:
            return RuleResult("inconclusive", "not measured")
        says = f"a P99 takes about 1,000 requests an arm; there are {p99.num_pairs}"
        return RuleResult("inconclusive", says, needed_blocks=blocks_to_support(p99))
    says = f"{show_metric(lost[0].metric)} loses: {show(evidence.ratio(lost[0]))}"
    judged, alone = judge_classes(evidence), "`foretoken lab ab --grid class=A,B` runs them alone"
    if judged is not None and judged.losing:
        losers, advice = ", ".join(judged.losing), "leave speculation off"
        if judged.winning:
            advice = f"split the traffic by class: {losers} without speculation; {alone}"
        return RuleResult("fail", f"{says}; in this mix {losers} loses", advice)
    middle = evidence.summary.gain(MIDDLE)
    if middle is None or evidence.ratio(middle).low <= 1.0:
        return RuleResult("pass", f"{says}, and so may the median: no sign of a mix")
    says += f", the median gains {show(evidence.ratio(middle))}: the sign of a mixture"
    return RuleResult("fail", says, f"give requests a `category` in the workload: {alone}")


RULES: dict[str, Callable[..., RuleResult]] = {
    judge.__name__: judge
    for judge in (
        speedup, tail_tpot, p99_tpot, ttft, goodput, output_length,
        restarts, steady, production_load, plausible, busy_host, client_lag,
        acceptance_pays, p10_acceptance, temperatures,
        outputs, errors, parameters_refused, monitoring, kv_squeeze, homogeneous, mixed_workload,
    )
}  # fmt: skip
"""Every rule by its name."""
