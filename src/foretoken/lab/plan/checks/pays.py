"""Checks of a plan that are about the traffic: temperature, load, lengths, and what is promised."""

from collections.abc import Iterator

from foretoken.lab.findings import Finding
from foretoken.lab.plan.checks import PlanCheck, PlanContext
from foretoken.lab.plan.setup import DRAWN_FROM


def _hot_sampling(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    if setup.settings.temperature <= DRAWN_FROM or setup.method == "none":
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
    prediction = context.prediction
    if context.setup.method == "none":
        return
    loads = [prediction.at(n) for n in (context.setup.usual, context.setup.peak)]
    said = [(load, load.gain(context.schedule.told(load.requests))) for load in loads]
    gains = " and ".join(f"{gain.middle:.2f}x at {load.requests} in flight" for load, gain in said)
    safe = said[1][1].low >= 1.0
    yield Finding(
        check="load_regime",
        level="ok" if safe else "warning",
        message=f"predicted {gains}, {context.schedule.words}. Published results at the peak "
        "go both ways (1.8 times slower, 27 % faster): measure",
        remedy="" if safe else "a schedule that follows the load, and an A/B at the peak",
    )


def _schedule(context: PlanContext) -> Iterator[Finding]:
    schedule = context.schedule
    if len(schedule.steps) < 2:
        return
    if schedule.falls:
        yield Finding(
            check="schedule",
            level="note",
            message=f"predicted best by requests in flight: {schedule.words}. "
            "disable_by_batch_size is gone; its successor takes such a list",
            where="num_speculative_tokens_per_batch_size",
        )
        return
    why = (
        "a mixture of experts reads more experts for each of few rows than for each of many"
        if context.setup.target.num_experts
        else "a step of the drafter takes hardly longer for many rows, one of the target does"
    )
    own = context.setup.settings.engine == "foretoken"
    may = "as control finds out" if own else "which no engine's schedule may"
    yield Finding(
        check="schedule",
        level="note" if own else "warning",
        message=f"predicted best by requests in flight: {schedule.words}. It rises with the load, "
        f"{may}; {why}",
        remedy="" if own else f"k = {schedule.decided} throughout, or one server per range of load",
    )


def _output_length(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    load = context.prediction.at(setup.usual)
    gain = load.gain(context.schedule.told(load.requests)).middle
    steps = setup.settings.output_tokens / max(1.0, gain)
    if setup.settings.output_tokens < 50:
        yield Finding(
            check="output_length",
            level="warning",
            message=f"answers of {setup.settings.output_tokens} tokens are a few dozen steps at "
            f"most (about {steps:.0f} here): the first token dominates, and speculation does not "
            "make it earlier",
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
            f"leaves {row.left_gb:.0f} GB; at this utilisation {-row.budget_gb:.0f} GB are missing",
        )


LOAD_CHECKS = (
    PlanCheck("hot_sampling", _hot_sampling),
    PlanCheck("load_regime", _load_regime),
    PlanCheck("schedule", _schedule),
    PlanCheck("output_length", _output_length),
    PlanCheck("ttft_bound", _ttft_bound),
    PlanCheck("nominal_table", _nominal_table),
)
