"""GGUF files: their metadata as the config.json that Hugging Face would have. Torch-free.

Read through the `gguf` package, which is an optional extra. Families are those whose record has a
name in GGUF. Sizes come from the metadata, biases and tied heads from which tensors there are.
"""

import functools
from collections import Counter
from pathlib import Path
from typing import Any

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.extras import OptionalPackages
from foretoken.shape.families import families
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


def open_gguf(path: Path) -> Any:
    """The `gguf` package's reader of a file; tensors are mapped, not read.

    Raises:
        MissingPackageError: the extra `gguf` is not installed.
        CheckpointError: no GGUF file, or one that is cut short or split.
    """
    reader = _open(path, path.stat().st_mtime_ns)
    if _value(reader, "split.count", 1) > 1:
        allowed = "one file: join the parts with llama-gguf-split --merge"
        raise CheckpointError("weights", path.name, allowed)
    return reader


def forget_gguf() -> None:
    """Drop what was read of files: the names of a large vocabulary take some 100 MB."""
    _open.cache_clear()


@functools.lru_cache(maxsize=2)
def _open(path: Path, changed: int) -> Any:
    with OptionalPackages(f"{path}, a GGUF file,"):
        import gguf
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise CheckpointError(path.name, str(path), f"a complete GGUF file ({error})") from error


def gguf_config(path: Path) -> dict[str, Any]:
    """What config.json would say of the model in this file.

    Raises:
        UnsupportedModelError: another architecture, or positions that are not recognized.
        CheckpointError: metadata are missing.
    """
    reader = open_gguf(path)
    family = _value(reader, "general.architecture", None)
    known = {one.gguf: one.model_type for one in reversed(families()) if one.gguf is not None}
    if family not in known:
        allowed = f"{', '.join(reversed(known))} in GGUF, or the safetensors of this model"
        raise UnsupportedModelError("general.architecture", family, allowed)
    if _value(reader, f"{family}.expert_count", 0):
        raise UnsupportedModelError("expert_count", family, "no mixture of experts")
    found = {name: _value(reader, f"{family}.{key}", None) for name, key in _SIZES.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise CheckpointError("missing tensor", "token_embd.weight", "a language model's tensors")
    window = found.pop("sliding_window")
    eos = [_value(reader, f"tokenizer.ggml.{key}_token_id", None) for key in ("eos", "eot")]
    return {
        **{name: value for name, value in found.items() if value is not None},
        "model_type": "mistral" if family == "llama" and window else known[family],
        "sliding_window": window,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": sorted({one for one in eos if one is not None}),
        "torch_dtype": "bfloat16",
        "rope_scaling": _rope(reader, family, tensors.get("rope_freqs.weight"), found),
    }


def gguf_scheme(path: Path) -> StoredScheme:
    """The types of the file's matrices, the most frequent first, and what kernels make of them."""
    tensors = [tensor for tensor in open_gguf(path).tensors if len(tensor.shape) > 1]
    kinds = Counter(tensor.tensor_type.name for tensor in tensors)
    numbers, top = Counter[Held](), {tensor.name: tensor.tensor_type.name for tensor in tensors}
    for tensor in tensors:
        if tensor.name.startswith("blk."):
            numbers[_HELD.get(tensor.tensor_type.name, FLOATS)] += int(tensor.n_elements)
    head = top.get("output.weight", top.get("token_embd.weight", ""))
    return StoredScheme(
        method="gguf",
        weights=", ".join(name for name, _ in kinds.most_common()),
        held=tuple(one._replace(share=n / numbers.total()) for one, n in numbers.items()),
        head=_HELD.get(head, FLOATS),
    )


def _value(reader: Any, name: str, default: Any) -> Any:
    field = reader.get_field(name)
    return default if field is None else field.contents()


def _rope(reader: Any, family: str, freqs: Any, sizes: dict[str, Any]) -> dict[str, Any] | None:
    """The rope_scaling; Llama 3's is stored as what each frequency is divided by."""
    kind = _value(reader, f"{family}.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": _value(reader, f"{family}.rope.scaling.factor", 1)}
    if kind != "none":
        raise UnsupportedModelError("rope.scaling.type", kind, "none, linear, or Llama 3's")
    if freqs is None:
        return None
    stored = [float(one) for one in freqs.data]
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
