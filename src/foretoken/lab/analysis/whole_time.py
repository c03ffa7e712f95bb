"""Break-even by whole time: the acceptance at which drafting takes as long as not drafting. Pure.

N tokens after the first of each answer take N plain steps. With drafts, A of D drafted tokens are
accepted, so there are N - A steps, and only some of them draft: look-ups often find nothing. What
drafts and their verifications cost does not depend on what is accepted, and every accepted token
saves a plain step. A speed-up of S has saved N (1 - 1 / S) plain steps in all, so nothing is gained
where that many fewer drafts are accepted: r* = (A - N (1 - 1 / S)) / D. Where every step drafts k
tokens, this is the cost of a step less one, over k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.lab.records.results import AbSummary, ArmSummary, RequestRecord
from foretoken.lab.stats.intervals import Interval, unknown
from foretoken.types.accepted import acceptance_length, acceptance_rate

NOTHING_DRAFTED = "no step drafted anything"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    num_tokens: int
    """After the first token of each answer; 0 where the server does not say."""
    num_verifications: int
    """Steps that drafted."""
    num_drafted: int
    num_accepted: int

    @property
    def num_steps(self) -> int:
        """All steps, those that drafted nothing included."""
        return max(self.num_tokens - self.num_accepted, self.num_verifications)

    @property
    def draft_share(self) -> float:
        return self.num_verifications / self.num_steps

    @property
    def acceptance_rate(self) -> float:
        return acceptance_rate(self.num_accepted, self.num_drafted)

    @property
    def k(self) -> float:
        """Mean drafts of a step that drafted."""
        return self.num_drafted / self.num_verifications

    @property
    def tokens_per_step(self) -> float:
        return acceptance_length(self.num_accepted, self.num_steps)


def counts_of(arm: ArmSummary) -> StepCounts | None:
    """The steps of an arm; None if nothing was drafted, or verifications were not counted."""
    bucket = arm.all_drafts
    if bucket is None or not bucket.num_steps or not bucket.num_drafted:
        return None
    return StepCounts(
        num_tokens=arm.output_tokens - (arm.num_requests - arm.num_errors),
        num_verifications=bucket.num_steps,
        num_drafted=bucket.num_drafted,
        num_accepted=bucket.num_accepted,
    )


def counts_of_records(records: Sequence[RequestRecord]) -> StepCounts | None:
    found = [r.acceptance for r in records if r.acceptance is not None and r.acceptance.num_steps]
    drafted = sum(a.num_drafted for a in found)
    if not drafted:
        return None
    return StepCounts(
        num_tokens=sum(r.output_tokens - 1 for r in records if r.output_tokens),
        num_verifications=sum(a.num_steps or 0 for a in found),
        num_drafted=drafted,
        num_accepted=sum(a.num_accepted for a in found),
    )


def break_even(counts: StepCounts, speedup: Interval) -> Interval:
    """Acceptance rate that neither gains nor loses, of steps that were measured at `speedup`. The
    interval is the speed-up's; 0: any rate pays; above 1: none does."""
    tokens = counts.num_steps + counts.num_accepted

    def rate(gain: float) -> float:
        saved = tokens * (1.0 - 1.0 / gain)
        return max(0.0, (counts.num_accepted - saved) / counts.num_drafted)

    if not speedup.known or speedup.low <= 0:
        return unknown(rate(speedup.estimate))
    ends = rate(speedup.high), rate(speedup.low)
    return Interval(rate(speedup.estimate), *ends, speedup.level)


def break_even_of(summary: AbSummary) -> Interval | None:
    """The acceptance rate at which this server at this load would gain nothing. None if nothing was
    drafted, or the server does not count verifications."""
    counts = counts_of(summary.arm(summary.candidate))
    gain = summary.gain("tpot_total") or summary.gain("tpot_p50")
    return None if counts is None or gain is None else break_even(counts, gain.ratio)


def draft_share_of(summary: AbSummary) -> float | None:
    """Share of the candidate's steps that drafted; 0 if it says that none did, None if unknown."""
    arm = summary.arm(summary.candidate)
    counts = counts_of(arm)
    if counts is not None:
        return counts.draft_share
    return 0.0 if arm.all_drafts is None and arm.num_told else None
