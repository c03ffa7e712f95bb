"""Rotary positions of a GGUF file as the `rope_scaling` of a config.json. Torch-free.

Scalings are named in the metadata, but for two whose factors are tensors: Llama 3's, one divisor
of each frequency, and Phi 3's, one list for short contexts and one for long ones.
"""

import math
from collections.abc import Mapping
from typing import Any

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.shape.gguf_file import GgufTable

_FREQS, _SHORT, _LONG = (
    f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")
)
POSITION_TENSORS = (_FREQS, _SHORT, _LONG)
"""Read here; no weights."""
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale_all_dim": "yarn_log_multiplier",
}


def rope_scaling(table: GgufTable, arch: str, theta: float | None) -> dict[str, Any] | None:
    """What rope_scaling would say of this file; None: positions are plain.

    Args:
        table: of the file.
        arch: what the names of its metadata begin with.
        theta: base of the frequencies; None: the usual one.

    Raises:
        UnsupportedModelError: positions of another kind.
        CheckpointError: numbers that cannot be.
    """
    name = f"{arch}.rope.scaling"
    kind = table.get(f"{name}.type", str, "none")
    factor = table.get(f"{name}.factor", float, 1.0)
    original = table.get(f"{name}.original_context_length", int)
    if _LONG in table.tensors or _SHORT in table.tensors:
        return _longrope(table, name, original)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        found = {key: table.get(f"{name}.{stored}", float) for key, stored in _YARN.items()}
        found |= {"factor": factor, "original_max_position_embeddings": original}
        if found["mscale_all_dim"]:
            found["mscale"] = 1.0
        return {"rope_type": "yarn"} | {key: one for key, one in found.items() if one is not None}
    if kind != "none":
        allowed = "none, linear, yarn, longrope with its factors, or Llama 3's"
        raise UnsupportedModelError("rope.scaling.type", kind, allowed)
    return _llama3(table, theta or 1e4) if _FREQS in table.tensors else None


def _longrope(table: GgufTable, name: str, original: int | None) -> dict[str, Any]:
    """Phi 3's; which list is taken is up to the engine, once for all sequences."""
    found = {
        "rope_type": "longrope",
        "short_factor": _positive(table, _SHORT),
        "long_factor": _positive(table, _LONG),
        "attention_factor": table.get(f"{name}.attn_factor", float),
        "original_max_position_embeddings": original,
    }
    return {key: one for key, one in found.items() if one is not None}


def _positive(table: GgufTable, name: str) -> list[float]:
    """A tensor of numbers above 0."""
    tensor = table.tensors.get(name)
    if tensor is None:
        raise CheckpointError("missing tensor", name, f"both {_SHORT} and {_LONG}")
    if len(tensor.shape) != 1 or tensor.kind != "F32":
        given = f"{tensor.kind}, shape {list(tensor.shape)}"
        raise CheckpointError(name, given, "a list of numbers in F32")
    stored = [float(one) for one in tensor.data]
    if not all(math.isfinite(one) and one > 0 for one in stored):
        raise CheckpointError(name, stored[:3], "numbers above 0")
    return stored


def share_turned(table: GgufTable, usual: float) -> float:
    """Share of a head's pairs that are turned: those whose frequency is divided by 1, where all
    others are divided by so much that they stay; `usual` where the file does not say.

    Raises:
        UnsupportedModelError: other divisors.
    """
    if _FREQS not in table.tensors:
        return usual
    stored = _positive(table, _FREQS)
    turned = sum(one == 1.0 for one in stored)
    if stored[:turned] != [1.0] * turned or any(one < 1e20 for one in stored[turned:]):
        raise UnsupportedModelError(_FREQS, stored[-3:], "1, then numbers without an end")
    # A little more, since readers multiply by the size and drop what is behind the point.
    return (turned + 0.1) / len(stored)


def _llama3(table: GgufTable, theta: float) -> dict[str, Any] | None:
    """Llama 3's numbers from what they make of each frequency; None: they change none."""
    stored = _positive(table, _FREQS)
    if all(one == 1.0 for one in stored):
        return None
    rope = {**_LLAMA3, "factor": round(max(stored), 3)}
    wanted = _llama3_divisors(rope, theta, len(stored))
    if any(abs(a - b) > 1e-3 * b for a, b in zip(stored, wanted, strict=True)):
        raise UnsupportedModelError(_FREQS, stored[-3:], "Llama 3's factors")
    return rope


def _llama3_divisors(rope: Mapping[str, Any], theta: float, count: int) -> list[float]:
    """What Llama 3 divides each frequency by (Dubey et al. 2024)."""
    found, factor = [], float(rope["factor"])
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(count):
        turns = rope["original_max_position_embeddings"] * theta ** (-i / count) / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1.0 / ((1.0 - share) / factor + share))
    return found
