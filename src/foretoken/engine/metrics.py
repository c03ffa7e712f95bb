"""Counts of everything the engine did, in the shape of `v1.metrics.reader`.

Fed with one StepStats per step; knows nothing about how they came about. Names that vLLM has are
`vllm:...`; ours are `foretoken:...`.
"""

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from foretoken.control.cost import PlainCost, StepShape
from foretoken.types import StepStats
from foretoken.types.accepted import acceptance_length, acceptance_rate
from foretoken.v1.metrics.reader import Counter, Gauge, Histogram, Metric, Vector

logger = logging.getLogger("foretoken")

_STEP_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper edges of the buckets of tokens per step, as vLLM's."""
_WINDOW_S = 60


@dataclass(slots=True)
class _Totals:
    """Sums over steps."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    drafting_s: float = 0.0
    verifying_s: float = 0.0
    step_s: float = 0.0

    def add(self, stats: StepStats) -> None:
        self.num_drafts += stats.num_drafts
        self.num_draft_tokens += stats.num_draft_tokens
        self.num_accepted_tokens += stats.num_accepted_tokens
        self.num_output_tokens += stats.num_output_tokens
        self.num_steps += 1
        self.drafting_s += stats.drafting_s
        self.verifying_s += stats.verifying_s
        self.step_s += stats.total_s

    def join(self, other: "_Totals") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def draft_length(self) -> float:
        """Draft tokens per verification with a draft."""
        return self.num_draft_tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification with a draft, the recovered or bonus token included."""
        return acceptance_length(self.num_accepted_tokens, self.num_drafts)

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens per drafted one."""
        return acceptance_rate(self.num_accepted_tokens, self.num_draft_tokens)


class PlainEstimate:
    """What decoding without speculation would have taken, beside what decoding took.

    Steps that compute prompts count for neither. A plain step is one without drafts.
    """

    def __init__(self, cost: PlainCost) -> None:
        """Estimate by `cost`, which learns from every plain step; nothing is summed up yet."""
        self.cost = cost
        self.estimated_s = 0.0
        """Estimated seconds of all decoding steps, had they been plain."""
        self.measured_s = 0.0
        """Seconds that the same steps took."""

    def add(self, stats: StepStats) -> None:
        """Add one step."""
        count = stats.num_sampled
        if count == 0 or stats.num_prefilled > 0:
            return
        shape = StepShape(rows=count, sequences=count)
        if stats.num_draft_tokens == 0:
            self.cost.observe(shape, stats.busy_s)
        if self.cost.known:
            plain_s = self.cost.seconds(shape)
            self.estimated_s += plain_s * stats.num_output_tokens / count
            self.measured_s += stats.busy_s

    def step_seconds(self, count: int) -> float:
        """Seconds of a plain step of `count` sequences; 0 if none was ever seen."""
        shape = StepShape(rows=count, sequences=count)
        return self.cost.seconds(shape) if self.cost.known else 0.0


class Window:
    """Sums of the last minute, in buckets of a second."""

    def __init__(self) -> None:
        """Empty."""
        self._buckets: deque[tuple[int, _Totals]] = deque(maxlen=_WINDOW_S)

    def add(self, stats: StepStats, now: float) -> None:
        """Add a step that ended `now`."""
        second = int(now)
        if not self._buckets or self._buckets[-1][0] != second:
            self._buckets.append((second, _Totals()))
        self._buckets[-1][1].add(stats)

    def sums(self, now: float) -> tuple[_Totals, float]:
        """Sums, and over how many seconds."""
        recent = [(at, t) for at, t in list(self._buckets) if at > now - _WINDOW_S]
        total = _Totals()
        for _, one in recent:
            total.join(one)
        return total, max(now - recent[0][0], 1.0) if recent else 1.0


def _add_by_position(into: list[int], counts: tuple[int, ...]) -> None:
    into.extend([0] * (len(counts) - len(into)))
    for position, count in enumerate(counts):
        into[position] += count


class EngineMetrics:
    """Totals since the start, and the log line every `log_interval_s` seconds."""

    def __init__(self, model: str, *, log_stats: bool, log_interval_s: float = 10.0) -> None:
        """Label everything with the `model` name; log only if `log_stats`."""
        self._labels = {"model_name": model, "engine": "0"}
        self._log_stats = log_stats
        self._log_interval_s = log_interval_s
        self.plain = PlainEstimate(PlainCost())
        self._watched: dict[str, Callable[[], float]] = {}
        self.restart()

    def restart(self) -> None:
        """Forget all counts; what a plain step costs and which gauges are watched stay known."""
        self.plain = PlainEstimate(self.plain.cost)
        self._totals = _Totals()
        self._step_sizes = [0] * (len(_STEP_EDGES) + 1)
        self._step_tokens = 0
        self._per_pos: list[int] = []
        self._running = 0
        self._waiting = 0
        self._finished = 0
        self._window = Window()
        self._recent = _Totals()
        self._recent_per_pos: list[int] = []
        self._logged_at = time.monotonic()

    def watch(self, name: str, read: Callable[[], float]) -> None:
        """Report a gauge that is read when asked for."""
        self._watched[name] = read

    def record(self, stats: StepStats) -> None:
        """Add one step."""
        self._totals.add(stats)
        tokens = stats.num_prefilled + stats.num_output_tokens
        self._step_sizes[bisect_left(_STEP_EDGES, tokens)] += 1
        self._step_tokens += tokens
        _add_by_position(self._per_pos, stats.num_accepted_tokens_per_pos)
        self._running, self._waiting = stats.num_sequences, stats.num_waiting
        self.plain.add(stats)
        self._window.add(stats, time.monotonic())
        if self._log_stats:
            self._recent.add(stats)
            _add_by_position(self._recent_per_pos, stats.num_accepted_tokens_per_pos)
            self._maybe_log()

    def record_prompt(self, num_tokens: int) -> None:
        """Count the prompt of an accepted request."""
        self._totals.num_prompt_tokens += num_tokens

    def record_finished(self) -> None:
        """Count the end of a request."""
        self._finished += 1

    def read(self) -> list[Metric]:
        """Every metric as it stands."""
        t = self._totals
        counters: dict[str, int | float] = {
            "vllm:spec_decode_num_drafts": t.num_drafts,
            "vllm:spec_decode_num_draft_tokens": t.num_draft_tokens,
            "vllm:spec_decode_num_accepted_tokens": t.num_accepted_tokens,
            "vllm:prompt_tokens": t.num_prompt_tokens,
            "vllm:generation_tokens": t.num_output_tokens,
            "vllm:request_success": self._finished,
            "foretoken:engine_steps": t.num_steps,
            "foretoken:drafting_seconds": t.drafting_s,
            "foretoken:verifying_seconds": t.verifying_s,
            "foretoken:step_seconds": t.step_s,
            "foretoken:wasted_draft_tokens": t.num_draft_tokens - t.num_accepted_tokens,
            "foretoken:decoding_seconds": self.plain.measured_s,
            "foretoken:plain_decoding_seconds_estimate": self.plain.estimated_s,
        }
        recent, seconds = self._window.sums(time.monotonic())
        gauges = {
            "vllm:num_requests_running": self._running,
            "vllm:num_requests_waiting": self._waiting,
            "foretoken:acceptance_length": t.acceptance_length,
            "foretoken:draft_acceptance_rate": t.acceptance_rate,
            "foretoken:recent_acceptance_length": recent.acceptance_length,
            "foretoken:recent_draft_acceptance_rate": recent.acceptance_rate,
            "foretoken:recent_draft_length": recent.draft_length,
            "foretoken:recent_tokens_per_second": recent.num_output_tokens / seconds,
            "foretoken:plain_step_seconds": self.plain.step_seconds(max(self._running, 1)),
        }
        metrics: list[Metric] = [Counter(n, self._labels, v) for n, v in counters.items()]
        gauges |= {name: read() for name, read in self._watched.items()}
        metrics += [Gauge(n, self._labels, v) for n, v in gauges.items()]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        return [*metrics, Vector(name, self._labels, list(self._per_pos)), self._steps()]

    def _steps(self) -> Histogram:
        """Tokens of a step: of prompts that were computed, and of outputs."""
        edges = (*(f"{edge:.1f}" for edge in _STEP_EDGES), "+Inf")
        found = dict(zip(edges, accumulate(self._step_sizes), strict=True))
        name, total = "vllm:iteration_tokens_total", self._step_tokens
        return Histogram(name, self._labels, found["+Inf"], total, found)

    def _maybe_log(self) -> None:
        now = time.monotonic()
        elapsed = now - self._logged_at
        if elapsed < self._log_interval_s:
            return
        t = self._recent
        line = f"{t.num_output_tokens / elapsed:.1f} tokens/s, {self._running} running"
        line += f", {self._waiting} waiting"
        if t.num_drafts:
            by_pos = ", ".join(f"{count / t.num_drafts:.3f}" for count in self._recent_per_pos)
            line += (
                f"; mean acceptance length {t.acceptance_length:.2f}, acceptance rate "
                f"{t.acceptance_rate:.1%}, per position {by_pos}, drafted "
                f"{t.num_draft_tokens / elapsed:.1f} tokens/s, accepted "
                f"{t.num_accepted_tokens / elapsed:.1f} tokens/s"
            )
        logger.info(line)
        self._recent, self._recent_per_pos, self._logged_at = _Totals(), [], now
