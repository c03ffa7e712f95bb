"""Other draft lengths, replayed on what the candidate of an A/B recorded. Pure.

Each recorded step tells of target positions: its accepted drafts would be accepted again, and the
one after them was rejected. Only the bonus token after a draft that was accepted whole is not known
to match or not. A draft's guess is taken to depend on the text before it alone, which is so for
draft models and n-grams at temperature 0 and nearly so elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretoken.errors import ConfigError
from foretoken.lab.analysis.whole_time import StepCounts, counts_of
from foretoken.lab.records.results import AbSummary, RequestRecord
from foretoken.types.accepted import acceptance_rate

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
