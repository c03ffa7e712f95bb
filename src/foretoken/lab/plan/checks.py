"""Checks of a plan: does all of it fit, does the draft suit, does the traffic pay for it."""

from collections.abc import Iterator
from dataclasses import dataclass

from foretoken.lab.findings import Finding
from foretoken.lab.launch.engines import refusal
from foretoken.lab.plan.memory_plan import MemoryPlan
from foretoken.lab.plan.predict import DraftSchedule, PlannedSpeed
from foretoken.lab.plan.ranking import MethodOutlook
from foretoken.lab.plan.setup import DRAWN_FROM, ENGINES, Setup
from foretoken.lab.plan.sizes import PlanModel
from foretoken.shape.memory_formula import shares_heads, uneven_parts

SMALL_KV = {"vllm": "fp8", "llama.cpp": "q8_0", "foretoken": "int8"}
"""The type of keys and values of half the size that an engine has."""
Found = Iterator[Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """Everything computed before the checks run."""

    setup: Setup
    plain: MemoryPlan
    speculating: MemoryPlan
    prediction: PlannedSpeed
    outlooks: tuple[MethodOutlook, ...]
    schedule: DraftSchedule


def _kv_budget(context: PlanContext) -> Found:
    name, plan, setup = "kv_budget", context.speculating, context.setup
    small, asked = SMALL_KV[setup.settings.engine], setup.settings
    if plan.kv_pool_bytes <= 0:
        alone = context.plain.fullest_rank_bytes
        crowded = alone >= plan.rank_limit_bytes
        message = (
            f"does not load: {plan.fullest_rank_bytes / 1e9:.1f} GB of weights on a rank that may "
            f"hold {plan.rank_limit_bytes / 1e9:.1f} GB"
        ) + (f", {alone / 1e9:.1f} GB of them the target's own" if crowded else "")
        remedy = "more devices, a smaller quantization"
        remedy += "" if crowded else ", or a method without weights"
        yield Finding.of(name, "error", "", message, remedy)
    elif not plan.fits:
        needed, most = asked.context + plan.lookahead, plan.tokens - plan.lookahead
        message = f"room for {plan.tokens:,} tokens, but one request needs {needed:,}"
        shorter = f"a context of at most {most:,} tokens" if most > 0 else "a shorter context"
        remedy = f"{shorter}, {small} keys and values, or more memory"
        yield Finding.of(name, "error", "", message, remedy)
    elif plan.requests < asked.peak_concurrency:
        message = (
            f"{plan.requests} request{'s' if plan.requests > 1 else ''} of {asked.context:,} "
            f"tokens fit at once; the peak is {asked.peak_concurrency}: the rest waits or is "
            "preempted"
        )
        remedy = f"{small} keys and values, or speculation off at the peak"
        yield Finding.of(name, "warning", "", message, remedy)
    else:
        yield Finding.of(name, "ok", "", f"{plan.requests} requests fit at once")


def _draft_kv(context: PlanContext) -> Found:
    plain, plan = context.plain, context.speculating
    if not plan.draft_kv_bytes_per_token or not plain.tokens:
        return
    counted = max(0.0, plain.kv_pool_bytes - plan.draft_weight_bytes) / plain.kv_bytes_per_token
    lost = 1 - plan.tokens / plain.tokens
    each = (
        f"{plan.draft_kv_bytes_per_token / 1024:.1f} KiB a token for the draft beside "
        f"{plan.kv_bytes_per_token / 1024:.1f} KiB for the target"
    )
    message = f"speculation takes {lost:.0%} of the tokens ({plain.tokens:,} to {plan.tokens:,}); "
    if plan.draft_kv_reserved:
        alone = 1 - counted / plain.tokens
        message += f"the draft's weights alone would take {alone:.0%}. The cache keeps {each}"
    else:
        message += f"the draft's keys and values take free memory, and give it back: {each}"
    yield Finding.of("draft_kv", "warning" if lost > 0.25 else "note", "", message)


def _target_share(context: PlanContext) -> Found:
    setup = context.setup
    share = context.plain.weight_bytes / (setup.device.memory_bytes * setup.devices)
    if share > 0.7:
        fills = f"fills {share:.0%} of" if share < 1.0 else "is larger than"
        remedy = "measure preemptions with and without speculation before believing a speed-up"
        message = f"the target alone {fills} the memory"
        yield Finding.of("target_share", "warning", "", message, remedy)


def _tp_symmetry(context: PlanContext) -> Found:
    setup, plan = context.setup, context.speculating
    if not plan.draft_weight_bytes or setup.draft_tp == setup.tp or setup.in_processes:
        return
    over = plan.fullest_rank_bytes > plan.rank_limit_bytes
    # The draft of a model runs on the target's ranks there, and the server does not start else.
    refused = setup.settings.engine == "vllm" and setup.drafts_with == "model"
    wanted = f"vllm wants a draft model on all {setup.tp} ranks; " if refused else ""
    message = (
        f"{wanted}a draft on {setup.draft_tp} of {setup.tp} ranks: the fullest rank holds "
        f"{plan.fullest_rank_bytes / 1e9:.1f} of {plan.rank_limit_bytes / 1e9:.1f} GB, and "
        f"{plan.imbalance_bytes / 1e9:.1f} GB on the others lie idle, for all pools are alike"
    )
    level, remedy = (
        "error" if over or refused else "warning",
        f"split the draft over {setup.tp} ranks",
    )
    yield Finding.of("tp_symmetry", level, "draft_tensor_parallel_size", message, remedy)


def _ranks_divide(context: PlanContext) -> Found:
    setup = context.setup
    parts = [("target", setup.target, setup.tp)]
    if setup.drafts_with == "model" and setup.draft is not None:
        parts.append(("draft", setup.draft, setup.draft_tp))
    for name, model, ranks in parts:
        for message, remedy in _undivided(setup, name, model, ranks):
            yield Finding.of("ranks_divide", "error", "tensor_parallel_size", message, remedy)


def _undivided(setup: Setup, name: str, model: PlanModel, ranks: int) -> Iterator[tuple[str, str]]:
    keys, heads = model.num_kv_heads, model.num_heads
    if setup.in_processes:
        if not shares_heads(keys, heads, ranks):
            yield (
                f"{ranks} processes cannot share the {name}'s {keys} key heads",
                f"at most {keys} ranks, or a multiple of them up to {heads}",
            )
    elif setup.settings.engine == "foretoken":  # whose GPUs exchange parts of one size
        sizes = {
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "vocabulary": model.vocab_size,
        }
        if found := uneven_parts(ranks, keys, heads, **sizes):
            message = f"the {name}'s {' and '.join(found)} cannot be split evenly over {ranks} GPUs"
            yield message, "another number of ranks"
    elif heads % ranks:
        message = f"the {name}'s {heads} attention heads cannot be split over {ranks} ranks"
        yield message, "another number of ranks, or another draft"


def _long_context(context: PlanContext) -> Found:
    setup, plain, plan = context.setup, context.plain, context.speculating
    length = setup.settings.context
    if length >= 32768 and plain.requests > plan.requests:
        message = (
            f"at {length:,} tokens per request the draft costs {plain.requests - plan.requests} of "
            f"{plain.requests} requests"
        )
        yield Finding.of("long_context", "warning", "", message)
    if setup.draft is not None and setup.draft.context < length:
        message = (
            f"the draft ends at {setup.draft.context:,} tokens; beyond, requests are decoded "
            "without drafts"
        )
        yield Finding.of("long_context", "warning", "", message)


def _step_rows(context: PlanContext) -> Found:
    setup = context.setup
    peak, limit = setup.settings.peak_concurrency, setup.settings.max_num_batched_tokens
    rows = peak * (setup.k + 1)
    message = (
        f"a step of {peak} requests verifies up to {rows:,} rows and ends with 1 to {setup.k + 1} "
        f"tokens each; all wait for the slowest (limit {limit:,} rows)"
    )
    level = "warning" if rows > limit else "ok"
    yield Finding.of("step_rows", level, "max_num_batched_tokens", message)


def _engine_has_it(context: PlanContext) -> Found:
    drafting, own = context.setup.drafting, context.setup.settings.engine
    if drafting is None or not (why := refusal(own, drafting)):
        return
    others = [engine for engine in ENGINES if not refusal(engine, drafting)]
    remedy = f"another method, or --engine {' or '.join(others)}"
    yield Finding.of("engine_has_it", "error", "speculative_config.method", why, remedy)


def _several_gpus(context: PlanContext) -> Found:
    setup = context.setup
    if setup.settings.engine == "foretoken" and setup.tp > 1 and not setup.in_processes:
        message = (
            f"foretoken was never run on several GPUs: that it works on {setup.tp} of them was "
            "tested on CPUs, and its speed there is on paper alone"
        )
        remedy = "a trial of it first, or another engine"
        yield Finding.of("several_gpus", "warning", "plan.count", message, remedy)


def _same_family(context: PlanContext) -> Found:
    target, draft = context.setup.target.family, context.setup.draft
    if context.setup.drafts_with != "model" or draft is None:
        return
    level, message, remedy = "ok", f"target {target}, draft {draft.family}", ""
    if target != draft.family:
        level, remedy = "warning", "a quantized draft of the same family, before a foreign one"
        message += ": other training data usually means fewer accepted drafts"
    yield Finding.of("same_family", level, "", message, remedy)


def _same_tokenizer(context: PlanContext) -> Found:
    name, setup = "same_tokenizer", context.setup
    target, draft = setup.target, setup.draft
    if setup.drafts_with != "model" or draft is None:
        return
    where = "speculative_config.model"
    if target.vocab_size != draft.vocab_size:
        padded = target.tokenizer == draft.tokenizer != ""
        why = "the same tokenizer, padded differently" if padded else "different vocabularies"
        level = "warning" if setup.settings.engine == "llama.cpp" and padded else "error"
        message = (
            f"the target has {target.vocab_size:,} tokens, the draft {draft.vocab_size:,} ({why})"
        )
        remedy = (
            "a draft with the target's vocabulary; in vLLM use_heterogeneous_vocab allows others, "
            "with greedy drafts only"
        )
        yield Finding.of(name, level, where, message, remedy)
    elif not (target.tokenizer and draft.tokenizer):
        message = (
            "vocabularies are of one size; that they are the same is not known from config.json"
        )
        yield Finding.of(name, "note", "", message)
    elif target.tokenizer != draft.tokenizer:
        yield Finding.of(name, "error", where, "vocabularies of one size, but with other tokens")
    else:
        yield Finding.of(name, "ok", "", "the same tokenizer")


def _draft_time_ratio(context: PlanContext) -> Found:
    setup = context.setup
    if not setup.has_weights:
        return
    each = context.prediction.at(setup.usual).draft_cost
    dear = each * setup.k > 0.5
    message = (
        f"a draft step takes {each:.2f} of a plain step "
        f"({'predicted' if setup.own_measured is None else 'as measured'}), {setup.k} of them "
        f"{setup.k * each:.2f}; small drafts are bound by launches, not weights, so measure it"
    )
    remedy = "a shallower draft, captured graphs for it, or a lower k" if dear else ""
    yield Finding.of("draft_time_ratio", "warning" if dear else "note", "", message, remedy)


def _quantized_target(context: PlanContext) -> Found:
    stored = context.setup.quantization
    if stored.nominal_bytes >= 2:
        return
    message = (
        f"{stored.name} changes what the target says, and with it what it accepts, most at 4 bits "
        "and when sampling; quantizing the draft costs only acceptance"
    )
    level = "warning" if stored.nominal_bytes <= 0.625 else "note"
    remedy = "measure acceptance on the same prompts with both"
    yield Finding.of("quantized_target", level, "", message, remedy)


def _quantize_first(context: PlanContext) -> Found:
    setup = context.setup
    fast = "fp8" in setup.device.flops or setup.device.kind == "cpu"
    if setup.quantization.nominal_bytes >= 2 and fast:
        message = (
            "the target runs in 16 bit on a device with 8-bit units: an 8-bit target is about "
            "twice as fast at small batches, and the baseline that speculation must then beat"
        )
        yield Finding.of("quantize_first", "note", "", message)


def _hot_sampling(context: PlanContext) -> Found:
    setup = context.setup
    heat = setup.settings.temperature
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
    yield Finding.of("hot_sampling", "warning", "", message, remedy)


def _schedule(context: PlanContext) -> Found:
    schedule = context.schedule
    if len(schedule.steps) < 2:
        return
    message = f"predicted best by requests in flight: {schedule.words}. "
    if schedule.falls:
        message += "disable_by_batch_size is gone; its successor takes such a list"
        where = "num_speculative_tokens_per_batch_size"
        yield Finding.of("schedule", "note", where, message)
        return
    why = (
        "a mixture of experts reads more experts for each of few rows than for each of many"
        if context.setup.target.num_experts
        else "a step of the drafter takes hardly longer for many rows, one of the target does"
    )
    own = context.setup.settings.engine == "foretoken"
    may = "as control finds out" if own else "which no engine's schedule may"
    message += f"It rises with the load, {may}; {why}"
    remedy = "" if own else f"k = {schedule.decided} throughout, or one server per range of load"
    yield Finding.of("schedule", "note" if own else "warning", "", message, remedy)


MEMORY_CHECKS = (
    *(_kv_budget, _draft_kv, _target_share, _tp_symmetry, _ranks_divide, _long_context),
    _step_rows,
)
DRAFT_CHECKS = (
    *(_engine_has_it, _several_gpus, _same_family, _same_tokenizer, _draft_time_ratio),
    *(_quantized_target, _quantize_first),
)
LOAD_CHECKS = (_hot_sampling, _schedule)
