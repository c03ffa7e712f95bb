"""Where the memory goes, with and without speculation.

The pool of keys and values is the same size on every tensor-parallel rank, so the fullest rank
decides; Foretoken's processes share one memory. A draft costs its weights, its own keys and values
per token, and look-ahead slots per running request. Bytes throughout, by the formula of
`foretoken.shape.memory_formula`. Activation and graph memory is an estimate unless given.
"""

from dataclasses import dataclass

from foretoken.lab.plan.method_plans import plan_of
from foretoken.lab.plan.setup import Setup
from foretoken.lab.plan.sizes import PlanModel, Quantization, head_of
from foretoken.shape import memory_formula as formula

GPU_RUNTIME_BYTES = 1 << 30
"""CUDA context, communication buffers and captured graphs of one device: an assumption."""
_STORED = {"bf16": (2, None), "fp16": (2, None), "fp32": (4, None), "fp8": (2, None),
           "int8": (2, "int8"), "int4": (2, "int4")}  # fmt: skip
"""What Foretoken can store, as `engine_storage` takes it; it multiplies fp8 out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoad:
    """What a method keeps on the devices beside the target."""

    weight_bytes: float = 0.0
    kv_bytes_per_token: float = 0.0
    lookahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """One way to run: plain, or with a draft. All devices together unless a name says rank."""

    usable_bytes: float
    """Memory times utilisation, less the overhead, over all ranks."""
    weight_bytes: float
    draft_weight_bytes: float
    fullest_rank_bytes: float
    """Weights on the rank that holds most: the one that drafts, if the drafter is not split."""
    emptiest_rank_bytes: float
    rank_limit_bytes: float
    """What the fullest rank may hold; of Foretoken's processes what the others leave."""
    imbalance_bytes: float
    """Memory that lies idle because the pools of all ranks are as small as the fullest one's."""
    kv_bytes_per_token: float
    draft_kv_bytes_per_token: float
    """Of drafters' keys and values, and of the hidden states that they read."""
    draft_kv_reserved: bool
    """Whether every token of the cache keeps that; else it takes what the target leaves."""
    lookahead: int
    kv_pool_bytes: float
    """Memory for keys and values on all ranks; negative if the weights alone do not fit."""
    tokens: int
    requests: int
    """Typical requests that fit at once, look-ahead slots included."""

    @property
    def fits(self) -> bool:
        return self.requests >= 1


def weight_bytes(model: PlanModel, quantization: Quantization, engine: str = "vllm") -> float:
    """Bytes of the weights as stored; embedding and head stay 16 bit where the scheme says so. In
    Foretoken a tied head that is rounded is a copy, and its int4 has a scale per 32 inputs."""
    table, head = model.head_params, model.table_params - model.head_params
    matrices = model.dense_params + model.expert_params
    wide = model.dense_params if quantization.experts_only and model.num_experts else 0
    counts = formula.WeightCounts(table, head, matrices - wide, wide)
    if engine == "foretoken" and quantization.name in _STORED:
        own = 0 if _shares_table(model, quantization) else table
        counts = formula.WeightCounts(
            table, own, matrices, 0, model.matrix_outputs, head_outputs=model.shape.vocab_size
        )
    return formula.weight_bytes(counts, _storage(quantization, engine))


def _shares_table(model: PlanModel, quantization: Quantization) -> bool:
    """Whether one process of Foretoken's reads the head in the embedding table."""
    rounded = _STORED.get(quantization.name, (2, None))[1] is not None
    return model.table_params == model.head_params and not rounded


def copied_bytes(model: PlanModel, quantization: Quantization, ranks: int) -> float:
    """Of Foretoken's weights, what several processes have more than one would: each has all
    embeddings, several a part of a tied head, and the same key head where there are too few."""
    copied = (
        (_key_copies(model, ranks) - 1) * 2 * model.shape.kv_size * model.shape.num_hidden_layers
    )
    counts = formula.WeightCounts(
        (ranks - 1) * model.head_params,
        model.head_params if ranks > 1 and _shares_table(model, quantization) else 0,
        copied * model.shape.hidden_size,
        0,
        outputs=copied,
    )
    return formula.weight_bytes(counts, _storage(quantization, "foretoken"))


def _storage(quantization: Quantization, engine: str) -> formula.Storage:
    if engine == "foretoken" and quantization.name in _STORED:
        return formula.engine_storage(*_STORED[quantization.name])
    wide = quantization.stored_bytes if quantization.tables_too else 2.0
    return formula.Storage(wide, wide, quantization.stored_bytes, 2.0)


def kv_per_token(
    model: PlanModel, element_bytes: float, context: int, *, lets_go: bool = True
) -> float:
    """Bytes per token of a request of `context` tokens.

    Args:
        model: whose keys and values.
        element_bytes: of a number.
        context: tokens.
        lets_go: whether layers with a window keep only what it sees; else they keep all tokens.
    """
    bounded = lets_go and model.window_size > 0
    windowed = model.window_elements * min(1.0, model.window_size / context if bounded else 1.0)
    return formula.kv_token_bytes(model.kv_elements + windowed, element_bytes)


def draft_load(setup: Setup) -> DraftLoad:
    """What the method of `setup` keeps beside the target. A head is a few layers as wide as the
    target's; it shares the tables. In Foretoken the hidden states that a head reads are kept for
    every token, and look-up methods hold slots too while drafts are checked; elsewhere they keep
    nothing on the device."""
    target, context, engine = setup.target, setup.settings.context, setup.settings.engine
    drafting = setup.drafting
    if (draft := setup.draft_model) is not None:
        return DraftLoad(
            weight_bytes=weight_bytes(draft, setup.draft_quantization, engine),
            kv_bytes_per_token=kv_per_token(
                draft, setup.draft_kv_bytes, context, lets_go=engine != "foretoken"
            ),
            lookahead=setup.k,
        )
    if drafting is not None and drafting.drafts_with == "head":
        head, read = head_of(target, drafting), 0.0
        if engine == "foretoken":
            read = 2.0 * plan_of(drafting).features * target.shape.hidden_size
        weights = head.dense_params + head.expert_params
        return DraftLoad(
            weight_bytes=weights * setup.head_quantization.stored_bytes,
            kv_bytes_per_token=head.kv_elements * setup.draft_kv_bytes + read,
            lookahead=setup.k,
        )
    return DraftLoad(lookahead=setup.k if engine == "foretoken" and drafting is not None else 0)


def overhead_bytes(setup: Setup) -> float:
    """Per device: what was given, else runtime plus the activations of a full step in 16 bit."""
    if setup.settings.overhead_gb >= 0:
        return setup.settings.overhead_gb * 1e9
    target, tokens = setup.target, setup.settings.max_num_batched_tokens
    hidden = target.shape.hidden_size
    if setup.settings.engine == "foretoken":
        running = setup.settings.peak_concurrency
        rows = min(running * (1 + setup.k), tokens)
        drawn = running * setup.k if setup.has_weights else 0
        step = formula.StepSize(tokens, rows, drawn)
        each = formula.activation_bytes(step, target.shape.widths, 2)
        if not setup.in_processes:
            return formula.RUNTIME_BYTES + each
        more = (setup.tp - 1) * formula.RANK_BYTES
        return (formula.RUNTIME_BYTES + more + setup.tp * each) / setup.devices
    widest = 6 * hidden + 3 * 4 * hidden / setup.tp
    runtime = GPU_RUNTIME_BYTES if setup.device.kind == "gpu" else GPU_RUNTIME_BYTES / 4
    return runtime + 2 * widest * tokens


def plan_memory(setup: Setup, load: DraftLoad | None) -> MemoryPlan:
    """The memory of `setup` with `load` beside the target, or without any draft."""
    load = load or DraftLoad()
    ranks, draft_ranks, context = setup.tp, setup.draft_ranks, setup.settings.context
    engine, model, draft_model = setup.settings.engine, setup.target, setup.draft_model
    target, draft, head = weight_bytes(model, setup.quantization, engine), load.weight_bytes, 0.0
    drafts_kv = load.kv_bytes_per_token
    if engine == "foretoken":
        target += copied_bytes(model, setup.quantization, ranks)
        plan = setup.method_plan if setup.drafts_with == "head" else None
        if draft and ranks > 1 and plan is not None and not plan.head_vocabulary:
            # It makes logits with the target's head, which rank 0 has all of then.
            outputs = model.shape.vocab_size
            counts = formula.WeightCounts(0, model.head_params, 0, 0, head_outputs=outputs)
            head = formula.weight_bytes(counts, _storage(setup.quantization, engine))
    if draft and draft_model is not None and draft_ranks > 1:
        drafts_kv *= _key_copies(draft_model, draft_ranks)
    fullest = target / ranks + draft / draft_ranks + head
    emptiest = target / ranks + (draft / draft_ranks if draft_ranks == ranks else 0.0)
    # Foretoken's pages let go where memory can be given back; those of its draft models never do.
    lets_go = engine != "foretoken" or setup.in_processes
    kv = kv_per_token(model, setup.kv_bytes, context, lets_go=lets_go)
    kv *= ranks if model.kv_is_shared else _key_copies(model, ranks)
    each = setup.device.memory_bytes * setup.utilization - overhead_bytes(setup)
    if setup.in_processes:
        # All take of one memory. Pages of drafters are written in what is free, and given back.
        limit, pools = setup.devices * each - (ranks - 1) * emptiest, 1
        per_token = kv
    else:
        limit, pools = each, ranks
        per_token = kv / ranks + drafts_kv / draft_ranks
    tokens = formula.tokens_that_fit(limit - fullest, per_token)
    return MemoryPlan(
        usable_bytes=setup.devices * each,
        weight_bytes=target,
        draft_weight_bytes=draft + head,
        fullest_rank_bytes=fullest,
        emptiest_rank_bytes=emptiest,
        rank_limit_bytes=limit,
        imbalance_bytes=0.0 if setup.in_processes else draft * (ranks / draft_ranks - 1),
        kv_bytes_per_token=kv,
        draft_kv_bytes_per_token=drafts_kv,
        draft_kv_reserved=not setup.in_processes,
        lookahead=load.lookahead,
        kv_pool_bytes=(limit - fullest) * pools,
        tokens=tokens,
        requests=tokens // (context + load.lookahead),
    )


def _key_copies(model: PlanModel, ranks: int) -> int:
    """How often each key is kept: once, unless there are fewer key heads than ranks."""
    return -(-ranks // model.shape.num_key_value_heads)
