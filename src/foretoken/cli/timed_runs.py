"""Several LLMs write the same prompts in turns: speed, acceptance, and whether tokens differ.

Owns the clock, and what its numbers must be read with; one request at a time. Knows nothing about
what is compared. A prompt counts with its median over repeats, and intervals come from resampling
prompts, since repeats of a prompt are not independent of each other.
"""

import platform
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import foretoken
from foretoken.lab.stats.repeats import bootstrap_ends, in_turn
from foretoken.types import CompletionOutput, SamplingParams
from foretoken.types.accepted import acceptance_length, accepted_by_position, histogram_of

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.llm import LLM


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the things compared."""

    name: str
    llm: "LLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and how they are continued."""

    name: str
    prompts: tuple[str, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """One request of one arm."""

    arm: str
    workload: str
    prompt_index: int
    repeat: int
    seconds: float
    """From call to return, tokenizing included."""
    output: CompletionOutput

    @property
    def seconds_per_token(self) -> float:
        """Seconds per output token."""
        return self.seconds / max(1, len(self.output.token_ids))

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token, all of them where that is not known."""
        return self.output.metrics.first_token_s if self.output.metrics else self.seconds


def interleave(arms: Sequence[Arm], workload: Workload, repeat: int) -> Iterator[TimedRun]:
    """Every prompt through every arm once; who goes first rotates with prompt and repeat.

    Outputs of earlier repeats are no outputs to draft from: they would be these very ones.
    """
    for index, text in enumerate(workload.prompts):
        prompt = {"prompt": text, "cache_salt": f"repeat {repeat}"}
        for arm in in_turn(arms, index + repeat):
            began = time.perf_counter()
            [result] = arm.llm.generate(prompt, workload.params, use_tqdm=False)
            yield TimedRun(
                arm=arm.name,
                workload=workload.name,
                prompt_index=index,
                repeat=repeat,
                seconds=time.perf_counter() - began,
                output=result.outputs[0],
            )


def with_bar(console: "Console", runs: Iterable[TimedRun], most: int) -> list[TimedRun]:
    """The runs, while a bar says how many of so many are done; it is drawn between them."""
    from rich.progress import Progress

    with Progress(console=console, auto_refresh=False, transient=True) as progress:
        return list(progress.track(runs, total=most, description="measuring"))


def warm_up(arms: Sequence[Arm], workload: Workload) -> None:
    """One unmeasured request per arm."""
    prompt = {"prompt": workload.prompts[0], "cache_salt": "warm-up"}
    for arm in arms:
        arm.llm.generate(prompt, workload.params, use_tqdm=False)


RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median over prompts with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedArm:
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
    return Estimate(middle, *bootstrap_ends(values, median, resamples=resamples))


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams of `tokens` that occurred before in it; 0 if it has none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def summarize(runs: Sequence[TimedRun], baseline: str) -> tuple[ComparedArm, ...]:
    """One summary per workload and arm, in order of appearance.

    Only prompts that the baseline and the arm have both finished count.
    """
    groups: dict[str, dict[str, list[TimedRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        groups[run.workload][run.arm].append(run)
    return tuple(
        _summarize_arm(of_arm, arms[baseline])
        for arms in groups.values()
        for of_arm in arms.values()
        if {r.prompt_index for r in of_arm} & {r.prompt_index for r in arms.get(baseline, ())}
    )


def _summarize_arm(runs: list[TimedRun], base: list[TimedRun]) -> ComparedArm:
    common = sorted({r.prompt_index for r in runs} & {r.prompt_index for r in base})
    runs = [run for run in runs if run.prompt_index in common]
    reference = {run.prompt_index: run.output.token_ids for run in reversed(base)}
    first = {run.prompt_index: run for run in reversed(runs)}
    latency, first_token = _medians(runs, "seconds"), _medians(runs, "first_token_s")
    pace, base_pace = (_medians(each, "seconds_per_token") for each in (runs, base))
    done = [run.output.metrics for run in runs if run.output.metrics is not None]
    accepted = [count for metrics in done for count in metrics.accepted_per_step]
    drafted = [count for metrics in done for count in metrics.drafted_per_step]
    num_tokens = sum(len(first[i].output.token_ids) for i in common)
    repeated = [repeated_ngrams(first[i].output.token_ids) for i in common]
    return ComparedArm(
        workload=runs[0].workload,
        arm=runs[0].arm,
        num_prompts=len(common),
        num_repeats=1 + max(run.repeat for run in runs),
        num_tokens=num_tokens,
        tokens_per_s=num_tokens / sum(latency[i] for i in common),
        latency_s=estimate([latency[i] for i in common]),
        first_token_s=estimate([first_token[i] for i in common]),
        speedup=estimate([base_pace[i] / pace[i] for i in common]),
        acceptance_length=acceptance_length(sum(accepted), len(accepted)),
        acceptance_by_position=accepted_by_position(
            histogram_of(accepted), histogram_of(drafted), of_all=True
        ),
        identical=all(run.output.token_ids == reference[run.prompt_index] for run in runs),
        repeated_4grams=sum(repeated) / len(repeated),
    )


def _medians(runs: Sequence[TimedRun], name: str) -> dict[int, float]:
    """For each prompt the median over repeats of one of its times."""
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        by_prompt[run.prompt_index].append(getattr(run, name))
    return {index: median(values) for index, values in by_prompt.items()}


def describe_environment() -> dict[str, Any]:
    """Versions and machine as plain data for JSON."""
    import torch

    from foretoken.hardware import Hardware
    from foretoken.kernels.library import describe_kernels

    hardware = Hardware.detect()
    return {
        "foretoken": foretoken.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": hardware.cpu_name,
        "cores": hardware.num_cores,
        "threads": torch.get_num_threads(),
        "kernels": describe_kernels(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def show_milliseconds(value: Estimate) -> str:
    """`12.3 ms [11.9, 12.8]`, from 100 ms on without decimals."""
    digits = 1 if value.median < 0.1 else 0
    median, low, high = (f"{1e3 * x:.{digits}f}" for x in (value.median, value.low, value.high))
    return f"{median} ms [{low}, {high}]"


def show_ratio(value: Estimate) -> str:
    """`1.62x [1.55, 1.70]`."""
    return f"{value.median:.2f}x [{value.low:.2f}, {value.high:.2f}]"
