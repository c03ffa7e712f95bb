"""Checks of a plan that are about the draft: kinship, size, cost, length, quantization."""

from collections.abc import Iterator

from foretoken.control.acceptance import ConstantAcceptance
from foretoken.lab.findings import Finding
from foretoken.lab.launch.engines import refusal
from foretoken.lab.plan.checks import PlanCheck, PlanContext
from foretoken.lab.plan.setup import ENGINES


def _engine_has_it(context: PlanContext) -> Iterator[Finding]:
    drafting, own = context.setup.drafting, context.setup.settings.engine
    if drafting is None or not refusal(own, drafting):
        return
    others = [engine for engine in ENGINES if not refusal(engine, drafting)]
    yield Finding(
        check="engine_has_it",
        level="error",
        message=refusal(own, drafting),
        where="speculative_config.method",
        remedy=f"another method, or --engine {' or '.join(others)}",
    )


def _several_gpus(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    if setup.settings.engine == "foretoken" and setup.tp > 1 and not setup.in_processes:
        yield Finding(
            check="several_gpus",
            level="warning",
            message=f"foretoken was never run on several GPUs: that it works on {setup.tp} of them "
            "was tested on CPUs, and its speed there is on paper alone",
            where="plan.count",
            remedy="a trial of it first, or another engine",
        )


def _same_family(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    if setup.drafts_with != "model" or setup.draft is None:
        return
    same = setup.target.family == setup.draft.family
    yield Finding(
        check="same_family",
        level="ok" if same else "warning",
        message=f"target {setup.target.family}, draft {setup.draft.family}"
        + ("" if same else ": other training data usually means fewer accepted drafts"),
        remedy="" if same else "a quantized draft of the same family, before a foreign one",
    )


def _same_tokenizer(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    target, draft = setup.target, setup.draft
    if setup.drafts_with != "model" or draft is None:
        return
    if target.vocab_size != draft.vocab_size:
        padded = target.tokenizer == draft.tokenizer != ""
        why = "the same tokenizer, padded differently" if padded else "different vocabularies"
        tolerant = setup.settings.engine == "llama.cpp" and padded
        yield Finding(
            check="same_tokenizer",
            level="warning" if tolerant else "error",
            message=f"the target has {target.vocab_size:,} tokens, the draft {draft.vocab_size:,} "
            f"({why})",
            where="speculative_config.model",
            remedy="a draft with the target's vocabulary; in vLLM use_heterogeneous_vocab allows "
            "others, with greedy drafts only",
        )
    elif not (target.tokenizer and draft.tokenizer):
        yield Finding(
            check="same_tokenizer",
            level="note",
            message="vocabularies are of one size; that they are the same is not known from "
            "config.json",
        )
    elif target.tokenizer != draft.tokenizer:
        yield Finding(
            check="same_tokenizer",
            level="error",
            message="vocabularies of one size, but with other tokens",
            where="speculative_config.model",
        )
    else:
        yield Finding(check="same_tokenizer", level="ok", message="the same tokenizer")


def _size_ratio(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    if setup.draft is None:
        return
    ratio = setup.target.params / setup.draft.params
    usual = 8 <= ratio <= 12
    yield Finding(
        check="size_ratio",
        level="ok" if usual else "note",
        message=f"1 : {ratio:.1f} in weights: no law, far smaller drafts have paid; what counts is "
        "the ratio of times below",
    )


def _draft_time_ratio(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    load = context.prediction.at(setup.usual)
    if not setup.has_weights:
        return
    dear = load.draft_cost * setup.k > 0.5
    yield Finding(
        check="draft_time_ratio",
        level="warning" if dear else "note",
        message=f"a draft step takes {load.draft_cost:.2f} of a plain step "
        f"({'predicted' if setup.own_measured is None else 'as measured'}), "
        f"{setup.k} of them {setup.k * load.draft_cost:.2f}; small drafts are bound by launches, "
        "not weights, so measure it (`foretoken lab fit`)",
        remedy="a shallower draft, captured graphs for it, or a lower k" if dear else "",
    )


def _method_range(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    plan = setup.drafting.plan if setup.drafting else None
    if plan is None or plan.advertised is None:
        return
    low, high = plan.advertised
    load = context.prediction.at(setup.usual)
    gain = load.gain(context.schedule.told(load.requests))
    yield Finding(
        check="method_range",
        level="note",
        message=f"advertised for {setup.method}: {low}x to {high}x; predicted here "
        f"{gain.low:.2f}x to {gain.high:.2f}x at {load.requests} in flight",
    )


def _ranking(context: PlanContext) -> Iterator[Finding]:
    for choice in context.choices:
        yield Finding(
            check="ranking",
            level="note",
            message=f"{choice.question}: {choice.method} ({choice.reason})",
        )


def _draft_length(context: PlanContext) -> Iterator[Finding]:
    setup, prediction = context.setup, context.prediction
    load = prediction.at(setup.usual)
    if setup.method == "none":
        return
    short, long = (prediction.rates(load.requests, k)[0] for k in (1, 8))
    yield Finding(
        check="draft_length",
        level="ok" if load.best_k == setup.k else "note",
        message=f"k = {setup.k} to start with; the predicted best at {load.requests} in flight is "
        f"k = {load.best_k} ({load.best:.2f}x). The same draft has an acceptance rate of "
        f"{short:.0%} at k = 1 and {long:.0%} at k = 8, so the rate alone does not say whether to "
        "lower or to raise it",
        where="num_speculative_tokens",
        remedy="--measured with verify cost, draft cost and acceptance length names the next step",
    )


def _ceiling(context: PlanContext) -> Iterator[Finding]:
    if context.setup.method == "none":
        return
    alpha = context.prediction.acceptance.high
    most = ConstantAcceptance(alpha).ceiling
    yield Finding(
        check="ceiling",
        level="note",
        message=f"no k yields more than {most:.1f} tokens per verification at alpha "
        f"{alpha:.2f}; acceptance rate times speed ratio is not a bound",
    )


def _quantized_target(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    if setup.quantization.nominal_bytes >= 2:
        return
    level = "warning" if setup.quantization.nominal_bytes <= 0.625 else "note"
    yield Finding(
        check="quantized_target",
        level=level,
        message=f"{setup.quantization.name} changes what the target says, and with it what it "
        "accepts, most at 4 bits and when sampling; quantizing the draft costs only acceptance",
        remedy="measure acceptance on the same prompts with `foretoken lab ab --grid`",
    )


def _quantize_first(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    fast = "fp8" in setup.device.flops or setup.device.kind == "cpu"
    if setup.quantization.nominal_bytes >= 2 and fast:
        yield Finding(
            check="quantize_first",
            level="note",
            message="the target runs in 16 bit on a device with 8-bit units: an 8-bit target is "
            "about twice as fast at small batches, and the baseline that speculation must then "
            "beat",
        )


DRAFT_CHECKS = (
    PlanCheck("engine_has_it", _engine_has_it),
    PlanCheck("several_gpus", _several_gpus),
    PlanCheck("same_family", _same_family),
    PlanCheck("same_tokenizer", _same_tokenizer),
    PlanCheck("size_ratio", _size_ratio),
    PlanCheck("draft_time_ratio", _draft_time_ratio),
    PlanCheck("method_range", _method_range),
    PlanCheck("ranking", _ranking),
    PlanCheck("draft_length", _draft_length),
    PlanCheck("ceiling", _ceiling),
    PlanCheck("quantized_target", _quantized_target),
    PlanCheck("quantize_first", _quantize_first),
)
