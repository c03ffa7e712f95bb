"""Rules about the experiment itself: can its numbers be true, and was anything in the way?

A result that cannot be true, or that something else made, is INVALID: it says nothing about the
candidate, good or bad, and more blocks of the same do not help.
"""

from dataclasses import dataclass
from urllib.parse import urlsplit

from foretoken.lab.decide.evidence import (
    Evidence,
    RuleKind,
    RuleResult,
    show,
    show_break_even,
)
from foretoken.lab.decide.rules.speed import Nothing
from foretoken.lab.records.results import ServerInfo

LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


def plausible(evidence: Evidence, _: Nothing) -> RuleResult:
    """No speed-up above the acceptance length, no break-even that every loss would contradict."""
    gain = evidence.summary.gain("tpot_mean") or evidence.summary.gain("tpot_p50")
    bucket = evidence.candidate.all_drafts
    if gain is None or bucket is None or bucket.length is None or not bucket.exact:
        unsaid = "the server does not say how many tokens a verification yields"
        says = evidence.without_drafts(unsaid)
        return RuleResult(outcome="inconclusive", says=says)
    ratio, length = evidence.ratio(gain), bucket.length
    says = f"{gain.metric} {show(ratio)} at an acceptance length of {length.estimate:.2f}"
    if not _same_load(evidence):
        # The faster arm of an open loop has fewer requests in flight, whose steps are shorter.
        return RuleResult(outcome="pass", says=f"{says}; in an open loop it may be above")
    if ratio.known and length.known and ratio.low > length.high:
        return RuleResult(
            outcome="invalid",
            says=f"{says}: a verification takes at least as long as a plain step, so the gain "
            "cannot be above what it yields",
            advice="was the baseline held up, or did the arms write different lengths? See the "
            "notes of the run, and measure again on a quiet machine",
        )
    limit = evidence.break_even
    if limit is not None and limit.low > 1.0 and not ratio.high < 1.0:
        return RuleResult(
            outcome="invalid",
            says=f"{says}: by that {show_break_even(limit)}, and yet no loss is shown",
            advice="the counts of drafts and the times contradict each other: measure again",
        )
    return RuleResult(outcome="pass", says=says)


def _same_load(evidence: Evidence) -> bool:
    load = evidence.summary.config.get("load") or {}
    return bool(load.get("kind", "closed") == "closed")


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyHost:
    """Parameters of `busy_host`."""

    most_share: float = 0.2
    """Share of the machine's time that others may take, on average over the blocks."""


def busy_host(evidence: Evidence, given: BusyHost) -> RuleResult:
    """Nothing else kept the machine busy that servers and client run on."""
    busy = evidence.summary.environment.get("host_busy")
    if not any(_local(arm.server) for arm in evidence.summary.arms):
        return RuleResult(outcome="pass", says="the servers run on other machines")
    if busy is None:
        return RuleResult(outcome="inconclusive", says="this system does not tell how busy it is")
    says = f"before its blocks the machine was {busy:.0%} busy with something else"
    if busy > given.most_share:
        return RuleResult(
            outcome="invalid",
            says=says,
            threshold=given.most_share,
            advice="end what else runs there (top shows it), and measure again",
        )
    return RuleResult(outcome="pass", says=says)


def _local(server: ServerInfo) -> bool:
    return server.command is not None or urlsplit(server.url).hostname in LOCAL


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLag:
    """Parameters of `client_lag`."""

    most_share: float = 0.05
    """Allowed lag as a share of the median time to the first token."""


def client_lag(evidence: Evidence, given: ClientLag) -> RuleResult:
    """The measuring client kept up with its own schedule."""
    worst, share = "", 0.0
    for arm in evidence.summary.arms:
        if arm.ttft is not None and arm.ttft.p50.estimate > 0:
            own = arm.client_lag_p99_s / arm.ttft.p50.estimate
            worst, share = (arm.arm, own) if own > share else (worst, share)
    if share > given.most_share:
        return RuleResult(
            outcome="invalid",
            says=f"the client was late by {share:.0%} of the median TTFT in arm {worst}",
            advice="run the client on another machine or with less load",
        )
    return RuleResult(outcome="pass", says=f"the client was at most {share:.1%} of TTFT late")


VALIDITY_RULES = (
    RuleKind("plausible", Nothing, plausible),
    RuleKind("busy_host", BusyHost, busy_host),
    RuleKind("client_lag", ClientLag, client_lag),
)
