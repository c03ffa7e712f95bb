"""What one model or head keeps in memory, as it is asked to be kept.

By the formula of `shape.memory`. Knows nothing of engines or budgets. Sizes in bytes.
"""

from dataclasses import dataclass, replace

from foretoken.config.quantization import QUANTIZATIONS
from foretoken.shape import ModelShape
from foretoken.shape.memory import (
    KeptNumbers,
    Packs,
    WeightCounts,
    engine_storage,
    held_storage,
    weight_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """One model and how it is kept."""

    shape: ModelShape
    quantization: str | None = None
    """As the user set it; what is not a name of QUANTIZATIONS leaves floats as they are."""
    kv_cache_dtype: str = "auto"

    @property
    def uses_transformers(self) -> bool:
        """Whether it, or its tokenizer, is run by that library."""
        stored = self.shape.stored
        return not self.shape.is_own or (stored is not None and stored.method == "gguf")

    def kv_per_token(self, dtype_bytes: int) -> int:
        """Of a token's keys and values."""
        return self.shape.kv_bytes_per_token(dtype_bytes, self.kv_cache_dtype)

    def weight_bytes(self, dtype_bytes: int, *, packs: Packs = Packs.ALL) -> int:
        """Of all weights.

        Args:
            dtype_bytes: of the model's type.
            packs: what kernels pack. Floats that are not, in a head that shares the embedding's,
                are the same memory.
        """
        asked = self.quantization if self.quantization in QUANTIZATIONS else None
        shape, counts, stored = self.shape, self.shape.weight_counts(), self.shape.stored
        shared = shape.tie_word_embeddings and asked is None
        if packs is not Packs.ALL and shared and (stored is None or not stored.head.bits):
            counts = counts._replace(head=0)
        if packs is Packs.NONE:
            return int(weight_bytes(counts, engine_storage(dtype_bytes, None)))
        if stored is None:
            return int(weight_bytes(counts, engine_storage(dtype_bytes, asked)))
        return int(weight_bytes(counts, held_storage(stored.held, stored.head, dtype_bytes, asked)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMemory:
    """A head network and how it is kept."""

    counts: WeightCounts
    """Of its own weights."""
    quantization: str | None = None
    """A name of QUANTIZATIONS, or None."""
    kept: KeptNumbers | None = None
    """Its keys and values of a token, if it has any."""

    def with_int8_keys(self) -> "HeadMemory":
        """The same with its keys and values rounded."""
        kept = None if self.kept is None else replace(self.kept, kv_cache_dtype="int8")
        return replace(self, kept=kept)

    def kv_per_token(self, dtype_bytes: int) -> int:
        """Of a token's keys and values."""
        return 0 if self.kept is None else self.kept.bytes(dtype_bytes)

    def weight_bytes(self, dtype_bytes: int, *, packs: Packs = Packs.ALL) -> int:
        """Of all weights; see `ModelMemory`."""
        rounded = None if packs is Packs.NONE else self.quantization
        return int(weight_bytes(self.counts, engine_storage(dtype_bytes, rounded)))
