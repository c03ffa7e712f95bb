"""Checks of a plan that are about memory: what fits, and what a draft takes."""

from collections.abc import Iterator

from foretoken.lab.findings import Finding
from foretoken.lab.plan.checks import PlanCheck, PlanContext
from foretoken.lab.plan.memory_plan import MemoryPlan, nominal_billions, weight_bytes
from foretoken.lab.plan.setup import Setup
from foretoken.lab.plan.sizes import PlanModel
from foretoken.shape.memory_formula import shares_heads, uneven_parts


def _weights(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    stored = weight_bytes(setup.target, setup.quantization, setup.settings.engine)
    nominal = nominal_billions(setup.target) * 1e9 * setup.quantization.nominal_bytes
    yield Finding(
        check="weights",
        level="note",
        message=f"the target's weights are {stored / 1e9:.1f} GB as {setup.quantization.name}; "
        f"size times bytes says {nominal / 1e9:.0f} GB (scales, and tables kept in 16 bit, differ)",
    )


def _shorter(plan: MemoryPlan) -> str:
    """How long a request may be."""
    most = plan.tokens - plan.lookahead
    return f"a context of at most {most:,} tokens" if most > 0 else "a shorter context"


def _small_kv(setup: Setup) -> str:
    """The type of keys and values of half the size that the engine has."""
    return {"vllm": "fp8", "llama.cpp": "q8_0", "foretoken": "int8"}[setup.settings.engine]


def _kv_budget(context: PlanContext) -> Iterator[Finding]:
    plan, setup = context.speculating, context.setup
    if plan.kv_pool_bytes <= 0:
        alone = context.plain.fullest_rank_bytes
        crowded = alone >= plan.rank_limit_bytes
        yield Finding(
            check="kv_budget",
            level="error",
            message=f"does not load: {plan.fullest_rank_bytes / 1e9:.1f} GB of weights on a rank "
            f"that may hold {plan.rank_limit_bytes / 1e9:.1f} GB"
            + (f", {alone / 1e9:.1f} GB of them the target's own" if crowded else ""),
            remedy="more devices, a smaller quantization"
            + ("" if crowded else ", or a method without weights"),
        )
    elif not plan.fits:
        yield Finding(
            check="kv_budget",
            level="error",
            message=f"room for {plan.tokens:,} tokens, but one request needs "
            f"{setup.settings.context + plan.lookahead:,}",
            remedy=f"{_shorter(plan)}, {_small_kv(setup)} keys and values, or more memory",
        )
    elif plan.requests < setup.settings.peak_concurrency:
        yield Finding(
            check="kv_budget",
            level="warning",
            message=f"{plan.requests} request{'s' if plan.requests > 1 else ''} of "
            f"{setup.settings.context:,} tokens fit at once; the peak is "
            f"{setup.settings.peak_concurrency}: the rest waits or is preempted",
            remedy=f"{_small_kv(setup)} keys and values, or speculation off at the peak",
        )
    else:
        yield Finding(
            check="kv_budget", level="ok", message=f"{plan.requests} requests fit at once"
        )


def _draft_kv(context: PlanContext) -> Iterator[Finding]:
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
    yield Finding(check="draft_kv", level="warning" if lost > 0.25 else "note", message=message)


def _draft_share(context: PlanContext) -> Iterator[Finding]:
    plan, setup = context.speculating, context.setup
    if not plan.draft_weight_bytes:
        return
    total = setup.device.memory_bytes * setup.devices
    draft, left = plan.draft_weight_bytes, total - plan.weight_bytes
    rest = f"{draft / left:.0%} of" if draft < left else "more than"
    yield Finding(
        check="draft_share",
        level="ok" if draft <= 0.15 * left else "warning",
        message=f"the draft is {draft / total:.0%} of all memory and {rest} what the target "
        "leaves; the second is what requests lose",
    )


def _target_share(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    share = context.plain.weight_bytes / (setup.device.memory_bytes * setup.devices)
    if share > 0.7:
        fills = f"fills {share:.0%} of" if share < 1.0 else "is larger than"
        yield Finding(
            check="target_share",
            level="warning",
            message=f"the target alone {fills} the memory",
            remedy="measure preemptions with and without speculation before believing a speed-up",
        )


def _headroom(context: PlanContext) -> Iterator[Finding]:
    plain, setup = context.plain, context.setup
    needed = setup.settings.peak_concurrency * setup.settings.context
    if plain.tokens and needed / plain.tokens > 0.95:
        yield Finding(
            check="headroom",
            level="warning",
            message=f"the peak needs keys and values of {needed:,} tokens, and {plain.tokens:,} "
            "fit even without speculation: there is no room to give away",
        )


def _tp_symmetry(context: PlanContext) -> Iterator[Finding]:
    setup, plan = context.setup, context.speculating
    if not plan.draft_weight_bytes or setup.draft_tp == setup.tp or setup.in_processes:
        return
    over = plan.fullest_rank_bytes > plan.rank_limit_bytes
    # The draft of a model runs on the target's ranks there, and the server does not start else.
    refused = setup.settings.engine == "vllm" and setup.drafts_with == "model"
    yield Finding(
        check="tp_symmetry",
        level="error" if over or refused else "warning",
        message=f"{f'vllm wants a draft model on all {setup.tp} ranks; ' if refused else ''}"
        f"a draft on {setup.draft_tp} of {setup.tp} ranks: the fullest rank holds "
        f"{plan.fullest_rank_bytes / 1e9:.1f} of {plan.rank_limit_bytes / 1e9:.1f} GB, and "
        f"{plan.imbalance_bytes / 1e9:.1f} GB on the others lie idle, for all pools are alike",
        where="draft_tensor_parallel_size",
        remedy=f"split the draft over {setup.tp} ranks",
    )


def _ranks_divide(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    parts = [("target", setup.target, setup.tp)]
    if setup.drafts_with == "model" and setup.draft is not None:
        parts.append(("draft", setup.draft, setup.draft_tp))
    for name, model, ranks in parts:
        keys, heads = model.num_kv_heads, model.num_heads
        if setup.in_processes and not shares_heads(keys, heads, ranks):
            yield Finding(
                check="ranks_divide",
                level="error",
                message=f"{ranks} processes cannot share the {name}'s {keys} key heads",
                where="tensor_parallel_size",
                remedy=f"at most {keys} ranks, or a multiple of them up to {heads}",
            )
        if setup.settings.engine == "foretoken" and not setup.in_processes:
            yield from _uneven(name, model, ranks)
        elif heads % ranks and not setup.in_processes:
            yield Finding(
                check="ranks_divide",
                level="error",
                message=f"the {name}'s {heads} attention heads cannot be split over {ranks} ranks",
                where="tensor_parallel_size",
                remedy="another number of ranks, or another draft",
            )


def _uneven(name: str, model: PlanModel, ranks: int) -> Iterator[Finding]:
    """Of Foretoken's ranks on GPUs, which exchange parts of one size."""
    found = uneven_parts(
        ranks,
        model.num_kv_heads,
        model.num_heads,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        vocabulary=model.vocab_size,
    )
    if found:
        yield Finding(
            check="ranks_divide",
            level="error",
            message=f"the {name}'s {' and '.join(found)} cannot be split evenly over {ranks} GPUs",
            where="tensor_parallel_size",
            remedy="another number of ranks",
        )


def _lookahead(context: PlanContext) -> Iterator[Finding]:
    plan, setup = context.speculating, context.setup
    if plan.lookahead and plan.tokens:
        slots = plan.lookahead * min(setup.settings.peak_concurrency, max(1, plan.requests))
        lent = setup.settings.engine == "foretoken"
        how = "lent while drafts are checked" if lent else "reserved whatever is accepted"
        yield Finding(
            check="lookahead",
            level="note",
            message=f"{plan.lookahead} slots per running request are {how}: "
            f"{slots:,} of {plan.tokens:,} tokens at the peak. Fewer tokens in "
            "the cache mean shorter contexts, smaller batches, and preemptions",
        )


def _long_context(context: PlanContext) -> Iterator[Finding]:
    setup, plan = context.setup, context.speculating
    settings = setup.settings
    if settings.context >= 32768 and context.plain.requests > plan.requests:
        yield Finding(
            check="long_context",
            level="warning",
            message=f"at {settings.context:,} tokens per request the draft costs "
            f"{context.plain.requests - plan.requests} of {context.plain.requests} requests",
        )
    if setup.draft is not None and setup.draft.context < settings.context:
        yield Finding(
            check="long_context",
            level="warning",
            message=f"the draft ends at {setup.draft.context:,} tokens; beyond, requests are "
            "decoded without drafts",
        )


def _kv_quantization(context: PlanContext) -> Iterator[Finding]:
    setup, plan = context.setup, context.speculating
    if plan.requests < setup.settings.peak_concurrency and setup.kv_bytes >= 2:
        small = _small_kv(setup)
        yield Finding(
            check="kv_quantization",
            level="note",
            message=f"{small} keys and values would hold about twice the tokens; the draft's can "
            "be set on their own",
            where="kv_cache_dtype",
            remedy=f"--kv-cache-dtype {small}, and measure acceptance again",
        )


def _step_rows(context: PlanContext) -> Iterator[Finding]:
    setup = context.setup
    rows = setup.settings.peak_concurrency * (setup.k + 1)
    limit = setup.settings.max_num_batched_tokens
    yield Finding(
        check="step_rows",
        level="warning" if rows > limit else "ok",
        message=f"a step of {setup.settings.peak_concurrency} requests verifies up to {rows:,} "
        f"rows and ends with 1 to {setup.k + 1} tokens each; all wait for the slowest "
        f"(limit {limit:,} rows)",
        where="max_num_batched_tokens",
    )


MEMORY_CHECKS = (
    PlanCheck("weights", _weights),
    PlanCheck("kv_budget", _kv_budget),
    PlanCheck("draft_kv", _draft_kv),
    PlanCheck("draft_share", _draft_share),
    PlanCheck("target_share", _target_share),
    PlanCheck("headroom", _headroom),
    PlanCheck("tp_symmetry", _tp_symmetry),
    PlanCheck("ranks_divide", _ranks_divide),
    PlanCheck("lookahead", _lookahead),
    PlanCheck("long_context", _long_context),
    PlanCheck("kv_quantization", _kv_quantization),
    PlanCheck("step_rows", _step_rows),
)
