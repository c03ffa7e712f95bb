"""What the runs of an interleaved comparison say: speed, acceptance, and whether tokens differ.

Pure arithmetic on finished runs. A prompt counts with its median over repeats, and intervals come
from resampling prompts, since repeats of a prompt are not independent of each other.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from foretoken.cli.interleave import Run

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median over prompts with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One arm on one workload."""

    workload: str
    arm: str
    num_prompts: int
    num_repeats: int
    num_tokens: int
    """Output tokens of one pass over the prompts."""
    tokens_per_s: float
    latency_s: Estimate
    first_token_s: Estimate
    speedup: Estimate
    """Baseline's seconds per token over this arm's, prompt by prompt."""
    acceptance_length: float
    acceptance_by_position: tuple[float, ...]
    """For draft position i, the share of verifications that accepted it."""
    identical: bool
    """Whether every run of every prompt gave the baseline's tokens."""
    repeated_4grams: float
    """Share of 4-grams that occurred before in the same output."""


def estimate(values: Sequence[float], *, resamples: int = RESAMPLES) -> Estimate:
    """Median and percentile bootstrap interval (Efron 1979) of `values`, at least one."""
    middle = median(values)
    if len(values) == 1 or resamples == 0:
        return Estimate(middle, middle, middle)
    rng = random.Random(0)
    drawn = sorted(median(rng.choices(values, k=len(values))) for _ in range(resamples))
    return Estimate(middle, drawn[int(0.025 * resamples)], drawn[int(0.975 * resamples)])


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams of `tokens` that occurred before in it; 0 if it has none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def acceptance_by_position(runs: Sequence[Run]) -> tuple[float, ...]:
    """For each draft position, the share of all verifications that accepted it."""
    accepted = [count for run in runs for count in _accepted(run)]
    deepest = max((n for run in runs for n in _drafted(run)), default=0)
    return tuple(sum(n > i for n in accepted) / len(accepted) for i in range(deepest))


def summarize(
    runs: Sequence[Run], baseline: str, *, resamples: int = RESAMPLES
) -> tuple[ArmSummary, ...]:
    """One summary per workload and arm, in order of appearance.

    Only prompts that the baseline and the arm have both finished count.
    """
    groups: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        groups[run.workload][run.arm].append(run)
    return tuple(
        _summarize_arm(of_arm, arms[baseline], resamples)
        for arms in groups.values()
        for of_arm in arms.values()
        if {r.prompt_index for r in of_arm} & {r.prompt_index for r in arms.get(baseline, ())}
    )


def _summarize_arm(runs: list[Run], base: list[Run], resamples: int) -> ArmSummary:
    common = sorted({r.prompt_index for r in runs} & {r.prompt_index for r in base})
    runs = [run for run in runs if run.prompt_index in common]
    reference = {run.prompt_index: run.output.token_ids for run in reversed(base)}
    first = {run.prompt_index: run for run in reversed(runs)}
    pace, base_pace = _medians(runs, _pace), _medians(base, _pace)
    latency = _medians(runs, lambda run: run.seconds)
    first_token = _medians(runs, _first_token_s)
    accepted = [count for run in runs for count in _accepted(run)]
    num_tokens = sum(len(first[i].output.token_ids) for i in common)
    repeated = [repeated_ngrams(first[i].output.token_ids) for i in common]
    return ArmSummary(
        workload=runs[0].workload,
        arm=runs[0].arm,
        num_prompts=len(common),
        num_repeats=1 + max(run.repeat for run in runs),
        num_tokens=num_tokens,
        tokens_per_s=num_tokens / sum(latency[i] for i in common),
        latency_s=estimate([latency[i] for i in common], resamples=resamples),
        first_token_s=estimate([first_token[i] for i in common], resamples=resamples),
        speedup=estimate([base_pace[i] / pace[i] for i in common], resamples=resamples),
        acceptance_length=1.0 + sum(accepted) / len(accepted) if accepted else 1.0,
        acceptance_by_position=acceptance_by_position(runs),
        identical=all(run.output.token_ids == reference[run.prompt_index] for run in runs),
        repeated_4grams=sum(repeated) / len(repeated),
    )


def _medians(runs: Sequence[Run], value: Callable[[Run], float]) -> dict[int, float]:
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        by_prompt[run.prompt_index].append(value(run))
    return {index: median(values) for index, values in by_prompt.items()}


def _pace(run: Run) -> float:
    return run.seconds_per_token


def _first_token_s(run: Run) -> float:
    return run.output.metrics.first_token_s if run.output.metrics is not None else run.seconds


def _accepted(run: Run) -> tuple[int, ...]:
    return run.output.metrics.accepted_per_step if run.output.metrics is not None else ()


def _drafted(run: Run) -> tuple[int, ...]:
    return run.output.metrics.drafted_per_step if run.output.metrics is not None else ()
