"""How many pages there are, what everything takes, and when to refuse, for one engine.

Applies `foretoken.shape.memory` to the engine's settings. Pure: the same facts give the same
budget, so that a refusal can try what else would have worked. Sizes in bytes.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from foretoken.config.quantization import QUANTIZATIONS
from foretoken.errors import ConfigError
from foretoken.shape import ModelShape
from foretoken.shape.memory import (
    RUNTIME_BYTES,
    Cost,
    KeptNumbers,
    Need,
    StepSize,
    Storage,
    Widths,
    activation_bytes,
    engine_storage,
    speculation_cost,
    weight_bytes,
)
from foretoken.shape.stored import StoredScheme

_LEAST_KV_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """One model and how it is kept."""

    shape: ModelShape
    quantization: str | None = None
    kv_cache_dtype: str = "auto"

    def kv_per_token(self, dtype_bytes: int) -> int:
        """Bytes of a token's keys and values."""
        return self.shape.kv_bytes_per_token(dtype_bytes, self.kv_cache_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What speculation keeps, as far as it is known before weights are read."""

    models: tuple[ModelMemory, ...] = ()
    head_parameters: int = 0
    head_kv: tuple[KeptNumbers, ...] = ()
    features_per_token: int = 0
    """Numbers of hidden states that heads read, in the model's type."""
    lookahead: int = 0
    """Most drafts of a sequence in a step."""

    @property
    def has_weights(self) -> bool:
        """Whether there is a draft model or a head."""
        return bool(self.models) or self.head_parameters > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Everything that the budget depends on."""

    target: ModelMemory
    drafting: Drafting
    dtype_bytes: int
    packs: bool
    """Whether weights are packed: then integers stay integers, and tied heads are a copy."""
    free: int
    """Memory that the engine may use."""
    kv_share: float
    """Of `free`: what keys and values may take unless `kv_bytes` says otherwise."""
    kv_bytes: int | None
    page_size: int
    max_model_len: int
    max_model_len_given: bool
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Where the memory goes."""

    need: Need
    free: int
    page_size: int
    num_pages: int

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.num_pages * self.page_size

    @property
    def total(self) -> int:
        """What the engine adds to an idle process once all pages have been written."""
        return self.need.fixed + self.num_tokens * self.need.per_token

    @property
    def cost(self) -> Cost:
        """What speculation takes from the keys and values."""
        return speculation_cost(self.need, self.num_tokens)


def need_of(facts: MemoryFacts) -> Need:
    """What this configuration keeps."""
    drafting = facts.drafting
    drafts = [_weights(model, facts) for model in drafting.models]
    features = drafting.features_per_token * facts.dtype_bytes
    heads = [kept.bytes(facts.dtype_bytes) for kept in drafting.head_kv]
    models = [model.kv_per_token(facts.dtype_bytes) for model in drafting.models]
    tables = [_position_bytes(m.shape, facts) for m in (facts.target, *drafting.models)]
    rows = min(facts.max_num_seqs * (1 + drafting.lookahead), facts.max_num_batched_tokens)
    drawn = facts.max_num_seqs * drafting.lookahead if drafting.has_weights else 0
    step = StepSize(facts.max_num_batched_tokens, rows, drawn)
    activations = activation_bytes(step, _widths(facts.target.shape), facts.dtype_bytes)
    return Need(
        weights=_weights(facts.target, facts),
        draft_weights=sum(drafts) + drafting.head_parameters * facts.dtype_bytes,
        activations=activations,
        workspace=RUNTIME_BYTES + sum(tables),
        kv_per_token=facts.target.kv_per_token(facts.dtype_bytes),
        draft_kv_per_token=sum(models) + sum(heads) + features,
        lookahead=drafting.lookahead,
        max_num_seqs=facts.max_num_seqs,
    )


def budget_of(facts: MemoryFacts) -> Budget:
    """The budget of this configuration.

    Raises:
        ConfigError: it cannot work; with the arithmetic, and what would.
    """
    budget = _budget(facts)
    field = _shortage(facts, budget)
    if field is None:
        return budget
    others = [text for text, other in _alternatives(facts, budget) if _works(other)]
    allowed = f"{_arithmetic(facts, budget)}. What would work: "
    given = {
        "kv_cache_memory_bytes": facts.kv_bytes,
        "max_model_len": facts.max_model_len,
    }.get(field, "its weights")
    raise ConfigError(field, given, allowed + ("; ".join(others[:4]) or "a smaller model"))


def _budget(facts: MemoryFacts) -> Budget:
    need = need_of(facts)
    page_bytes = need.per_token * facts.page_size
    left = facts.free - need.fixed
    wanted = facts.kv_bytes
    if wanted is None:
        wanted = max(min(int(facts.free * facts.kv_share), left), min(_LEAST_KV_BYTES, left))
    full = facts.max_num_seqs * -(-facts.max_model_len // facts.page_size)
    return Budget(
        need=need,
        free=facts.free,
        page_size=facts.page_size,
        num_pages=max(0, min(wanted // page_bytes, full)),
    )


def _shortage(facts: MemoryFacts, budget: Budget) -> str | None:
    """The setting that makes it impossible; None: it works."""
    if budget.need.fixed > facts.free:
        return "model"
    if budget.num_pages < 1 or budget.total > facts.free:
        return "kv_cache_memory_bytes" if facts.kv_bytes is not None else "model"
    if facts.max_model_len_given and budget.num_tokens < facts.max_model_len:
        return "max_model_len"
    return None


def _works(facts: MemoryFacts) -> bool:
    return _shortage(facts, _budget(facts)) is None


def _alternatives(facts: MemoryFacts, budget: Budget) -> Iterator[tuple[str, MemoryFacts]]:
    """What else could be asked for, the least change first."""
    fit = budget.num_tokens
    if facts.max_model_len_given and 0 < fit < facts.max_model_len:
        yield f"max_model_len={fit}", replace(facts, max_model_len=fit)
    page = budget.need.per_token * facts.page_size
    if facts.kv_bytes is not None:
        for kv_bytes in (page * -(-facts.max_model_len // facts.page_size), page):
            words = f"kv_cache_memory_bytes={kv_bytes}"
            yield words, replace(facts, kv_bytes=kv_bytes)
    else:
        yield (
            f"kv_cache_memory_bytes={page * -(-facts.max_model_len // facts.page_size)}",
            replace(facts, kv_bytes=page * -(-facts.max_model_len // facts.page_size)),
        )
    if facts.max_num_seqs > 1:
        for count in (facts.max_num_seqs // 2, 1):
            yield f"max_num_seqs={count}", replace(facts, max_num_seqs=count)
    plain = replace(facts, drafting=Drafting())
    smaller = [model for model in facts.drafting.models if model.quantization is None]
    if smaller and facts.packs:
        models = (replace(model, quantization="int8") for model in facts.drafting.models)
        yield 'speculative_config["quantization"]="int8"', _with_drafts(facts, models)
    if any(model.kv_cache_dtype == "auto" for model in facts.drafting.models):
        models = (replace(model, kv_cache_dtype="int8") for model in facts.drafting.models)
        yield 'speculative_config["kv_cache_dtype"]="int8"', _with_drafts(facts, models)
    if facts.drafting.has_weights:
        yield "no speculative_config", plain
    if facts.target.kv_cache_dtype == "auto":
        target = replace(facts.target, kv_cache_dtype="int8")
        yield 'kv_cache_dtype="int8"', replace(facts, target=target)
    if facts.target.quantization is None and facts.packs:
        for scheme in ("int8", "int4"):
            target = replace(facts.target, quantization=scheme)
            yield f'quantization="{scheme}"', replace(facts, target=target)
            if facts.drafting.has_weights:
                words = f'quantization="{scheme}" and no speculative_config'
                yield words, replace(plain, target=target)


def _with_drafts(facts: MemoryFacts, models: Iterable[ModelMemory]) -> MemoryFacts:
    return replace(facts, drafting=replace(facts.drafting, models=tuple(models)))


def _arithmetic(facts: MemoryFacts, budget: Budget) -> str:
    need = budget.need
    page = need.per_token * facts.page_size
    parts = [f"weights {show(need.weights)}"]
    if need.draft_weights:
        parts.append(f"draft weights {show(need.draft_weights)}")
    parts.append(f"activations and workspace {show(need.activations + need.workspace)}")
    request = -(-facts.max_model_len // facts.page_size) * page
    return (
        f"{show(facts.free)} are free; {' + '.join(parts)} = {show(need.fixed)}, which leaves "
        f"{show(facts.free - need.fixed)} for keys and values at {need.per_token} bytes a token: "
        f"one page is {page} bytes, one request of max_model_len {facts.max_model_len} "
        f"{show(request)}, and {budget.num_tokens} tokens would fit"
    )


def show(count: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.1f} MiB"


def _weights(model: ModelMemory, facts: MemoryFacts) -> int:
    given = model.quantization if facts.packs else None
    quantization = given if given in QUANTIZATIONS else None
    counts = model.shape.weight_counts()
    if not facts.packs and model.shape.tie_word_embeddings:
        counts = counts._replace(head=0)
    stored = model.shape.stored
    if stored is not None and facts.packs and quantization is None:
        return int(weight_bytes(counts, _as_stored(stored, facts.dtype_bytes)))
    return int(weight_bytes(counts, engine_storage(facts.dtype_bytes, quantization)))


def _as_stored(stored: StoredScheme, dtype_bytes: int) -> Storage:
    """Integers stay integers, with float32 scales and zero points; fp8 is taken for 16 bit."""
    bits = {"int4": 0.5, "int8": 1.0}.get(stored.weights[:4])
    if bits is None:
        return engine_storage(dtype_bytes, None)
    grouped = re.search(r"groups of (\d+)", stored.weights)
    numbers = 8 if "asymmetric" in stored.weights else 4
    group = int(grouped.group(1)) if grouped else 0
    scales = numbers / group if group else 0.0
    outputs = 0.0 if group else 4.0
    return Storage(dtype_bytes, dtype_bytes, bits + scales, dtype_bytes, per_output=outputs)


def _widths(shape: ModelShape) -> Widths:
    return Widths(
        hidden=shape.hidden_size,
        query=shape.query_size,
        kv=shape.kv_size,
        inner=shape.intermediate_size,
        vocabulary=shape.vocab_size,
    )


def _position_bytes(shape: ModelShape, facts: MemoryFacts) -> int:
    """cos and sin of every position, for each kind of layer."""
    if shape.rope is None:
        return 0
    kinds = len(set(shape.windows)) or 1
    positions = min(facts.max_model_len, shape.max_position_embeddings)
    return 2 * kinds * positions * shape.rope.rotary_dim * facts.dtype_bytes
