"""Counts of everything the engine did, in the shape of vLLM's metrics reader.

Fed with one StepStats per step; knows nothing about how they came about. Names that vLLM has are
`vllm:...`; ours are `foretoken:...`.
"""

import logging
import time
from dataclasses import dataclass

from foretoken.types import StepStats

logger = logging.getLogger("foretoken")


@dataclass(frozen=True, slots=True)
class Metric:
    """A named value; `labels` tell series of one name apart."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Grows only."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """The value now."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counters by index, such as draft positions."""

    values: list[int]


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

    def add(self, stats: StepStats) -> None:
        self.num_drafts += stats.num_drafts
        self.num_draft_tokens += stats.num_draft_tokens
        self.num_accepted_tokens += stats.num_accepted_tokens
        self.num_output_tokens += stats.num_output_tokens
        self.num_steps += 1
        self.drafting_s += stats.drafting_s
        self.verifying_s += stats.verifying_s

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification with a draft, the recovered or bonus token included."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens per drafted one."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


def _add_by_position(into: list[int], counts: tuple[int, ...]) -> None:
    into.extend([0] * (len(counts) - len(into)))
    for position, count in enumerate(counts):
        into[position] += count


class EngineMetrics:
    """Totals since the start, and the log line every `log_interval_s` seconds."""

    def __init__(self, model: str, *, log_stats: bool, log_interval_s: float = 10.0) -> None:
        """Label everything with the `model` name; log only if `log_stats`."""
        self._labels = {"model_name": model, "engine": "0"}
        self._totals = _Totals()
        self._per_pos: list[int] = []
        self._running = 0
        self._waiting = 0
        self._finished = 0
        self._log_stats = log_stats
        self._log_interval_s = log_interval_s
        self._recent = _Totals()
        self._recent_per_pos: list[int] = []
        self._logged_at = time.monotonic()

    def record(self, stats: StepStats) -> None:
        """Add one step."""
        self._totals.add(stats)
        _add_by_position(self._per_pos, stats.num_accepted_tokens_per_pos)
        self._running, self._waiting = stats.num_sequences, stats.num_waiting
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
        }
        gauges = {
            "vllm:num_requests_running": self._running,
            "vllm:num_requests_waiting": self._waiting,
            "foretoken:acceptance_length": t.acceptance_length,
            "foretoken:draft_acceptance_rate": t.acceptance_rate,
        }
        metrics: list[Metric] = [Counter(n, self._labels, v) for n, v in counters.items()]
        metrics += [Gauge(n, self._labels, v) for n, v in gauges.items()]
        per_pos = list(self._per_pos)
        metrics.append(
            Vector("vllm:spec_decode_num_accepted_tokens_per_pos", self._labels, per_pos)
        )
        return metrics

    def _maybe_log(self) -> None:
        now = time.monotonic()
        elapsed = now - self._logged_at
        if elapsed < self._log_interval_s:
            return
        t = self._recent
        line = (
            f"{t.num_output_tokens / elapsed:.1f} tokens/s, {self._running} running, "
            f"{self._waiting} waiting"
        )
        if t.num_drafts:
            by_pos = ", ".join(f"{count / t.num_drafts:.3f}" for count in self._recent_per_pos)
            line += (
                f"; mean acceptance length {t.acceptance_length:.2f}, "
                f"acceptance rate {t.acceptance_rate:.1%}, per position {by_pos}, "
                f"drafted {t.num_draft_tokens / elapsed:.1f} tokens/s, "
                f"accepted {t.num_accepted_tokens / elapsed:.1f} tokens/s"
            )
        logger.info(line)
        self._recent, self._recent_per_pos, self._logged_at = _Totals(), [], now
