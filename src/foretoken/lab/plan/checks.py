"""Checks of a plan (does all of it fit, does the draft suit, does the traffic pay for it), and the
verdict over everything that was computed.

The first rule that speaks decides: what does not load, what is promised, what fits, what it gains.
Invariant: where the word is not USE IT or MEASURE MORE, no command that speculates is given.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from foretoken.lab.findings import Finding
from foretoken.lab.launch.engines import refusal
from foretoken.lab.plan.memory_plan import MemoryPlan
from foretoken.lab.plan.predict import (
    DraftSchedule,
    GainRange,
    MethodOutlook,
    PlannedLatency,
    PlannedSpeed,
    show_seconds,
)
from foretoken.lab.plan.setup import DRAWN_FROM, ENGINES, Setup
from foretoken.lab.plan.sizes import PlanModel
from foretoken.lab.verdict import EXIT_CODES, LEAVE_IT_OFF, MEASURE_MORE, USE_IT
from foretoken.shape.memory_formula import shares_heads, uneven_parts

Found = Iterator[tuple[str, ...]]
"""Level and message, then remedy and the flag or key that it is about, as far as there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """Everything computed before the checks run."""

    setup: Setup
    """With the best of the drafts that were named."""
    plain: MemoryPlan
    speculating: MemoryPlan
    prediction: PlannedSpeed
    outlooks: tuple[MethodOutlook, ...]
    schedule: DraftSchedule


def _kv_budget(context: PlanContext) -> Found:
    plan, asked = context.speculating, context.setup.settings
    small = {"vllm": "fp8", "llama.cpp": "q8_0", "foretoken": "int8"}[asked.engine]
    if plan.kv_pool_bytes <= 0:
        alone, setup = context.plain.fullest_rank_bytes, context.setup
        experts = setup.target.expert_params * setup.quantization.stored_bytes
        maps = setup.in_processes and setup.tp == 1
        maps = maps and plan.fullest_rank_bytes - experts < plan.rank_limit_bytes <= alone
        lacks = "keeps experts on the disk and waits for it" if maps else "does not load"
        message = (
            f"{lacks}: {plan.fullest_rank_bytes / 1e9:.1f} GB of weights on a rank that may "
            f"hold {plan.rank_limit_bytes / 1e9:.1f} GB"
        )
        remedy = "more devices, a smaller quantization"
        if alone >= plan.rank_limit_bytes:
            message += f", {alone / 1e9:.1f} GB of them the target's own"
        else:
            remedy += ", or a method without weights"
        yield "error", message, remedy
    elif not plan.fits:
        needed, most = asked.context + plan.lookahead, plan.tokens - plan.lookahead
        message = f"room for {plan.tokens:,} tokens, but one request needs {needed:,}"
        shorter = f"a context of at most {most:,} tokens" if most > 0 else "a shorter context"
        yield "error", message, f"{shorter}, {small} keys and values, or more memory"
    elif plan.requests < asked.peak_concurrency:
        message = (
            f"{plan.requests} request{'s' if plan.requests > 1 else ''} of {asked.context:,} "
            f"tokens fit at once; the peak is {asked.peak_concurrency}: the rest waits or is "
            "preempted"
        )
        yield "warning", message, f"{small} keys and values, or speculation off at the peak"
    else:
        yield "ok", f"{plan.requests} requests fit at once"


def _draft_kv(context: PlanContext) -> Found:
    plain, plan = context.plain, context.speculating
    if not plan.draft_kv_bytes_per_token or not plain.tokens:
        return
    lost = 1 - plan.tokens / plain.tokens
    each = (
        f"{plan.draft_kv_bytes_per_token / 1024:.1f} KiB a token for the draft beside "
        f"{plan.kv_bytes_per_token / 1024:.1f} KiB for the target"
    )
    message = f"speculation takes {lost:.0%} of the tokens ({plain.tokens:,} to {plan.tokens:,}); "
    if plan.draft_kv_reserved:
        left = max(0.0, plain.kv_pool_bytes - plan.draft_weight_bytes)
        alone = 1 - left / plain.kv_bytes_per_token / plain.tokens
        message += f"the draft's weights alone would take {alone:.0%}. The cache keeps {each}"
    else:
        message += f"the draft's keys and values take free memory, and give it back: {each}"
    yield "warning" if lost > 0.25 else "note", message


def _target_share(context: PlanContext) -> Found:
    setup = context.setup
    share = context.plain.weight_bytes / (setup.device.memory_bytes * setup.devices)
    if share > 0.7:
        fills = f"fills {share:.0%} of" if share < 1.0 else "is larger than"
        remedy = "measure preemptions with and without speculation before believing a speed-up"
        yield "warning", f"the target alone {fills} the memory", remedy


def _tp_symmetry(context: PlanContext) -> Found:
    setup, plan = context.setup, context.speculating
    if not plan.draft_weight_bytes or setup.draft_tp == setup.tp or setup.in_processes:
        return
    over = plan.fullest_rank_bytes > plan.rank_limit_bytes
    # The draft of a model runs on the target's ranks there, and the server does not start else.
    refused = setup.settings.engine == "vllm" and setup.draft_model is not None
    wanted = f"vllm wants a draft model on all {setup.tp} ranks; " if refused else ""
    message = (
        f"{wanted}a draft on {setup.draft_tp} of {setup.tp} ranks: the fullest rank holds "
        f"{plan.fullest_rank_bytes / 1e9:.1f} of {plan.rank_limit_bytes / 1e9:.1f} GB, and "
        f"{plan.imbalance_bytes / 1e9:.1f} GB on the others lie idle, for all pools are alike"
    )
    remedy = f"split the draft over {setup.tp} ranks"
    level = "error" if over or refused else "warning"
    yield level, message, remedy, "draft_tensor_parallel_size"


def _ranks_divide(context: PlanContext) -> Found:
    setup = context.setup
    parts = [("target", setup.target, setup.tp)]
    if setup.draft_model is not None:
        parts.append(("draft", setup.draft_model, setup.draft_tp))
    for name, model, ranks in parts:
        if found := _undivided(setup, name, model, ranks):
            yield "error", *found, "tensor_parallel_size"


def _undivided(setup: Setup, name: str, model: PlanModel, ranks: int) -> tuple[str, ...]:
    """Why so many ranks cannot share a model, and what could; empty if they can."""
    keys, heads = model.shape.num_key_value_heads, model.shape.num_attention_heads
    if setup.in_processes:
        if shares_heads(keys, heads, ranks):
            return ()
        message = f"{ranks} processes cannot share the {name}'s {keys} key heads"
        return message, f"at most {keys} ranks, or a multiple of them up to {heads}"
    if setup.settings.engine == "foretoken":  # whose GPUs exchange parts of one size
        sizes = {
            "hidden_size": model.shape.hidden_size,
            "intermediate_size": model.shape.intermediate_size,
            "vocabulary": model.shape.vocab_size,
        }
        found = " and ".join(uneven_parts(ranks, keys, heads, **sizes))
        message = f"the {name}'s {found} cannot be split evenly over {ranks} GPUs"
        return (message, "another number of ranks") if found else ()
    message = f"the {name}'s {heads} attention heads cannot be split over {ranks} ranks"
    return (message, "another number of ranks, or another draft") if heads % ranks else ()


def _long_context(context: PlanContext) -> Found:
    plain, plan, draft = context.plain, context.speculating, context.setup.draft
    length = context.setup.settings.context
    if length >= 32768 and (lost := plain.requests - plan.requests) > 0:
        costs = f"the draft costs {lost} of {plain.requests} requests"
        yield "warning", f"at {length:,} tokens per request {costs}"
    if draft is not None and draft.context < length:
        ends = f"the draft ends at {draft.context:,} tokens"
        yield "warning", f"{ends}; beyond, requests are decoded without drafts"


def _step_rows(context: PlanContext) -> Found:
    k, settings = context.setup.k, context.setup.settings
    peak, limit = settings.peak_concurrency, settings.max_num_batched_tokens
    rows = peak * (k + 1)
    message = (
        f"a step of {peak} requests verifies up to {rows:,} rows and ends with 1 to {k + 1} "
        f"tokens each; all wait for the slowest (limit {limit:,} rows)"
    )
    yield "warning" if rows > limit else "ok", message, "", "max_num_batched_tokens"


def _engine_has_it(context: PlanContext) -> Found:
    drafting, own = context.setup.drafting, context.setup.settings.engine
    if drafting is not None and (why := refusal(own, drafting)):
        others = [engine for engine in ENGINES if not refusal(engine, drafting)]
        remedy = f"another method, or --engine {' or '.join(others)}"
        yield "error", why, remedy, "speculative_config.method"


def _several_gpus(context: PlanContext) -> Found:
    setup = context.setup
    if setup.settings.engine == "foretoken" and setup.tp > 1 and not setup.in_processes:
        message = (
            f"foretoken was never run on several GPUs: that it works on {setup.tp} of them was "
            "tested on CPUs, and its speed there is on paper alone"
        )
        yield "warning", message, "a trial of it first, or another engine", "plan.count"


def _same_family(context: PlanContext) -> Found:
    target, draft = context.setup.target.family, context.setup.draft_model
    if draft is None:
        return
    families = f"target {target}, draft {draft.family}"
    if target == draft.family:
        yield "ok", families
    else:
        remedy = "a quantized draft of the same family, before a foreign one"
        why = "other training data usually means fewer accepted drafts"
        yield "warning", f"{families}: {why}", remedy


def _same_tokenizer(context: PlanContext) -> Found:
    target, draft = context.setup.target, context.setup.draft_model
    where = "speculative_config.model"
    if draft is None:
        return
    if target.shape.vocab_size != draft.shape.vocab_size:
        padded = target.tokenizer == draft.tokenizer != ""
        why = "the same tokenizer, padded differently" if padded else "different vocabularies"
        level = "warning" if context.setup.settings.engine == "llama.cpp" and padded else "error"
        sizes = f"{target.shape.vocab_size:,} tokens, the draft {draft.shape.vocab_size:,}"
        message = f"the target has {sizes} ({why})"
        remedy = (
            "a draft with the target's vocabulary; in vLLM use_heterogeneous_vocab allows others, "
            "with greedy drafts only"
        )
        yield level, message, remedy, where
    elif not (target.tokenizer and draft.tokenizer):
        said = "that they are the same is not known from config.json"
        yield "note", f"vocabularies are of one size; {said}"
    elif target.tokenizer != draft.tokenizer:
        yield "error", "vocabularies of one size, but with other tokens", "", where
    else:
        yield "ok", "the same tokenizer"


def _draft_time_ratio(context: PlanContext) -> Found:
    setup = context.setup
    if not setup.has_weights:
        return
    each = context.prediction.at(setup.usual).draft_cost
    dear = each * setup.k > 0.5
    message = (
        f"a draft step takes {each:.2f} of a plain step (predicted), {setup.k} of them "
        f"{setup.k * each:.2f}; small drafts are bound by launches, not weights, so measure it"
    )
    remedy = "a shallower draft, captured graphs for it, or a lower k" if dear else ""
    yield "warning" if dear else "note", message, remedy


def _quantized_target(context: PlanContext) -> Found:
    stored = context.setup.quantization
    if stored.nominal_bytes < 2:
        message = (
            f"{stored.name} changes what the target says, and with it what it accepts, most at 4 "
            "bits and when sampling; quantizing the draft costs only acceptance"
        )
        level = "warning" if stored.nominal_bytes <= 0.625 else "note"
        yield level, message, "measure acceptance on the same prompts with both"


def _quantize_first(context: PlanContext) -> Found:
    setup = context.setup
    fast = "fp8" in setup.device.flops or setup.device.kind == "cpu"
    if setup.quantization.nominal_bytes >= 2 and fast:
        message = (
            "the target runs in 16 bit on a device with 8-bit units: an 8-bit target is about "
            "twice as fast at small batches, and the baseline that speculation must then beat"
        )
        yield "note", message


def _hot_sampling(context: PlanContext) -> Found:
    setup, heat = context.setup, context.setup.settings.temperature
    if heat <= DRAWN_FROM or setup.method == "none":
        return
    flag = {
        "vllm": '"draft_sample_method": "probabilistic"',
        "llama.cpp": "--spec-draft-sampling probabilistic",
        "foretoken": "the default draft_sample_method, auto, already does",
    }[setup.settings.engine]
    message = (
        f"at temperature {heat:g} greedy drafts lose acceptance; that is a property of the "
        "proposal rule too, so test drafts that are drawn before calling it too hot"
    )
    remedy = flag if setup.drafts_with != "text" else "a method whose drafts can be drawn"
    if setup.draft_model is not None and setup.settings.engine != "foretoken":
        remedy += ", as in this command; greedy ones may be accepted more often: measure both"
    yield "warning", message, remedy


def _schedule(context: PlanContext) -> Found:
    schedule = context.schedule
    if len(schedule.steps) < 2:
        return
    message = f"predicted best by requests in flight: {schedule.words}. "
    if schedule.falls:
        message += "disable_by_batch_size is gone; its successor takes such a list"
        yield "note", message, "", "num_speculative_tokens_per_batch_size"
        return
    why = (
        "a mixture of experts reads more experts for each of few rows than for each of many"
        if context.setup.target.num_experts
        else "a step of the drafter takes hardly longer for many rows, one of the target does"
    )
    if context.setup.settings.engine == "foretoken":
        yield "note", f"{message}It rises with the load, as control finds out; {why}"
    else:
        message += f"It rises with the load, which no engine's schedule may; {why}"
        remedy = f"k = {schedule.decided} throughout, or one server per range of load"
        yield "warning", message, remedy


STATIC_CHECKS = (
    *(_kv_budget, _draft_kv, _target_share, _tp_symmetry, _ranks_divide, _long_context),
    *(_step_rows, _engine_has_it, _several_gpus, _same_family, _same_tokenizer),
    *(_draft_time_ratio, _quantized_target, _quantize_first),
)
"""Of the memory and of the draft, whatever the traffic is."""
CHECKS = (*STATIC_CHECKS, _hot_sampling, _schedule)


def findings_of(
    context: PlanContext, checks: Iterable[Callable[[PlanContext], Found]] = CHECKS
) -> Iterator[Finding]:
    """What checks find, each under the name of its function."""
    for check in checks:
        for level, message, *more in check(context):
            remedy, where = (*more, "", "")[:2]
            yield Finding(check.__name__[1:], level, where, message, remedy)


LEAST_END_TO_END = 1.05
"""An answer that comes less than a twentieth sooner is not worth a second model."""
NOT_ASKED = "NO SPECULATION ASKED"
OF_SETTINGS = ("tp_symmetry",)
"""Checks whose errors are about settings: the same drafter may be right with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerdict:
    word: str
    """USE_IT, MEASURE_MORE, LEAVE_IT_OFF, or NOT_ASKED where no method was asked for."""
    reason: str
    k: int = 0
    """Drafts per verification at the load that decides; 0: none."""

    @property
    def speculates(self) -> bool:
        """Whether a speculating server is worth starting, if only to measure it."""
        return self.word in (USE_IT, MEASURE_MORE)

    @property
    def exit_code(self) -> int:
        """0: use it, or nothing was asked; 1: leave it off; 4: open until measured."""
        return EXIT_CODES.get(self.word, 0)


def judge(
    context: PlanContext, findings: tuple[Finding, ...], times: PlannedLatency
) -> PlanVerdict:
    """The verdict on the asked method, with `times` at the load that decides."""
    if context.setup.method == "none":
        requests, tokens = context.plain.requests, context.setup.settings.context
        fits = f"{requests:,} requests of {tokens:,} tokens fit at once"
        no = "and the target does not fit as it is"
        return PlanVerdict(word=NOT_ASKED, reason=fits if context.plain.fits else no)
    against = (
        _refused(findings)
        or _first_token(context, times)
        or _crowded(context)
        or _no_gain(context, times)
        or _too_short(context, times)
    )
    if against:
        return PlanVerdict(word=LEAVE_IT_OFF, reason=against)
    said = _gain_words(context, times)
    if context.prediction.at(times.requests).gain(times.k).low > 1.0 <= times.end_to_end_low:
        return PlanVerdict(word=USE_IT, reason=said, k=times.k)
    said += ": a loss is within what is not known"
    return PlanVerdict(word=MEASURE_MORE, reason=said, k=times.k)


def _refused(findings: tuple[Finding, ...]) -> str:
    error = next((finding for finding in findings if finding.level == "error"), None)
    if error is None or error.check not in OF_SETTINGS:
        return error.message if error else ""
    return f"{error.message}: {error.remedy}"


def _first_token(context: PlanContext, times: PlannedLatency) -> str:
    if context.setup.settings.slo != "ttft":
        return ""
    plain, drafted = show_seconds(times.ttft_plain_s), show_seconds(times.ttft_s)
    return (
        "the promise is about the first token, which drafts do not bring earlier "
        f"({plain} without, {drafted} with); only an A/B at your load that shows it unharmed "
        "speaks for it"
    )


def _crowded(context: PlanContext) -> str:
    usual = context.setup.settings.concurrency
    fit, plain = context.speculating.requests, context.plain.requests
    if fit >= min(usual, plain):
        return ""
    return (
        f"{fit} of the {usual} requests that are usually in flight fit beside the drafter, "
        f"{min(plain, usual)} without it: the others would wait"
    )


def _no_gain(context: PlanContext, times: PlannedLatency) -> str:
    load, k = context.prediction.at(times.requests), times.k or context.setup.k
    gain = load.gain(k)
    if times.k and gain.middle > 1.0:
        return ""
    asked = context.setup.settings.num_speculative_tokens
    others = "" if times.k or asked else ", and no other k pays"
    return (
        f"{_predicted(gain)} with k = {k} and {load.requests} in flight"
        f"{others}{_elsewhere(context, load.requests)}"
    )


def _predicted(gain: GainRange) -> str:
    return f"predicted {gain.middle:.2f}x ({gain.low:.2f} to {gain.high:.2f}) per token"


def _elsewhere(context: PlanContext, requests: int) -> str:
    """The load at which it would gain most, where that is another one."""
    fit = context.speculating.requests
    loads = [load for load in context.prediction.loads if load.requests <= fit and load.best_k]
    most = max(loads, key=lambda load: load.best, default=None)
    if context.setup.settings.num_speculative_tokens or most is None or most.requests == requests:
        return ""
    return f"; with {most.requests} in flight k = {most.best_k} would give {most.best:.2f}x"


def _too_short(context: PlanContext, times: PlannedLatency) -> str:
    if times.end_to_end_gain >= LEAST_END_TO_END:
        return ""
    why = "most of it is waiting for the first token"
    if times.ttft_s <= 0.5 * times.end_to_end_s:
        why = f"less than the {LEAST_END_TO_END:g}x that a drafter is worth"
        why += _elsewhere(context, times.requests)
    return (
        f"a whole answer of {context.setup.settings.output_tokens} tokens comes "
        f"{times.end_to_end_gain:.2f}x as fast: {show_seconds(times.end_to_end_plain_s)} without, "
        f"{show_seconds(times.end_to_end_s)} with {times.requests} in flight; {why}"
    )


def _gain_words(context: PlanContext, times: PlannedLatency) -> str:
    setup, schedule = context.setup, context.schedule
    asked = setup.settings.concurrency
    waits = f" (as many as fit; the rest of {asked} waits)" if setup.usual < asked else ""
    said = (
        f"{_predicted(context.prediction.at(times.requests).gain(times.k))} and "
        f"{times.end_to_end_gain:.2f}x for a whole answer of {setup.settings.output_tokens} "
        f"tokens, with k = {times.k} and {times.requests} in flight{waits}"
    )
    peak = context.prediction.at(setup.peak)
    if times.requests == peak.requests:
        return said
    told, best = schedule.told(peak.requests), schedule.at(peak.requests)
    if told == 0:
        return f"{said}; off at the peak of {peak.requests}, where it would lose"
    said = f"{said}, {peak.gain(told).middle:.2f}x at the peak of {peak.requests}"
    if told == best or 1.0 < peak.gain(best).middle <= peak.gain(told).middle:
        return said
    better = f"k = {best} would give {peak.gain(best).middle:.2f}x" if best else "none is better"
    return f"{said}, where {better}"
