"""Checks of a plan that are about the traffic: temperature, load, lengths, and what is promised."""

import math
from collections.abc import Iterator

from foretoken.lab.findings import Finding
from foretoken.lab.plan.checks import PlanCheck, PlanContext


def _hot_sampling(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    if setup.settings.temperature <= 0.5 or setup.method == "none":
        return
    flag = {
        "vllm": '"draft_sample_method": "probabilistic"',
        "llama.cpp": "--spec-draft-sampling probabilistic",
        "foretoken": "the default draft_sample_method, auto, already does",
    }[setup.settings.engine]
    yield Finding(
        check="hot_sampling",
        level="warning",
        message=f"at temperature {setup.settings.temperature:g} greedy drafts lose acceptance; "
        "that is a property of the proposal rule too, so test drafts that are drawn before "
        "calling it too hot",
        remedy=flag if setup.drafts_with != "text" else "a method whose drafts can be drawn",
    )


def _load_regime(context: PlanContext) -> Iterator[Finding]:
    prediction, settings = context.prediction, context.setup.settings
    peak, ordinary = prediction.at(settings.peak_concurrency), prediction.at(settings.concurrency)
    crossing = prediction.crossover
    if math.isinf(crossing):
        stops = "it pays at every load looked at"
    else:
        stops = f"it stops paying at {crossing:.0f} in flight"
    low, high = prediction.crossover_low, prediction.crossover_high
    if (low, high) != (crossing, crossing):
        over = (f"{end:.0f}" if math.isfinite(end) else "beyond all of them" for end in (low, high))
        stops += f" ({' to '.join(over)} over the range of acceptance)"
    yield Finding(
        check="load_regime",
        level="ok" if peak.low >= 1.0 else "warning",
        message=f"predicted {ordinary.middle:.2f}x at {ordinary.requests} in flight and "
        f"{peak.middle:.2f}x at {peak.requests}; {stops}. Published peak results go both ways "
        "(1.8 times slower, 27 % faster): measure",
        remedy=""
        if peak.low >= 1.0
        else "a schedule that lowers k with the load, and an A/B at it",
    )


def _schedule(context: PlanContext) -> Iterator[Finding]:
    steps = draft_schedule(context)
    if len(steps) > 1:
        text = ", ".join(f"k = {k} up to {end}" if end else f"k = {k} above" for k, end in steps)
        yield Finding(
            check="schedule",
            level="note",
            message=f"predicted best k by requests in flight: {text}. "
            "disable_by_batch_size is gone; its successor takes such a list",
            where="num_speculative_tokens_per_batch_size",
        )


def draft_schedule(context: PlanContext) -> list[tuple[int, int]]:
    """(k, last number of requests) in rising order; the last entry has no end (0).

    k never rises with the load, and never exceeds the plan's own.
    """
    steps: list[tuple[int, int]] = []
    best = context.setup.k
    for load in context.prediction.loads:
        best = min(best, load.best_k)
        if steps and steps[-1][0] == best:
            steps[-1] = (best, load.requests)
        else:
            steps.append((best, load.requests))
    if steps:
        steps[-1] = (steps[-1][0], 0)
    return steps


def _output_length(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    steps = setup.settings.output_tokens / max(1.0, setup.k / 2)
    if setup.settings.output_tokens < 50:
        yield Finding(
            check="output_length",
            level="warning",
            message=f"answers of {setup.settings.output_tokens} tokens are a few dozen steps at "
            f"most ({steps:.0f} here): the first token dominates, and speculation does not make it "
            "earlier",
        )


def _ttft_bound(context: PlanContext) -> Iterator[Finding]:
    settings = context.setup.settings
    if settings.slo == "ttft":
        yield Finding(
            check="ttft_bound",
            level="warning",
            message="the promise is about the first token; speculation speeds up the others, and "
            "may delay the first (draft prefill, fewer slots)",
            remedy="leave it off unless an A/B at your load shows TTFT unharmed",
        )
    if settings.slo == "throughput":
        yield Finding(
            check="ttft_bound",
            level="note",
            message="for throughput only the load at which you run counts; see the load regime",
        )


def _nominal_table(context: PlanContext) -> Iterator[Finding]:
    wrong = [row for row in context.nominal if row.budget_gb < 0 <= row.left_gb]
    for row in wrong:
        yield Finding(
            check="nominal_table",
            level="note",
            message=f"{row.target_quantization} + {row.draft_quantization}: size times bytes "
            f"leaves {row.left_gb:.0f} GB; at this utilisation it is {row.budget_gb:.0f} GB",
        )


LOAD_CHECKS = (
    PlanCheck("hot_sampling", _hot_sampling),
    PlanCheck("load_regime", _load_regime),
    PlanCheck("schedule", _schedule),
    PlanCheck("output_length", _output_length),
    PlanCheck("ttft_bound", _ttft_bound),
    PlanCheck("nominal_table", _nominal_table),
)
