"""What a measured run and an A/B leave behind: the values that every report and verdict reads.

Plain data, no arithmetic beyond ratios of two fields. Times are seconds; those of a request count
from the start of its run on the client's monotonic clock. How they lie on disk is in `run_files`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from foretoken.lab.stats.intervals import Interval
from foretoken.types.accepted import acceptance_length, acceptance_rate

SCHEMA = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAcceptance:
    """What one request's drafts came to, and where that is known from."""

    source: str
    """body, timings, timing_chunks or spec_details."""
    num_drafted: int
    num_accepted: int
    num_steps: int | None = None
    """Verifications with a draft; None where the server does not say."""
    exact: bool = True
    """False for what is inferred from chunks."""
    histogram: tuple[int, ...] = ()
    """Entry j: steps that accepted j drafts."""
    per_step_accepted: tuple[int, ...] = ()
    per_step_drafted: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        """Accepted per drafted token; NaN without drafts."""
        return acceptance_rate(self.num_accepted, self.num_drafted or math.nan)

    @property
    def length(self) -> float:
        """Tokens per verification, the recovered or bonus token included; NaN if unknown."""
        return acceptance_length(self.num_accepted, self.num_steps or math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    index: int
    """Position in the workload: the same in every arm."""
    arm: str = ""
    block: int = 0
    """Number of the stretch of traffic that one started server took, shared by the arms."""
    cluster: str = ""
    """Requests that are not independent of each other, such as a conversation."""
    category: str = ""
    warm_up: bool = False
    temperature: float | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    """Other sampling parameters that were sent."""
    scheduled_s: float = 0.0
    """When the arrival was due."""
    sent_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    """Arrival of the first chunk with text, and of the last."""
    end_s: float | None = None
    """End of the answer or of the attempt."""
    chunk_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    """Tokens per chunk; empty where the server does not say."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    """`kind: text`; kinds are refused, connection, timeout, truncated, server, protocol, and
    of recorded traffic left."""
    text: str | None = None
    text_hash: str | None = None
    acceptance: RequestAcceptance | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.first_s is not None

    @property
    def ttft_s(self) -> float:
        """Seconds from the due arrival to the first token: a late client counts against itself."""
        return self.first_s - self.scheduled_s if self.first_s is not None else float("nan")

    @property
    def e2e_s(self) -> float:
        """Seconds from the due arrival to the last token."""
        return self.last_s - self.scheduled_s if self.last_s is not None else float("nan")

    @property
    def tokens_after_first(self) -> int:
        first = self.chunk_tokens[0] if self.chunk_tokens else 1
        return max(0, (self.output_tokens or 0) - max(first, 1))

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; NaN for fewer than two tokens."""
        after = self.tokens_after_first
        if self.last_s is None or self.first_s is None or not after:
            return float("nan")
        return (self.last_s - self.first_s) / after


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    url: str
    engine: str = "unknown"
    """foretoken, vllm, llama.cpp, sglang, mock or unknown."""
    version: str | None = None
    model: str | None = None
    command: str | None = None
    """How it was started, if the lab did."""
    restarted_by: str | None = None
    """How it was restarted before every block, if somebody else runs it."""

    @property
    def starts_anew(self) -> bool:
        return self.command is not None or self.restarted_by is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """A latency's distribution over requests, in seconds, with 95 % intervals."""

    mean: Interval
    p50: Interval
    p95: Interval
    p99: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceBucket:
    """Acceptance of the requests of one temperature, class or output length."""

    by: str
    """temperature, category, output_tokens or all."""
    value: str
    num_requests: int
    num_drafted: int
    num_accepted: int
    num_steps: int | None
    rate: Interval
    """Accepted per drafted token, requests as clusters."""
    length: Interval | None
    p10: Interval
    """Quantiles of requests' rates with their sampling noise taken out (see `stats.shrinkage`)."""
    p90: Interval
    raw_p10: float
    """P10 as measured, noise included."""
    num_too_short: int = 0
    """Requests left out of the quantiles for too few steps."""
    histogram: tuple[int, ...] = ()
    exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One arm, warm-up left out."""

    arm: str
    server: ServerInfo
    num_requests: int
    num_errors: int
    errors: dict[str, int]
    duration_s: float
    """Summed over blocks."""
    output_tokens: int
    prompt_tokens: float | None = None
    """Mean per request; None where the server does not say."""
    tokens_per_s: Interval
    requests_per_s: float
    goodput_per_s: Interval | None
    """Requests per second that met every service level; None without levels."""
    attained: Interval | None
    """Share of requests that met every service level."""
    ttft: Quantiles | None
    tpot: Quantiles | None
    e2e: Quantiles | None
    acceptance: tuple[AcceptanceBucket, ...] = ()
    num_told: int = 0
    """Requests whose answers tell what was drafted, be it nothing."""
    counters: dict[str, float] = field(default_factory=dict)
    """Growth of the server's counters over the run, sums over restarts."""
    gauges: dict[str, float] = field(default_factory=dict)
    """Largest seen: vllm:kv_cache_usage_perc."""
    parameters_seen: dict[str, int] = field(default_factory=dict)
    """Requests per sampling parameter that was set."""
    steady: bool = True
    """False if queues kept growing or latencies drifted: the numbers then depend on the length."""
    client_lag_p99_s: float = 0.0
    """How late the client sent: must be small against TTFT."""
    notes: tuple[str, ...] = ()

    def buckets(self, by: str) -> tuple[AcceptanceBucket, ...]:
        return tuple(bucket for bucket in self.acceptance if bucket.by == by)

    @property
    def all_drafts(self) -> AcceptanceBucket | None:
        """Acceptance over all requests; None if nothing is known of any."""
        return next(iter(self.buckets("all")), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmGain:
    """How much better the candidate is: above 1 is better, for times and for rates alike."""

    metric: str
    """tpot_p50, tpot_p95, tpot_p99, tpot_total, ttft_p50, ..., tokens_per_s, goodput."""
    ratio: Interval
    """baseline / candidate for times, candidate / baseline for rates."""
    num_blocks: int
    num_pairs: int
    enough: bool
    """Whether the sample can support this statistic at all."""
    ratio_by_block: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """Whether the arms wrote the same text, over deterministic requests answered by both."""

    num_compared: int
    num_equal: int
    share: Interval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassGains:
    """Gains over the requests of one class inside the mix."""

    by: str
    """category, temperature or context."""
    value: str
    num_pairs: int
    """Requests of the class that both arms answered."""
    gains: tuple[ArmGain, ...]

    @property
    def name(self) -> str:
        """`creative`, `temperature 0.8`, `context 1-256 tokens`."""
        return self.value if self.by == "category" else f"{self.by} {self.value}"

    def gain(self, metric: str) -> ArmGain | None:
        return next((gain for gain in self.gains if gain.metric == metric), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbSummary:
    """`summary.json` of a run: of an A/B, or of one server, which is then both sides."""

    kind: str = "ab"
    schema: int = SCHEMA
    complete: bool = True
    """False if it was stopped early; everything is computed on what there is."""
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    baseline: str
    candidate: str
    arms: tuple[ArmSummary, ...]
    gains: tuple[ArmGain, ...] = ()
    equality: Equality | None = None
    classes: tuple[ClassGains, ...] = ()
    """Every class inside the mix; empty where the traffic has one class only."""
    look: int = 1
    """How many times this experiment has been judged, for the correction of repeated looks."""
    notes: tuple[str, ...] = ()

    @property
    def compared(self) -> bool:
        return len(self.arms) == 2

    def arm(self, name: str) -> ArmSummary:
        return next(arm for arm in self.arms if arm.arm == name)

    def gain(self, metric: str) -> ArmGain | None:
        return next((gain for gain in self.gains if gain.metric == metric), None)
