"""The shape of a model, read from its config.json, and the arithmetic that follows from it.

Plain data and formulas, no torch: what the engine, `foretoken info` and the lab agree on. A
feature that Foretoken does not run is an error here, before any weight is read.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from foretoken.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

MODEL_TYPES = ("llama", "qwen3")
DTYPES = ("float32", "bfloat16", "float16")
_DEFAULT_HEAD_DIM = {"qwen3": 128}
"""Where config.json does not say and it is not hidden_size / num_attention_heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a dense decoder; field names as in Hugging Face configs."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    dtype: str
    """Of the checkpoint: `float32`, `bfloat16` or `float16`."""
    eos_token_ids: tuple[int, ...]
    """Of config.json and generation_config.json."""

    @classmethod
    def from_config(cls, folder: Path) -> Self:
        """Read `folder`/config.json.

        Raises:
            ModelNotFoundError: there is no config.json.
            CheckpointError: it is no valid JSON, or a field is missing or of the wrong type.
            UnsupportedModelError: a model type or feature that is not run.
        """
        file = folder / "config.json"
        if not file.is_file():
            raise ModelNotFoundError("model", str(folder), "a folder with a config.json")
        config = _read_json(file)
        _check_supported(config)
        generation = folder / "generation_config.json"
        more = _read_json(generation) if generation.is_file() else {}
        shape = cls._of(config, sorted(_eos_ids(config) | _eos_ids(more)))
        if shape.num_attention_heads % shape.num_key_value_heads:
            allowed = f"a divisor of num_attention_heads, {shape.num_attention_heads}"
            given = shape.num_key_value_heads
            raise CheckpointError("config.json num_key_value_heads", given, allowed)
        if shape.head_dim % 2:
            raise UnsupportedModelError("head_dim", shape.head_dim, "an even number")
        return shape

    @classmethod
    def _of(cls, config: Mapping[str, Any], eos_token_ids: Iterable[int]) -> Self:
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        head_dim = _DEFAULT_HEAD_DIM.get(config["model_type"], hidden // heads)
        rope = config.get("rope_parameters") or {}
        theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        return cls(
            model_type=config["model_type"],
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size"),
            num_hidden_layers=_size(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=_size(config, "num_key_value_heads", heads),
            head_dim=_size(config, "head_dim", head_dim),
            max_position_embeddings=_size(config, "max_position_embeddings"),
            rms_norm_eps=_positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            rope_theta=_positive(theta, "rope_theta"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            dtype=_dtype_name(config),
            eos_token_ids=tuple(eos_token_ids),
        )

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    def layer_parameters(self) -> int:
        """Weights of one layer, norms included."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.model_type == "qwen3" else 0)
        return attention + 3 * self.hidden_size * self.intermediate_size + norms

    def parameter_count(self) -> int:
        """All weights; tied embeddings count once."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return tables + self.num_hidden_layers * self.layer_parameters() + self.hidden_size

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the weights on disk."""
        return self.parameter_count() * dtype_bytes

    def step_bytes(self, dtype_bytes: int) -> int:
        """Bytes of weights that one step reads, whatever the number of rows: all but the
        embedding table, and the head."""
        head = self.vocab_size * self.hidden_size
        layers = self.num_hidden_layers * self.layer_parameters()
        return (head + layers + self.hidden_size) * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values of one token, all layers."""
        return 2 * self.num_hidden_layers * self.kv_size * dtype_bytes

    def flops_per_token(self, context: int) -> int:
        """Multiply-adds count two; attention over `context` tokens included."""
        layers = self.num_hidden_layers * self.layer_parameters()
        attention = 2 * self.num_hidden_layers * context * self.query_size
        return 2 * (layers + self.vocab_size * self.hidden_size + attention)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(file.name, str(file), f"valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(file.name, content, "a JSON object")
    return content


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer field; `default` where it is absent or null."""
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json {name}", value, "a positive integer")
    return value


def _positive(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json {name}", value, "a positive number")
    return float(value)


def _dtype_name(config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise UnsupportedModelError("dtype", name, ", ".join(DTYPES))
    return str(name)


def _eos_ids(config: Mapping[str, Any]) -> set[int]:
    ids = config.get("eos_token_id")
    if ids is None:
        return set()
    return set(ids) if isinstance(ids, list) else {ids}


def _check_supported(config: Mapping[str, Any]) -> None:
    """Refuse by name what would otherwise be run wrongly."""
    if config.get("model_type") not in MODEL_TYPES:
        allowed = ", ".join(MODEL_TYPES)
        raise UnsupportedModelError("model_type", config.get("model_type"), allowed)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    rotary = config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    neutral = {
        "rope_scaling.rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "partial_rotary_factor": (rotary, 1.0),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias") or False, False),
        "mlp_bias": (config.get("mlp_bias") or False, False),
        "use_sliding_window": (bool(config.get("use_sliding_window")), False),
        "sliding_window": (window, None),
        "layer_types": (set(config.get("layer_types") or ()) - {"full_attention"}, set()),
        "num_experts": (config.get("num_experts") or 0, 0),
        "quantization_config": (config.get("quantization_config"), None),
    }
    for name, (given, allowed_value) in neutral.items():
        if given != allowed_value:
            shown = "full_attention only" if name == "layer_types" else repr(allowed_value)
            raise UnsupportedModelError(name, given, f"{shown} (others: not yet built)")
