"""Fields of a config.json, checked one by one. Knows types and bounds, not what fields mean."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from foretoken.errors import CheckpointError, UnsupportedModelError

Config = Mapping[str, Any]
LARGEST_SIZE = 1 << 31
"""Above every size of a model; below what would be worked on for hours."""
MOST_LAYERS = 10_000
DTYPES = ("float32", "bfloat16", "float16")
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`. Raises CheckpointError: it cannot be read, is no JSON, or no object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(file.name, str(file), f"valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(file.name, content, "a JSON object")
    return content


def size(config: Config, name: str, default: int | None = None, *, most: int = LARGEST_SIZE) -> int:
    """A positive integer field, `most` at most; `default` where it is absent or null."""
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise CheckpointError(f"config.json {name}", value, f"a positive integer up to {most}")
    return value


def layer_count(config: Config) -> int:
    """`num_hidden_layers`; there are lists with one entry each."""
    return size(config, "num_hidden_layers", most=MOST_LAYERS)


def positive(config: Config, name: str, default: float | None = None) -> float:
    """A positive number; `default` where it is absent or null."""
    found = positive_or_none(config, name)
    if found is None:
        found = default
    if found is None:
        raise CheckpointError(f"config.json {name}", None, "a positive number")
    return found


def positive_or_none(config: Config, name: str) -> float | None:
    """A positive number, or None where it is absent or null."""
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json {name}", value, "a positive number")
    return float(value)


def numbers(config: Config, name: str, count: int) -> tuple[float, ...]:
    """A list of `count` numbers."""
    values = config.get(name)
    right = isinstance(values, list) and len(values) == count
    if not right or not all(isinstance(value, int | float) for value in values or ()):
        raise CheckpointError(f"config.json {name}", values, f"a list of {count} numbers")
    return tuple(float(value) for value in values or ())


def dtype_name(config: Config, stored: Callable[[], str | None]) -> str:
    """The type that the weights are stored in; `stored`: that of the files, where nothing is
    said."""
    name = config.get("dtype") or config.get("torch_dtype") or stored() or "float32"
    if name not in DTYPES:
        raise UnsupportedModelError("dtype", name, ", ".join(DTYPES))
    return str(name)


def eos_ids(config: Config) -> set[int]:
    """End-of-sequence ids: none, one or several."""
    ids = config.get("eos_token_id")
    if ids is None:
        return set()
    return set(ids) if isinstance(ids, list) else {ids}


def refuse_unless(config: Config, neutral: Mapping[str, tuple[object, str]]) -> None:
    """Refuse by name what would otherwise be run wrongly.

    Args:
        config: the fields.
        neutral: field -> the only value that is run (absent and null are fine), and in words
            what is allowed.
    """
    for name, (only, allowed) in neutral.items():
        given = config.get(name)
        if given is not None and given != only:
            raise UnsupportedModelError(name, given, allowed)


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
