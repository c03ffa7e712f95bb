"""GGUF files: their metadata as the config.json that Hugging Face would have. Torch-free.

Families are those whose record has a name in GGUF. Sizes come from the metadata, biases and tied
heads from which tensors there are.
"""

import functools
import math
from collections import Counter
from pathlib import Path
from typing import Any

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.shape.families import families
from foretoken.shape.gguf_ends import ends_of_text
from foretoken.shape.gguf_file import GgufTable, GgufTensor, read_gguf
from foretoken.shape.memory_formula import Held
from foretoken.shape.stored import FLOATS, StoredScheme

_SIZES = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}
_REALS = ("rms_norm_eps", "rope_theta")
_MATRICES = ("token_embd.weight", "output.weight")
_HELD = {
    "Q8_0": Held(1.0, 8, 32),
    "Q4_0": Held(1.0, 4, 32),
    "Q4_1": Held(1.0, 4, 32, True, 4),
    "Q4_K": Held(1.0, 4, 32, True, 4),
}
"""What kernels make of ggml's types; all others are multiplied out (quant/formats/gguf_blocks)."""
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def open_gguf(path: Path) -> GgufTable:
    """The table of a file; tensors are mapped, not read.

    Raises:
        CheckpointError: no GGUF file, or one that is broken, cut short or split.
    """
    try:
        table = _open(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise CheckpointError(path.name, str(path), f"a complete GGUF file ({error})") from error
    if table.get("split.count", int, 1) > 1:
        allowed = "one file: join the parts with llama-gguf-split --merge"
        raise CheckpointError("weights", path.name, allowed)
    return table


def forget_gguf() -> None:
    """Let go of files."""
    _open.cache_clear()


@functools.lru_cache(maxsize=2)
def _open(path: Path, changed: int) -> GgufTable:
    return read_gguf(path)


def gguf_config(path: Path) -> dict[str, Any]:
    """What config.json would say of the model in this file.

    Raises:
        UnsupportedModelError: another architecture, or positions that are not recognized.
        CheckpointError: metadata are missing.
    """
    table = open_gguf(path)
    family = table.get("general.architecture", str)
    known = {one.gguf: one.model_type for one in reversed(families()) if one.gguf is not None}
    if family not in known:
        allowed = f"{', '.join(reversed(known))} in GGUF, or the safetensors of this model"
        raise UnsupportedModelError("general.architecture", family, allowed)
    if table.get(f"{family}.expert_count", int, 0):
        raise UnsupportedModelError("expert_count", family, "no mixture of experts")
    found = {
        name: table.get(f"{family}.{key}", float if name in _REALS else int)
        for name, key in _SIZES.items()
    }
    tensors = table.tensors
    if "token_embd.weight" not in tensors:
        raise CheckpointError("missing tensor", "token_embd.weight", "a language model's tensors")
    for name, tensor in tensors.items():
        if len(tensor.shape) > 2 or (len(tensor.shape) == 1 and name in _MATRICES):
            raise CheckpointError(name, f"shape {list(tensor.shape)}", "a matrix")
    window = found.pop("sliding_window")
    return {
        **{name: value for name, value in found.items() if value is not None},
        "model_type": "mistral" if family == "llama" and window else known[family],
        "sliding_window": window,
        "vocab_size": tensors["token_embd.weight"].shape[1],
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": list(ends_of_text(table)),
        "torch_dtype": "bfloat16",
        "rope_scaling": _rope(table, family, tensors.get("rope_freqs.weight"), found),
    }


def gguf_scheme(path: Path) -> StoredScheme:
    """The types of the file's matrices, the most frequent first, and what kernels make of them."""
    tensors = [one for one in open_gguf(path).tensors.values() if len(one.shape) > 1]
    kinds = Counter(tensor.kind for tensor in tensors)
    numbers, top = Counter[Held](), {tensor.name: tensor.kind for tensor in tensors}
    for tensor in tensors:
        if tensor.name.startswith("blk."):
            numbers[_HELD.get(tensor.kind, FLOATS)] += tensor.num_elements
    head = top.get("output.weight", top.get("token_embd.weight", ""))
    return StoredScheme(
        method="gguf",
        weights=", ".join(name for name, _ in kinds.most_common()),
        held=tuple(one._replace(share=n / numbers.total()) for one, n in numbers.items()),
        head=_HELD.get(head, FLOATS),
    )


def _rope(
    table: GgufTable, family: str, freqs: GgufTensor | None, sizes: dict[str, Any]
) -> dict[str, Any] | None:
    """The rope_scaling; Llama 3's is stored as what each frequency is divided by."""
    kind = table.get(f"{family}.rope.scaling.type", str, "none")
    if kind == "linear":
        factor = table.get(f"{family}.rope.scaling.factor", float, 1.0)
        return {"rope_type": "linear", "factor": factor}
    if kind != "none":
        raise UnsupportedModelError("rope.scaling.type", kind, "none, linear, or Llama 3's")
    if freqs is None:
        return None
    if len(freqs.shape) != 1 or freqs.kind != "F32":
        given = f"{freqs.kind}, shape {list(freqs.shape)}"
        raise CheckpointError(freqs.name, given, "a list of numbers in F32")
    stored = [float(one) for one in freqs.data]
    if not all(math.isfinite(one) and one > 0 for one in stored):
        raise CheckpointError(freqs.name, stored[:3], "numbers above 0")
    rope = {**_LLAMA3, "factor": round(max(stored), 3)}
    wanted = _llama3_divisors(rope, float(sizes["rope_theta"] or 1e4), len(stored))
    if any(abs(a - b) > 1e-3 * b for a, b in zip(stored, wanted, strict=True)):
        raise UnsupportedModelError("rope_freqs.weight", stored[-3:], "Llama 3's factors")
    return rope


def _llama3_divisors(rope: dict[str, Any], theta: float, count: int) -> list[float]:
    """What Llama 3 divides each frequency by (Dubey et al. 2024)."""
    found, factor = [], float(rope["factor"])
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(count):
        turns = rope["original_max_position_embeddings"] * theta ** (-i / count) / 6.283185307179586
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1.0 / ((1.0 - share) / factor + share))
    return found
