"""Windows and positions of a model's layers, as config.json says them in several ways.

Shared by the readers of all families.
"""

from typing import Any, Final

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.shape.fields import Config, layer_count, positive, refuse_unless, size
from foretoken.shape.rope_config import RopeShape

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


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


def windows_by_type(
    config: Config, layer_types: list[str], window: int | None
) -> tuple[int | None, ...]:
    """The window of each layer, by what kind it is."""
    check_layer_types({"layer_types": layer_types}, {FULL, SLIDING})
    if len(layer_types) != layer_count(config):
        raise CheckpointError("config.json layer_types", layer_types, "one per layer")
    if window is None and SLIDING in layer_types:
        raise CheckpointError("config.json sliding_window", None, f"a number: some are {SLIDING}")
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def check_layer_types(config: Config, allowed: set[str]) -> None:
    """Raise UnsupportedModelError for a kind of layers that is not among these."""
    found = set(config.get("layer_types") or ())
    if found - allowed:
        raise UnsupportedModelError("layer_types", sorted(found), " and ".join(sorted(allowed)))


def everywhere(config: Config, window: int | None) -> tuple[int | None, ...]:
    """The same window in every layer."""
    return (window,) * layer_count(config)


def window_of(config: Config) -> int | None:
    """`sliding_window`; None: there is none."""
    given = config.get("sliding_window")
    return None if given is None else size(config, "sliding_window")


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
