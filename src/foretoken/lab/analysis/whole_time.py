"""Break-even by whole time: the acceptance at which drafting takes as long as not drafting. Pure.

N tokens after the first of each answer take N plain steps. With drafts, A of D drafted tokens are
accepted, so there are N - A steps, and only some of them draft: look-ups often find nothing. What
drafts and their verifications cost does not depend on what is accepted, and every accepted token
saves a plain step. A speed-up of S has saved N (1 - 1 / S) plain steps in all, so nothing is gained
where that many fewer drafts are accepted: r* = (A - N (1 - 1 / S)) / D. Where every step drafts k
tokens, this is the cost of a step less one, over k.

Other draft lengths are replayed on what the candidate recorded: each step tells of target
positions. Its accepted drafts would be accepted again, and the one after them was rejected. Only
the bonus token after a draft that was accepted whole is not known to match or not. A draft's guess
is taken to depend on the text before it alone, which is so for draft models and n-grams at
temperature 0 and nearly so elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretoken.errors import ConfigError
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


MATCH, MISS, OPEN = 1, 0, -1


class ReplayedSteps(NamedTuple):
    tokens_per_step: float
    drafts_per_step: float
    acceptance_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLength:
    """One replayed length; an estimate."""

    k: int
    tokens_per_step: float
    least: float
    """Tokens per step if no open position matched."""
    most: float
    """If all did."""
    acceptance_rate: float
    speedup: float | None
    """Over the baseline, if drafts cost what they cost in the run; None where that is not known."""


def streams_of(records: Sequence[RequestRecord]) -> list[list[int]]:
    """Per request, its target positions as MATCH, MISS or OPEN. Raises ConfigError: no record has
    per-step counts."""
    streams = []
    for record in records:
        found = record.acceptance
        if found is None or not found.per_step_accepted:
            continue
        accepted = found.per_step_accepted
        drafted = found.per_step_drafted or (max(accepted),) * len(accepted)
        stream: list[int] = []
        for good, tried in zip(accepted, drafted, strict=True):
            stream += [MATCH] * good
            stream.append(MISS if good < tried else OPEN)
        streams.append(stream)
    if not streams:
        allowed = "a candidate started with --per-request-spec-decode-metrics detailed"
        raise ConfigError("--k", "a run without an accept stream", allowed)
    return streams


def replay(streams: Sequence[Sequence[int]], k: int, *, open_chance: float) -> ReplayedSteps:
    """Steps of at most `k` drafts through all streams; an open position matches by chance."""
    rng = np.random.default_rng(0)
    tokens = steps = drafted = accepted = 0
    for stream in streams:
        known = [
            value == MATCH or (value == OPEN and rng.random() < open_chance) for value in stream
        ]
        position = 0
        while position < len(known):
            budget = min(k, len(known) - position - 1)
            good = 0
            while good < budget and known[position + good]:
                good += 1
            steps += 1
            drafted, accepted = drafted + budget, accepted + good
            position += good + 1
        tokens += len(known)
    return ReplayedSteps(tokens / steps, drafted / steps, acceptance_rate(accepted, drafted))


def other_lengths(
    summary: AbSummary, records: Sequence[RequestRecord], lengths: Sequence[int]
) -> tuple[OtherLength, ...]:
    """What the candidate would have done at each of `lengths`, by its records. Raises ConfigError:
    the records have no accept stream."""
    streams = streams_of(records)
    flat = [value for stream in streams for value in stream]
    matched, missed = flat.count(MATCH), flat.count(MISS)
    chance = matched / (matched + missed) if matched + missed else 0.0
    gain = summary.gain("tpot_total") or summary.gain("tpot_p50")
    counts = counts_of(summary.arm(summary.candidate))
    found = []
    for k in lengths:
        low, middle, high = (replay(streams, k, open_chance=c) for c in (0.0, chance, 1.0))
        least, most = sorted((low.tokens_per_step, high.tokens_per_step))
        speedup = _speedup(middle, counts, gain.ratio.estimate) if counts and gain else None
        found.append(
            OtherLength(k=k, tokens_per_step=middle.tokens_per_step, least=least, most=most,
                        acceptance_rate=middle.acceptance_rate, speedup=speedup)
        )  # fmt: skip
    return tuple(found)


def _speedup(replayed: ReplayedSteps, counts: StepCounts, measured: float) -> float:
    """Over plain decoding, in whose steps all is counted; steps without a draft stay as they are.
    At a speed-up of S, N tokens took N / S plain steps of time; what the steps do not account for
    is the drafts' cost."""
    tokens = counts.num_steps + counts.num_accepted
    per_draft = (tokens / measured - counts.num_steps) / counts.num_drafted
    plain = counts.num_steps - counts.num_verifications
    steps = (tokens - plain) / replayed.tokens_per_step
    return tokens / (plain + steps * (1 + per_draft * replayed.drafts_per_step))
