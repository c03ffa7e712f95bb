"""Where an engine's memory goes: weights, keys and values, what a step needs.

What one model or head keeps, what a configuration keeps, and how many pages are left for it.
`foretoken.config.refusal` says what would have worked where none are. Applies the formula of
`foretoken.shape.memory_formula`. Pure: the same facts give the same budget. Sizes in bytes.
"""

from dataclasses import dataclass, replace

from foretoken.config.quantization import QUANTIZATIONS
from foretoken.shape import ModelShape
from foretoken.shape.memory_formula import (
    GPU_BYTES,
    LATE_BYTES,
    RANK_BYTES,
    RUNTIME_BYTES,
    Held,
    KVPerToken,
    Need,
    Packs,
    StepSize,
    Storage,
    WeightCounts,
    activation_bytes,
    copies_of,
    engine_storage,
    gpu_activation_bytes,
    held_storage,
    most_pages,
    weight_bytes,
)
from foretoken.shape.stored import FLOATS

_LEAST_KV_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """One model and how it is kept."""

    shape: ModelShape
    quantization: str | None = None
    """As the user set it; what is not a name of QUANTIZATIONS leaves floats as they are."""
    kv_cache_dtype: str = "auto"
    ranks: int = 1
    """Processes that share every layer."""
    stages: int = 1
    """Processes that have some layers each."""

    @property
    def processes(self) -> int:
        """How many there are."""
        return self.ranks * self.stages

    @property
    def loads_late(self) -> bool:
        """Whether transformers runs it, or its tokenizer is built from a GGUF file."""
        stored = self.shape.stored
        return not self.shape.is_own or (stored is not None and stored.method == "gguf")

    def kv_per_token(self, dtype_bytes: int) -> int:
        """Of a token's keys and values, in all processes together."""
        return self._copies * self.shape.kv_bytes_per_token(dtype_bytes, self.kv_cache_dtype)

    def window_kv_per_token(self, dtype_bytes: int) -> int:
        """Of those, what layers with a window keep."""
        kind = self.kv_cache_dtype
        return self._copies * self.shape.kv_bytes_per_token(dtype_bytes, kind, windowed=True)

    def weight_bytes(self, dtype_bytes: int, *, packs: Packs = Packs.ALL) -> int:
        """Of all weights.

        Args:
            dtype_bytes: of the model's type.
            packs: what kernels pack. Of floats a head that shares the embedding's is the same
                memory, but where ranks share packed ones.
        """
        return int(weight_bytes(self._counts(packs), self._storage(dtype_bytes, packs)))

    def expert_bytes(self, dtype_bytes: int, *, packs: Packs = Packs.ALL) -> int:
        """Of the experts that routers choose from, all of them."""
        stored, storage = self.shape.stored, self._storage(dtype_bytes, packs)
        if stored is not None and stored.of_experts and packs is not Packs.NONE:
            storage = held_storage(
                stored.of_experts, stored.head, self._table(packs), dtype_bytes, self._asked
            )
        return int(weight_bytes(self.shape.expert_counts(), storage))

    def step_bytes(self, dtype_bytes: int, rows: float, *, packs: Packs = Packs.ALL) -> int:
        """Of the weights that a step of so many rows reads, as they are kept: all but the embedding
        table, and but the experts that none of its rows chooses."""
        counts = self.shape.weight_counts()._replace(table=0)
        everything = weight_bytes(counts, self._storage(dtype_bytes, packs))
        untouched = 1.0 - self.shape.expert_share(rows)
        return int(everything - untouched * self.expert_bytes(dtype_bytes, packs=packs))

    def head_bytes(self, dtype_bytes: int, *, packs: Packs = Packs.ALL) -> int:
        """Of the output head, if rank 0 has all of it beside its part, for drafters."""
        counts = self._counts(packs)
        head = WeightCounts(0, counts.head, 0, 0, head_outputs=counts.head_outputs)
        return int(weight_bytes(head, self._storage(dtype_bytes, packs))) if self.ranks > 1 else 0

    def copied_bytes(self, dtype_bytes: int, *, packs: Packs = Packs.ALL) -> int:
        """Of the weights that several processes have more than one would: each has all embeddings,
        and several have the same key head where there are too few."""
        counts, layers = self.shape.weight_counts(), self.shape.num_hidden_layers
        key_rows = (self._copies - 1) * layers * 2 * self.shape.kv_size
        copied = WeightCounts(
            table=(self.processes - 1) * counts.table,
            head=0,
            matrices=key_rows * self.shape.hidden_size,
            rest=(self.ranks - 1) * counts.rest,
            outputs=key_rows,
        )
        return int(weight_bytes(copied, self._storage(dtype_bytes, packs)))

    def _counts(self, packs: Packs) -> WeightCounts:
        shape, counts, stored = self.shape, self.shape.weight_counts(), self.shape.stored
        if shape.tie_word_embeddings and self._table(packs).bits:
            return counts._replace(head=0, head_outputs=0)
        shared = shape.tie_word_embeddings and self._asked is None
        one_memory = packs is not Packs.ALL or self.ranks == 1
        if one_memory and shared and (stored is None or not stored.head.bits):
            return counts._replace(head=0)
        return counts

    @property
    def _copies(self) -> int:
        """Processes that have the same key head."""
        return copies_of(self.shape.num_key_value_heads, self.ranks)

    @property
    def _asked(self) -> str | None:
        return self.quantization if self.quantization in QUANTIZATIONS else None

    def _storage(self, dtype_bytes: int, packs: Packs) -> Storage:
        stored = self.shape.stored
        if packs is Packs.NONE:
            return engine_storage(dtype_bytes, None)
        if stored is None:
            return engine_storage(dtype_bytes, self._asked)
        return held_storage(stored.held, stored.head, self._table(packs), dtype_bytes, self._asked)

    def _table(self, packs: Packs) -> Held:
        """How the embedding is kept: as it is stored where kernels give rows of it."""
        stored = self.shape.stored
        if stored is None or packs is not Packs.ALL or self.ranks > 1:
            return FLOATS
        return stored.table


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMemory:
    """A head network and how it is kept."""

    counts: WeightCounts
    """Of its own weights."""
    quantization: str | None = None
    """A name of QUANTIZATIONS, or None."""
    kept: KVPerToken | None = None
    """Its keys and values of a token, if it has any."""
    borrows_head: bool = False
    """Whether it makes logits with the target's head, which rank 0 has all of then."""

    def kv_per_token(self, dtype_bytes: int) -> int:
        """Of a token's keys and values."""
        return 0 if self.kept is None else self.kept.bytes(dtype_bytes)

    def weight_bytes(self, dtype_bytes: int, *, packs: Packs = Packs.ALL) -> int:
        """Of all weights; see `ModelMemory`."""
        rounded = None if packs is Packs.NONE else self.quantization
        return int(weight_bytes(self.counts, engine_storage(dtype_bytes, rounded)))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Everything that the budget depends on."""

    target: ModelMemory
    drafting: Drafting
    dtype_bytes: int
    packs: Packs
    """What is packed: whether integers stay integers, and tied heads are a copy."""
    free: int
    """Memory that the engine may use, or each of its processes where that is of its own."""
    kv_share: float
    """Of `free`: what keys and values may take unless `kv_bytes` says otherwise."""
    kv_bytes: int | None
    page_size: int
    max_model_len: int
    max_model_len_given: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    gives_back: bool = False
    """Whether pages that drafters do without are memory again."""
    may_map: bool = False
    """Whether experts may stay in a mapped file, of which the system keeps what it has room for."""
    maps: bool = False
    """Whether they do; they are not counted then."""
    of_one_rank: bool = False
    """Whether each process has memory of its own, a GPU's. All is counted for rank 0 alone then,
    which has most: it drafts, too."""

    def bytes_of(self, need: Need, num_pages: int) -> int:
        """Bytes that so many pages of one sequence have for certain."""
        tokens = num_pages * self.page_size
        return need.kept(tokens) if self.gives_back else tokens * need.per_token

    def pages_in(self, need: Need, num_bytes: int) -> int:
        """The most pages of one sequence that take so much."""
        page, most = self.bytes_of(need, 1), need.window_tokens // self.page_size
        seen = most * page
        if not need.window_kv_per_token or num_bytes <= seen:
            return num_bytes // page
        return most + (num_bytes - seen) // max(1, self.bytes_of(need, most + 1) - seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Where the memory goes."""

    need: Need
    free: int
    page_size: int
    num_pages: int
    plain_pages: int
    """How many there would be without speculation, all other settings the same."""
    kv_bytes: int
    """What pages may take, those of drafters included."""
    mapped: int = 0
    """Bytes of experts beside that, in a file that is mapped, since memory has no room for them."""
    is_shared: bool = False
    """Whether drafters get what the target leaves of that, and give it back; else they have a part
    of every page."""

    @property
    def page_bytes(self) -> int:
        """What pages take once all have been written that fit."""
        drafts = self.num_tokens * self.need.draft_kv_per_token
        return min(self.kv_bytes, self._written_bytes + drafts)

    @property
    def kept_bytes(self) -> int:
        """Of those, what the target keeps if it keeps all it can."""
        return min(self.kv_bytes, self._written_bytes)

    @property
    def _written_bytes(self) -> int:
        return self.need.kept(self.num_tokens, self.need.max_num_seqs)

    def requests_of(self, num_tokens: int) -> float:
        """How many requests of so many tokens fit."""
        by_bytes = self.kv_bytes / self.need.kept(num_tokens)
        by_pages = self.num_tokens / num_tokens
        return min(by_pages, by_bytes) if self.need.window_kv_per_token else by_pages

    @property
    def draft_bytes(self) -> int:
        """What drafters have if the target has written all of its pages."""
        return self.page_bytes - self.kept_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.num_pages * self.page_size

    @property
    def total(self) -> int:
        """What the engine adds to an idle process once all pages have been written."""
        return self.need.fixed + self.page_bytes

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
    drafting, target, dtype_bytes = facts.drafting, facts.target, facts.dtype_bytes
    drafts = [_weights_of(one, facts) for one in drafting.models]
    drafts += [one.weight_bytes(dtype_bytes, packs=facts.packs) for one in drafting.heads]
    drafts_kv = [_kv_of(one, facts) for one in drafting.models]
    drafts_kv += [one.kv_per_token(dtype_bytes) for one in drafting.heads]
    borrowed = any(one.borrows_head for one in drafting.heads)
    head = target.head_bytes(dtype_bytes, packs=facts.packs) if borrowed else 0
    models = (target, *drafting.models)
    tables = [_counted(one, facts) * _position_bytes(one.shape, facts) for one in models]
    late = LATE_BYTES if any(model.loads_late for model in models) else 0
    processes = _counted(target, facts)
    rows = min(facts.max_num_seqs * (1 + drafting.lookahead), facts.max_num_batched_tokens)
    drawn = facts.max_num_seqs * drafting.lookahead if drafting.has_weights else 0
    step = StepSize(facts.max_num_batched_tokens, rows, drawn)
    activations = activation_bytes(step, target.shape.widths, dtype_bytes)
    if facts.of_one_rank:
        activations = gpu_activation_bytes(step, target.shape.widths, dtype_bytes, target.ranks)
    late += GPU_BYTES if facts.of_one_rank else 0
    more_ranks = (processes - 1) * RANK_BYTES
    window = _window_of(facts)
    return Need(
        weights=_weights_of(target, facts) + head - _mapped(facts),
        draft_weights=sum(drafts),
        activations=processes * activations,
        workspace=RUNTIME_BYTES + more_ranks + late + sum(tables),
        kv_per_token=_kv_of(target, facts),
        window=window,
        window_kv_per_token=0 if window is None else target.window_kv_per_token(dtype_bytes),
        window_tokens=0 if window is None else _window_tokens(window, facts),
        draft_kv_per_token=sum(drafts_kv) + drafting.features_per_token * dtype_bytes,
        lookahead=drafting.lookahead,
        max_num_seqs=facts.max_num_seqs,
    )


def _counted(model: ModelMemory, facts: MemoryFacts) -> int:
    """Processes whose memory is counted."""
    return 1 if facts.of_one_rank else model.processes


def _mapped(facts: MemoryFacts) -> int:
    """Bytes of experts that stay in a mapped file."""
    if not facts.maps:
        return 0
    return facts.target.expert_bytes(facts.dtype_bytes, packs=facts.packs)


def _weights_of(model: ModelMemory, facts: MemoryFacts) -> int:
    """Bytes in the processes that are counted; all have equal shares."""
    all_of_them = model.weight_bytes(facts.dtype_bytes, packs=facts.packs)
    all_of_them += model.copied_bytes(facts.dtype_bytes, packs=facts.packs)
    return all_of_them * _counted(model, facts) // model.processes


def _kv_of(model: ModelMemory, facts: MemoryFacts) -> int:
    return model.kv_per_token(facts.dtype_bytes) * _counted(model, facts) // model.processes


def _window_of(facts: MemoryFacts) -> int | None:
    """Positions that layers with a window see, where the memory of others can be given back and
    some sequence may be longer."""
    shape, window = facts.target.shape, facts.target.shape.widest_window
    frees = facts.gives_back and shape.is_own
    return window if frees and window is not None and window < facts.max_model_len else None


def _window_tokens(window: int, facts: MemoryFacts) -> int:
    pages = most_pages(window, facts.max_num_batched_tokens, facts.page_size)
    return pages * facts.page_size


def plan_pages(facts: MemoryFacts) -> Budget:
    """The pages with the drafter and without; where nobody said how many, as long a context."""
    plain = replace(facts, drafting=Drafting())
    plain_pages, _ = _pages(plain, need_of(plain), 0)
    need = need_of(facts)
    context = min(plain_pages, -(-facts.max_model_len // facts.page_size))
    num_pages, kv_bytes = _pages(facts, need, context)
    return Budget(
        need=need,
        free=facts.free,
        page_size=facts.page_size,
        num_pages=num_pages,
        plain_pages=plain_pages,
        kv_bytes=kv_bytes,
        mapped=_mapped(facts),
        is_shared=facts.gives_back and need.draft_kv_per_token > 0,
    )


def _pages(facts: MemoryFacts, need: Need, least: int) -> tuple[int, int]:
    """As many as are wanted, and `least` if nobody said how many and they fit; and their bytes."""
    least_bytes = facts.bytes_of(need, least)
    if facts.gives_back:
        least_bytes += least * facts.page_size * need.draft_kv_per_token
    left = facts.free - need.fixed
    wanted = facts.kv_bytes
    if wanted is None:
        wanted = max(min(int(facts.free * facts.kv_share), left), min(_LEAST_KV_BYTES, left))
        wanted = max(wanted, min(least_bytes, left))
    full = facts.max_num_seqs * -(-facts.max_model_len // facts.page_size)
    num_pages = max(0, min(facts.pages_in(need, wanted), full))
    return num_pages, max(wanted, 0)


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


def _position_bytes(shape: ModelShape, facts: MemoryFacts) -> int:
    """cos and sin of every position, for each kind of layer."""
    if shape.rope is None:
        return 0
    kinds = len(set(map(shape.view, range(shape.num_hidden_layers))))
    positions = min(facts.max_model_len, shape.max_position_embeddings)
    return 2 * kinds * positions * shape.rope.rotary_dim * facts.dtype_bytes


def show(count: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.1f} MiB"
