"""Which rotary positions a model has: the numbers of its config, checked; no tensors.

Sources: Su et al. 2021; linear, Chen et al. 2023 (arXiv 2306.15595); dynamic, the "NTK-aware"
scaling that Hugging Face names so; yarn, Peng et al. 2023 (arXiv 2309.00071); llama3, Dubey et al.
2024; longrope, Ding et al. 2024 (arXiv 2402.13753). Field names as in Hugging Face configs.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.shape.fields import (
    FULL,
    SLIDING,
    Config,
    numbers,
    positive,
    positive_or_none,
    refuse_unless,
    size,
)

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_NEEDS_FACTOR = ("linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeShape:
    """One kind of rotary positions; what its `rope_type` does not use keeps its default."""

    theta: float
    rotary_dim: int
    """Dimensions of a head that are turned, the first ones."""
    rope_type: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    """Context before scaling: dynamic, yarn, llama3, longrope."""
    attention_factor: float = 1.0
    """What cos and sin are multiplied by: yarn, longrope."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    turned_pairs: int | None = None
    """Pairs that are turned, the first ones, with frequencies of the whole head; None: all."""
    query_growth: float = 0.0
    """How much queries grow with each `original_positions` before them: Llama 4's scale."""

    @classmethod
    def read(cls, config: Config, rope: Config, *, head_dim: int, theta: float) -> Self:
        """The rope that `rope`, a part of `config`, describes.

        Args:
            config: the whole config.json.
            rope: its rope_scaling or rope_parameters, or the part for one type of layers.
            head_dim: of the model.
            theta: where `rope` does not say.

        Raises:
            UnsupportedModelError: a type that is not run.
            CheckpointError: a missing or wrong number.
        """
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
        kind = "longrope" if kind == "su" else kind
        if kind not in ROPE_TYPES:
            raise UnsupportedModelError("rope_type", kind, ", ".join(ROPE_TYPES))
        partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        share = positive({"partial_rotary_factor": partial}, "partial_rotary_factor", 1.0)
        rotary_dim = int(head_dim * share)
        if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            field = "head_dim" if share == 1 else "partial_rotary_factor"
            given = head_dim if share == 1 else share
            raise UnsupportedModelError(field, given, "an even number of turned dimensions")
        basic: dict[str, Any] = {
            "theta": positive(rope, "rope_theta", theta),
            "rotary_dim": rotary_dim,
            "rope_type": kind,
        }
        if kind in _NEEDS_FACTOR:
            basic["factor"] = positive(rope, "factor")
        return cls(**basic, **_special(kind, config, rope, rotary_dim))

    @property
    def counts_distances(self) -> bool:
        """Whether the angle between two tokens follows from their distance alone: frequencies are
        the same everywhere, those of longrope too, which are chosen once for all positions."""
        return self.rope_type != "dynamic" and not self.query_growth

    @property
    def unturned(self) -> Self:
        """Positions of layers that turn nothing."""
        return type(self)(theta=self.theta, rotary_dim=self.rotary_dim, rope_type="none")

    def context(self, max_position_embeddings: int) -> int:
        """Positions that the model was made to reach: dynamic and yarn scaling extend what
        config.json calls max_position_embeddings, the others are already part of it."""
        if self.rope_type not in ("dynamic", "yarn"):
            return max_position_embeddings
        return max(max_position_embeddings, int(self.original_positions * self.factor))


def _special(kind: str, config: Config, rope: Config, rotary_dim: int) -> dict[str, Any]:
    """The fields that only some types have."""
    positions = size(config, "max_position_embeddings")
    if kind == "dynamic":
        return {"original_positions": positions}
    if kind in ("yarn", "llama3", "longrope"):
        outer = config.get("original_max_position_embeddings")
        original = outer or rope.get("original_max_position_embeddings") or positions
        positions_of = {"original_max_position_embeddings": original}
        found = {"original_positions": size(positions_of, "original_max_position_embeddings")}
        special = {"yarn": _yarn, "llama3": _llama3, "longrope": _longrope}[kind]
        return {**found, **special(config, rope, rotary_dim, found["original_positions"])}
    return {}


def _yarn(config: Config, rope: Config, rotary_dim: int, original: int) -> dict[str, Any]:
    factor = positive(rope, "factor")
    attention_factor = positive_or_none(rope, "attention_factor")
    if attention_factor is None:
        mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        attention_factor = _mscale(factor, 1.0)
        if mscale and all_dim:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, all_dim)
    return {
        "attention_factor": attention_factor,
        "beta_fast": positive(rope, "beta_fast", 32.0),
        "beta_slow": positive(rope, "beta_slow", 1.0),
        "truncate": bool(rope.get("truncate", True)),
    }


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(config: Config, rope: Config, rotary_dim: int, original: int) -> dict[str, Any]:
    low, high = positive(rope, "low_freq_factor"), positive(rope, "high_freq_factor")
    if low >= high:
        raise CheckpointError("config.json low_freq_factor", low, f"below high_freq_factor, {high}")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _longrope(config: Config, rope: Config, rotary_dim: int, original: int) -> dict[str, Any]:
    attention_factor = positive_or_none(rope, "attention_factor")
    if attention_factor is None:
        ratio = size(config, "max_position_embeddings") / original
        factor = positive(rope, "factor", ratio)
        growth = 1 + math.log(factor) / math.log(original) if factor > 1 else 1.0
        attention_factor = math.sqrt(growth)
    return {
        "attention_factor": attention_factor,
        "short_factor": numbers(rope, "short_factor", rotary_dim // 2),
        "long_factor": numbers(rope, "long_factor", rotary_dim // 2),
    }


def one_rope(config: Config, *, theta: float | None = None, partly: bool = False) -> RopeShape:
    """Positions that are the same in all layers.

    Args:
        config: of the model; its `head_dim` is filled in.
        theta: where it does not say; None: 10,000.
        partly: whether part of a head may be turned alone.
    """
    rope = rope_of(config)
    if not partly:
        check_whole_heads(config, rope)
    usual = theta_of(config) if theta is None else positive(config, "rope_theta", theta)
    return RopeShape.read(config, rope, head_dim=config["head_dim"], theta=usual)


def two_ropes(config: Config, theta: float, local_theta: float) -> dict[str, Any]:
    """Positions of the layers that see all, and of those with a window."""
    ropes, head_dim = config.get("rope_parameters") or {}, config["head_dim"]
    wide = ropes.get(FULL) or config.get("rope_scaling") or {}
    local = ropes.get(SLIDING) or {}
    check_whole_heads(config, wide, local)
    return {
        "rope": RopeShape.read(config, wide, head_dim=head_dim, theta=theta),
        "local_rope": RopeShape.read(config, local, head_dim=head_dim, theta=local_theta),
    }


def check_whole_heads(*places: Config) -> None:
    """Raise UnsupportedModelError where only part of a head is turned."""
    for fields in places:
        refuse_unless(fields, {"partial_rotary_factor": (1.0, "1.0")})


def rope_of(config: Config) -> Config:
    """The fields of the positions, new names or old; empty: they are plain."""
    rope: Config = config.get("rope_scaling") or config.get("rope_parameters") or {}
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if nested or "mrope_section" in rope:
        given = nested or "mrope_section"
        raise UnsupportedModelError("rope_parameters", given, "one kind of positions for all")
    return rope


def theta_of(config: Config) -> float:
    """`rope_theta`, or the usual one."""
    return positive(config, "rope_theta", 10000.0)
