"""The formula of memory: what a model and its drafter keep, in bytes, from counts alone.

Used by the engine (to size its pages and to refuse), by its log, by `foretoken info` and by the
planner, so that no two of them disagree. Knows neither files nor machines; docs/running.md explains
every term. Nothing here is measured; `benchmarks/memory.py` compares it with a process.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class WeightCounts(NamedTuple):
    """How many numbers a model holds, by how they are stored."""

    table: int
    """Numbers of the embedding."""
    head: int
    """Numbers of the output head's own copy, also of a tied one if it is rounded, or shared."""
    matrices: int
    """Numbers of the layers' linear maps, which is what quantization rounds."""
    rest: int
    """Norms and biases."""
    outputs: int = 0
    """Rows of the matrices; each has a scale under int8."""
    head_outputs: int = 0


class Packs(Enum):
    """What the layers make of matrices when they are loaded."""

    ALL = "all"
    """Kernels pack everything, and read a tied embedding's rows from the packed head."""
    INTEGERS = "integers"
    """Integers stay integers, floats are left where they are."""
    NONE = "none"
    """Integers are multiplied out."""


class Storage(NamedTuple):
    """Bytes that one number takes, by what it belongs to."""

    table: float
    head: float
    matrix: float
    rest: float
    per_output: float = 0.0
    """Bytes per row of a matrix beside its numbers: a scale."""
    per_head_output: float = 0.0


SCALE_BYTES, GROUP_NUMBER_BYTES = 4, 2
"""Bytes of the float32 scale of an output, and of the float16 scale or zero point of a group."""


def engine_storage(dtype_bytes: int, quantization: str | None) -> Storage:
    """How the engine's own layers store weights.

    Args:
        dtype_bytes: of the model's type.
        quantization: None, `int8` (a float32 scale per output) or `int4` (a float16 one per 32
            inputs; the head is int8 then).
    """
    if quantization is None:
        return Storage(dtype_bytes, dtype_bytes, dtype_bytes, dtype_bytes)
    scale = SCALE_BYTES
    if quantization == "int8":
        return Storage(dtype_bytes, 1.0, 1.0, dtype_bytes, per_output=scale, per_head_output=scale)
    assert quantization == "int4", quantization
    matrix = 0.5 + GROUP_NUMBER_BYTES / 32
    return Storage(dtype_bytes, 1.0, matrix, dtype_bytes, per_head_output=scale)


class Held(NamedTuple):
    """How the layers keep some of the matrices of a checkpoint that was quantized before."""

    share: float
    """Share of all numbers in matrices."""
    bits: int
    """4 or 8; 0: multiplied out, so that they are floats."""
    group: int = 0
    """Inputs that share a scale; 0: all of them."""
    asymmetric: bool = False
    """Whether a group has a zero point."""
    number_bytes: int = GROUP_NUMBER_BYTES
    """Of a group's scale or zero point; 4 where float16 does not hold them."""
    bytes_each: float = 0.0
    """Of a number with its share of everything, where blocks of a file are kept as they are."""


def held_storage(
    held: Iterable[Held], head: Held, table: Held, dtype_bytes: int, quantization: str | None
) -> Storage:
    """How a checkpoint that was quantized before is stored: its integers stay what they are.

    Args:
        held: the matrices of its layers; the shares add up to 1.
        head: its output head.
        table: its embedding.
        dtype_bytes: of the model's type.
        quantization: what is done to its floats.
    """
    floats = engine_storage(dtype_bytes, quantization)
    matrix = per_output = 0.0
    for one in held:
        each, scale = _number_bytes(one) if one.bits else (floats.matrix, floats.per_output)
        matrix += one.share * each
        per_output += one.share * scale
    if head.bits:
        each, scale = _number_bytes(head)
        floats = floats._replace(head=each, per_head_output=scale)
    if table.bits:
        floats = floats._replace(table=_number_bytes(table)[0])
    return floats._replace(matrix=matrix, per_output=per_output)


def _number_bytes(held: Held) -> tuple[float, float]:
    """Bytes of an integer with its share of the group's numbers, and of the scale of an output."""
    if held.bytes_each:
        return held.bytes_each, 0.0
    numbers = 2 if held.asymmetric else 1
    if held.group:
        return held.bits / 8 + numbers * held.number_bytes / held.group, 0.0
    return held.bits / 8, numbers * SCALE_BYTES


def weight_bytes(counts: WeightCounts, storage: Storage) -> float:
    """Bytes of all weights; padding to whole panels of 16 outputs is not counted."""
    return (
        counts.table * storage.table
        + counts.head * storage.head
        + counts.matrices * storage.matrix
        + counts.rest * storage.rest
        + counts.outputs * storage.per_output
        + counts.head_outputs * storage.per_head_output
    )


def shares_heads(key_heads: int, query_heads: int, ranks: int) -> bool:
    """Whether so many processes can share layers: each has key heads of its own, or equally many
    have the same one, and query heads of it."""
    return ranks <= key_heads or (ranks % key_heads == 0 and ranks <= query_heads)


def copies_of(key_heads: int, ranks: int) -> int:
    """Processes of so many that have the same key head: 1, unless there are fewer key heads, which
    divide the processes then."""
    copies = max(1, ranks // key_heads)
    assert copies == 1 or copies * key_heads == ranks, (key_heads, ranks)
    return copies


def uneven_parts(ranks: int, key_heads: int, query_heads: int, **widths: int) -> list[str]:
    """What so many GPUs cannot share in parts of one size, with its number.

    Args:
        ranks: the GPUs.
        key_heads: of the model; where there are fewer than ranks, query heads are what is shared.
        query_heads: of the model.
        widths: its other sizes, by their names.
    """
    heads = {"key_heads": key_heads} if ranks <= key_heads else {"query_heads": query_heads}
    counts = (heads | widths).items()
    return [f"{name.replace('_', ' ')} {count}" for name, count in counts if count % ranks]


KV_SCALE_BYTES = 4
"""Bytes of the float32 behind each head of int8 keys and values."""


def kv_element_bytes(dtype_bytes: float, kv_cache_dtype: str, head_dim: int) -> float:
    """Bytes of a number of keys and values, its share of the head's scale included.

    Args:
        dtype_bytes: of the model's type.
        kv_cache_dtype: `auto`, the model's type, or `int8`.
        head_dim: numbers that share a scale.
    """
    return 1 + KV_SCALE_BYTES / head_dim if kv_cache_dtype == "int8" else dtype_bytes


def kv_token_bytes(elements: float, element_bytes: float) -> float:
    """Bytes of the keys and values of one token.

    Args:
        elements: numbers over all layers, keys and values.
        element_bytes: of each.
    """
    return elements * element_bytes


@dataclass(frozen=True, slots=True)
class KVPerToken:
    """Keys and values that a network keeps for a token."""

    numbers: int
    head_dim: int
    kv_cache_dtype: str

    def bytes(self, dtype_bytes: int) -> int:
        """What they take."""
        each = kv_element_bytes(dtype_bytes, self.kv_cache_dtype, self.head_dim)
        return round(kv_token_bytes(self.numbers, each))


class StepSize(NamedTuple):
    """The largest step that may run."""

    tokens: int
    rows: int
    """Rows of logits."""
    drafts: int = 0
    """Draft tokens whose distributions may be kept."""


class Widths(NamedTuple):
    """How wide a model's activations are, in numbers per token."""

    hidden: int
    query: int
    kv: int
    inner: int
    vocabulary: int
    mixed: int = 0
    """Of the results of a row's experts."""


RUNTIME_BYTES = 32 << 20
"""Bytes of libraries that load late, the tokenizer, thread stacks: measured on Linux."""
RANK_BYTES = 192 << 20
"""Bytes of a further process that shares a model: Python and PyTorch, of which 150 MiB are its own
(measured on Linux), and buffers of what is exchanged."""
LATE_BYTES = 100 << 20
"""Bytes of transformers once it runs a model, or of a tokenizer built from a GGUF file (66 MiB of
Qwen's 151,936 tokens, 144 MiB of Gemma's 262,144)."""
SCRATCH = 1.25
"""Kernels' buffers grow by a quarter more than was asked."""
LOGIT_COPIES = 3
"""float32 rows of logits that are there at once: as computed, edited, and divided or drawn from."""


GPU_BYTES = 384 << 20
"""Bytes of compiled kernels, captured graphs and libraries' workspaces on a GPU beside its context:
an assumption (docs/gpu.md)."""
PARTIAL_BYTES = 192 << 20
"""Bytes of attention's partial results on a GPU; a step with more of them is run in pieces."""
RECORDED_ROWS = 384
"""Rows of the largest step that is recorded on a GPU, which has memory of its own."""
_SEGMENTS = 4
"""Of a large matrix: what ranks exchange is a sum of each (docs/gpu.md)."""


def gpu_activation_bytes(step: StepSize, widths: Widths, item_bytes: int, ranks: int = 1) -> int:
    """The same of a GPU: what lies between kernels, once for recorded steps and once for longer
    ones; sums are there as float32, and those that ranks exchange twice."""
    layer = 3 * widths.hidden + 2 * widths.query + widths.inner
    sums = 4 * max(widths.hidden, widths.query + 2 * widths.kv, widths.mixed)
    if ranks > 1:
        sums += 4 * widths.hidden * (2 * max(_SEGMENTS, ranks) + 1) // ranks
    logits = 4 * widths.vocabulary * (LOGIT_COPIES * step.rows + step.drafts)
    return (RECORDED_ROWS + step.tokens) * (layer * item_bytes + sums) + PARTIAL_BYTES + logits


def activation_bytes(step: StepSize, widths: Widths, item_bytes: int) -> int:
    """Activations of the largest step: one layer's between its matrices, and rows of logits."""
    layer = 4 * widths.hidden + 2 * widths.query + 2 * widths.kv + 3 * widths.inner
    logits = 4 * widths.vocabulary * (LOGIT_COPIES * step.rows + step.drafts)
    return int(SCRATCH * step.tokens * layer * item_bytes) + logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a configuration keeps beside its pages, and what a token on those pages takes."""

    weights: int
    draft_weights: int = 0
    activations: int = 0
    workspace: int = 0
    """Tables of positions, the page books, buffers of kernels."""
    kv_per_token: int
    """Bytes of the target's keys and values."""
    draft_kv_per_token: int = 0
    """Bytes of those of draft models and heads, and of the features that heads read."""
    window: int | None = None
    """Positions that layers with a window see, which let go of what lies before; None: no layer
    does."""
    window_kv_per_token: int = 0
    """Of `kv_per_token`, what those layers keep."""
    window_tokens: int = 0
    """Tokens of a sequence that they keep at most at once."""
    lookahead: int = 0
    """Slots that a running sequence may hold beyond its tokens."""
    max_num_seqs: int = 1

    @property
    def fixed(self) -> int:
        """Everything but pages."""
        return self.weights + self.draft_weights + self.activations + self.workspace

    @property
    def per_token(self) -> int:
        """Bytes of a slot, target and drafters together."""
        return self.kv_per_token + self.draft_kv_per_token

    def kept(self, tokens: int, sequences: int = 1) -> int:
        """Bytes of the target's keys and values of so many tokens in all, in so many sequences."""
        in_window = min(tokens, sequences * self.window_tokens) * self.window_kv_per_token
        return tokens * (self.kv_per_token - self.window_kv_per_token) + in_window

    @property
    def lookahead_tokens(self) -> int:
        """Slots held beyond tokens when all sequences run."""
        return self.lookahead * self.max_num_seqs

    @property
    def drafts(self) -> bool:
        """Whether speculation takes any memory."""
        return bool(self.draft_weights or self.draft_kv_per_token or self.lookahead)


def tokens_that_fit(kv_bytes: float, per_token: float) -> int:
    """Tokens whose keys and values fit, at least 0."""
    return max(0, int(kv_bytes // per_token))


def most_pages(window: int, step_tokens: int, page_size: int) -> int:
    """Pages that the rows of a step can see or write in a layer with a window, of one sequence."""
    return (window + step_tokens - 2) // page_size + 2
