"""What the rules look at, an A/B's summary with intervals corrected for repeated looks, and what a
rule answers. Knows no rule.
"""

import math
from dataclasses import dataclass

from foretoken.lab.analysis.gains import STATISTICS
from foretoken.lab.analysis.whole_time import NOTHING_DRAFTED, break_even_of, draft_share_of
from foretoken.lab.records.results import AbSummary, ArmGain, ArmSummary
from foretoken.lab.stats.intervals import Interval
from foretoken.lab.stats.ratios import (
    FEWEST_BLOCKS,
    TAIL_VALUES,
    at_level,
    blocks_to_exceed,
    level_of_look,
    standard_error,
)

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
    reference: ArmSummary | None = None
    """The candidate at another quantization, for comparing acceptance."""

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
            return gain.needed_blocks or 2 * gain.num_blocks
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
