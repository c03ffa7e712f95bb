"""What is said where a configuration does not fit into memory: the arithmetic, and what would work.

Every setting that is named was tried with the formula first.
"""

from collections.abc import Iterator
from dataclasses import replace

from foretoken.config.memory import Budget, Drafting, MemoryFacts, plan_pages, shortage_of, show
from foretoken.config.quantization import QUANTIZATIONS
from foretoken.errors import ConfigError
from foretoken.shape.memory_formula import Packs

_SHORT_STEP = 512
"""Tokens of a step whose activations take little."""
_SHORT_CONTEXT = 4096
"""Tokens that memory is to have room for, else experts are mapped."""


def budget_of(facts: MemoryFacts) -> Budget:
    """The budget of this configuration; experts that are larger than the memory stay in a mapped
    file, if they may. Raises ConfigError: it cannot work; with the arithmetic, and what would."""
    budget = plan_pages(facts)
    field = shortage_of(facts, budget)
    if field is None:
        return budget
    mapping = replace(facts, maps=True)
    if facts.may_map and not _works(_least(facts)) and _works(mapping):
        return plan_pages(mapping)
    if field == "model" and _longest(facts):
        field = "max_model_len"
    others = [text for text, other in _alternatives(facts, budget) if _works(other)]
    allowed = f"{_arithmetic(facts, budget)}. What would work: "
    given = {
        "kv_cache_memory_bytes": facts.kv_bytes,
        "max_model_len": facts.max_model_len,
        "speculative_config": f"a context of {budget.num_tokens} tokens",
    }.get(field, "its weights")
    raise ConfigError(field, given, allowed + ("; ".join(others[:4]) or "a smaller model"))


def _works(facts: MemoryFacts) -> bool:
    return shortage_of(facts, plan_pages(facts)) is None


def _least(facts: MemoryFacts) -> MemoryFacts:
    """The target alone, in short steps, for a short context: what asks for more is refused, with
    what would work, before experts go to the disk for it."""
    short = _shorter(facts, min(_SHORT_CONTEXT, facts.max_model_len))
    step = min(_SHORT_STEP, facts.max_num_batched_tokens)
    return replace(short, drafting=Drafting(), max_num_batched_tokens=step, kv_bytes=None)


def _alternatives(facts: MemoryFacts, budget: Budget) -> Iterator[tuple[str, MemoryFacts]]:
    """What else could be asked for, the least change first."""
    fit = _longest(facts)
    if 0 < fit < facts.max_model_len:
        yield f"max_model_len={fit}", _shorter(facts, fit)
    page = facts.bytes_of(budget.need, 1)
    whole = facts.bytes_of(budget.need, -(-facts.max_model_len // facts.page_size))
    shortened = budget.num_pages and budget.lost_tokens
    for kv_bytes in (whole,) if facts.kv_bytes is None or shortened else (whole, page):
        yield f"kv_cache_memory_bytes={kv_bytes}", replace(facts, kv_bytes=kv_bytes)
    if facts.max_num_seqs > 1:
        for count in (facts.max_num_seqs // 2, 1):
            yield f"max_num_seqs={count}", replace(facts, max_num_seqs=count)
    if facts.max_num_batched_tokens > _SHORT_STEP:
        words = f"max_num_batched_tokens={_SHORT_STEP}"
        yield words, replace(facts, max_num_batched_tokens=_SHORT_STEP)
    plain = replace(facts, drafting=Drafting())
    for words, smaller in _smaller_drafts(facts):
        yield f"speculative_config{words}", replace(facts, drafting=smaller)
    if facts.drafting.has_weights:
        yield "no speculative_config", plain
    if facts.target.kv_cache_dtype == "auto":
        target = replace(facts.target, kv_cache_dtype="int8")
        yield 'kv_cache_dtype="int8"', replace(facts, target=target)
    if facts.packs is not Packs.NONE:
        for scheme in _fewer_bits(facts.target.quantization):
            target = replace(facts.target, quantization=scheme)
            yield f'quantization="{scheme}"', replace(facts, target=target)
            if facts.drafting.has_weights:
                words = f'quantization="{scheme}" and no speculative_config'
                yield words, replace(plain, target=target)


def _shorter(facts: MemoryFacts, max_model_len: int) -> MemoryFacts:
    return replace(facts, max_model_len=max_model_len, max_model_len_given=True)


def _longest(facts: MemoryFacts) -> int:
    """The longest context that works, all other settings the same; 0: none does."""
    works, fails = 0, facts.max_model_len
    while fails - works > 1:
        middle = (works + fails) // 2
        if _works(_shorter(facts, middle)):
            works = middle
        else:
            fails = middle
    return works


def _fewer_bits(quantization: str | None) -> tuple[str, ...]:
    """The schemes that keep weights in less, the widest first."""
    if quantization not in QUANTIZATIONS:
        return QUANTIZATIONS
    return QUANTIZATIONS[QUANTIZATIONS.index(quantization) + 1 :]


def _smaller_drafts(facts: MemoryFacts) -> Iterator[tuple[str, Drafting]]:
    """Ways to keep drafters in less, as keys of speculative_config."""
    drafting = facts.drafting
    if facts.packs is not Packs.NONE:
        rounded = {one.quantization for one in drafting.models}
        rounded |= {one.quantization for one in drafting.heads}
        fewer = {scheme for one in rounded for scheme in _fewer_bits(one)}
        for scheme in sorted(fewer, key=QUANTIZATIONS.index):
            models = tuple(replace(one, quantization=scheme) for one in drafting.models)
            heads = tuple(replace(one, quantization=scheme) for one in drafting.heads)
            yield f'["quantization"]="{scheme}"', replace(drafting, models=models, heads=heads)
    narrow = replace(
        drafting,
        models=tuple(replace(one, kv_cache_dtype="int8") for one in drafting.models),
        heads=tuple(
            one if one.kept is None else replace(one, kept=replace(one.kept, kv_cache_dtype="int8"))
            for one in drafting.heads
        ),
    )
    if narrow != drafting:
        yield '["kv_cache_dtype"]="int8"', narrow


def _arithmetic(facts: MemoryFacts, budget: Budget) -> str:
    need = budget.need
    page = facts.bytes_of(need, 1)
    each = page // facts.page_size
    parts = [f"weights {show(need.weights)}"]
    if need.draft_weights:
        parts.append(f"draft weights {show(need.draft_weights)}")
    parts.append(f"activations and workspace {show(need.activations + need.workspace)}")
    request = facts.bytes_of(need, -(-facts.max_model_len // facts.page_size))
    fit = f"{budget.num_tokens} tokens would fit"
    if budget.lost_tokens:
        fit += f" ({budget.plain_tokens} without speculation, which must not shorten the context)"
    return (
        f"{show(facts.free)} are free; {' + '.join(parts)} = {show(need.fixed)}, which leaves "
        f"{show(facts.free - need.fixed)} for keys and values at {each} bytes a token: "
        f"one page is {page} bytes, one request of max_model_len {facts.max_model_len} "
        f"{show(request)}, and {fit}"
    )
