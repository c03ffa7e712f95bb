"""What a configuration keeps in memory and how many pages are left for it, for one engine.

Applies `foretoken.shape.memory` to the engine's settings. Pure, so that a refusal can try others.
Sizes in bytes.
"""

from dataclasses import dataclass, replace

from foretoken.config.model_memory import HeadMemory, ModelMemory
from foretoken.shape import ModelShape
from foretoken.shape.memory import (
    RUNTIME_BYTES,
    TRANSFORMERS_BYTES,
    Need,
    Packs,
    StepSize,
    Widths,
    activation_bytes,
)

_LEAST_KV_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What speculation keeps, as far as it is known before weights are read."""

    models: tuple[ModelMemory, ...] = ()
    heads: tuple[HeadMemory, ...] = ()
    features_per_token: int = 0
    """Numbers of hidden states that heads read, in the model's type."""
    lookahead: int = 0
    """Most drafts of a sequence in a step."""

    @property
    def has_weights(self) -> bool:
        """Whether there is a draft model or a head."""
        return bool(self.models or self.heads)

    @property
    def kept(self) -> tuple[ModelMemory | HeadMemory, ...]:
        """Everything with weights."""
        return (*self.models, *self.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Everything that the budget depends on."""

    target: ModelMemory
    drafting: Drafting
    dtype_bytes: int
    packs: Packs
    """What is packed: whether integers stay integers, and tied heads are a copy."""
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
    plain_pages: int
    """How many there would be without speculation, all other settings the same."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.num_pages * self.page_size

    @property
    def total(self) -> int:
        """What the engine adds to an idle process once all pages have been written."""
        return self.need.fixed + self.num_tokens * self.need.per_token

    @property
    def plain_tokens(self) -> int:
        """Tokens whose keys and values would fit without speculation."""
        return self.plain_pages * self.page_size

    @property
    def lost_tokens(self) -> int:
        """What speculation takes from the keys and values."""
        return self.plain_tokens - self.num_tokens


def need_of(facts: MemoryFacts) -> Need:
    """What this configuration keeps."""
    drafting = facts.drafting
    features = drafting.features_per_token * facts.dtype_bytes
    drafts = [one.weight_bytes(facts.dtype_bytes, packs=facts.packs) for one in drafting.kept]
    drafts_kv = [one.kv_per_token(facts.dtype_bytes) for one in drafting.kept]
    tables = [_position_bytes(m.shape, facts) for m in (facts.target, *drafting.models)]
    rows = min(facts.max_num_seqs * (1 + drafting.lookahead), facts.max_num_batched_tokens)
    drawn = facts.max_num_seqs * drafting.lookahead if drafting.has_weights else 0
    step = StepSize(facts.max_num_batched_tokens, rows, drawn)
    activations = activation_bytes(step, _widths(facts.target.shape), facts.dtype_bytes)
    return Need(
        weights=facts.target.weight_bytes(facts.dtype_bytes, packs=facts.packs),
        draft_weights=sum(drafts),
        activations=activations,
        workspace=RUNTIME_BYTES + _late_bytes(facts) + sum(tables),
        kv_per_token=facts.target.kv_per_token(facts.dtype_bytes),
        draft_kv_per_token=sum(drafts_kv) + features,
        lookahead=drafting.lookahead,
        max_num_seqs=facts.max_num_seqs,
    )


def plan_pages(facts: MemoryFacts) -> Budget:
    """The pages with the drafter and without; where nobody said how many, as long a context."""
    plain = replace(facts, drafting=Drafting())
    plain_pages = _pages(plain, need_of(plain), 0)
    need = need_of(facts)
    context = min(plain_pages, -(-facts.max_model_len // facts.page_size))
    return Budget(
        need=need,
        free=facts.free,
        page_size=facts.page_size,
        num_pages=_pages(facts, need, context),
        plain_pages=plain_pages,
    )


def _pages(facts: MemoryFacts, need: Need, least: int) -> int:
    """As many as are wanted, and `least` if nobody said how many and they fit."""
    page_bytes = need.per_token * facts.page_size
    left = facts.free - need.fixed
    wanted = facts.kv_bytes
    if wanted is None:
        wanted = max(min(int(facts.free * facts.kv_share), left), min(_LEAST_KV_BYTES, left))
        wanted = max(wanted, min(least * page_bytes, left))
    full = facts.max_num_seqs * -(-facts.max_model_len // facts.page_size)
    return max(0, min(wanted // page_bytes, full))


def shortage_of(facts: MemoryFacts, budget: Budget) -> str | None:
    """The setting that makes it impossible; None: it works."""
    if budget.need.fixed > facts.free:
        return "model"
    if budget.num_pages < 1 or budget.total > facts.free:
        return "kv_cache_memory_bytes" if facts.kv_bytes is not None else "model"
    if facts.max_model_len_given and budget.num_tokens < facts.max_model_len:
        return "max_model_len"
    if budget.num_tokens < min(facts.max_model_len, budget.plain_tokens):
        return "speculative_config"
    return None


def _widths(shape: ModelShape) -> Widths:
    return Widths(
        hidden=shape.hidden_size,
        query=shape.query_size,
        kv=shape.kv_size,
        inner=shape.intermediate_size,
        vocabulary=shape.vocab_size,
    )


def _late_bytes(facts: MemoryFacts) -> int:
    """Of transformers, where some model or its tokenizer needs it."""
    models = (facts.target, *facts.drafting.models)
    return TRANSFORMERS_BYTES if any(model.uses_transformers for model in models) else 0


def _position_bytes(shape: ModelShape, facts: MemoryFacts) -> int:
    """cos and sin of every position, for each kind of layer."""
    if shape.rope is None:
        return 0
    kinds = len(set(shape.windows)) or 1
    positions = min(facts.max_model_len, shape.max_position_embeddings)
    return 2 * kinds * positions * shape.rope.rotary_dim * facts.dtype_bytes
