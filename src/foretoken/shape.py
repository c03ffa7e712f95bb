"""The shape of a model, read from its config.json: sizes, and what they cost in bytes and FLOPs.

Plain json: neither torch nor transformers. Whatever the engine does not run is refused here, by
the name of the config field, before any tensor is read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from foretoken.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

_QK_NORM = {"llama": False, "qwen3": True}
"""The families that run, and whether their heads' queries and keys are normalised."""
_DTYPES = ("float32", "bfloat16", "float16")
_PLAIN_ROPE = (None, "default")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only model, under the names of Hugging Face's config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head's query and key go through an RMS norm before RoPE."""
    dtype: str = "float32"
    """Of the checkpoint: float32, bfloat16 or float16."""
    eos_token_ids: tuple[int, ...] = ()
    """From config.json and generation_config.json."""

    @classmethod
    def from_config(cls, folder: Path) -> Self:
        """Read `folder`/config.json (and eos ids of generation_config.json).

        Raises:
            ModelNotFoundError: there is no config.json.
            CheckpointError: it is not JSON, or a field is missing or of the wrong type.
            UnsupportedModelError: a model type or a feature that does not run; names the field.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise ModelNotFoundError("model", str(folder), "a folder with a config.json")
        config = _read_json(path)
        generation_path = folder / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.is_file() else {}
        return cls.from_dict(config, _eos_ids(config) + _eos_ids(generation))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], eos_token_ids: tuple[int, ...] = ()) -> Self:
        """Check the fields of a config.json; raises as `from_config` does."""
        _refuse_unsupported(config)
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        shape = cls(
            model_type=config["model_type"],
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size"),
            num_hidden_layers=_size(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=_size(config, "num_key_value_heads", heads),
            head_dim=_size(config, "head_dim", _default_head_dim(config, hidden // heads)),
            max_position_embeddings=_size(config, "max_position_embeddings", 2048),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=_QK_NORM[config["model_type"]],
            dtype=_dtype(config),
            eos_token_ids=tuple(sorted(set(eos_token_ids or _eos_ids(config)))),
        )
        shape._check()
        return shape

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Width of query, key and value of one token together."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    @property
    def num_matrix_parameters(self) -> int:
        """Weights multiplied with every token: all layers and the output head, no embedding."""
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = hidden * (self.qkv_size + self.num_attention_heads * self.head_dim)
        return self.num_hidden_layers * (attention + 3 * hidden * inner) + self.vocab_size * hidden

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        hidden, inner = self.hidden_size, self.intermediate_size
        layer = 2 * hidden
        if self.qk_norm:
            layer += 2 * self.head_dim
        if self.attention_bias:
            layer += self.qkv_size + hidden
        if self.mlp_bias:
            layer += 2 * inner + hidden
        embedding = 0 if self.tie_word_embeddings else self.vocab_size * hidden
        return self.num_matrix_parameters + self.num_hidden_layers * layer + hidden + embedding

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of all parameters at `dtype_bytes` each."""
        return self.num_parameters * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values of one position, all layers."""
        width = 2 * self.num_key_value_heads * self.head_dim
        return self.num_hidden_layers * width * dtype_bytes

    def flops_per_token(self, context: int) -> int:
        """Floating-point operations (2 per multiply-add) of one token after `context` others."""
        width = self.num_attention_heads * self.head_dim
        attention = 4 * self.num_hidden_layers * width * (context + 1)
        return 2 * self.num_matrix_parameters + attention

    def _check(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            allowed = f"a divisor of num_attention_heads, {self.num_attention_heads}"
            raise CheckpointError("num_key_value_heads", self.num_key_value_heads, allowed)
        if self.head_dim % 2:
            raise UnsupportedModelError("head_dim", self.head_dim, "an even number")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(path.name, str(error), "a readable JSON file") from error
    if not isinstance(content, dict):
        raise CheckpointError(path.name, type(content).__name__, "a JSON object")
    return content


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json {name}", value, "a positive integer")
    return value


def _default_head_dim(config: Mapping[str, Any], quotient: int) -> int:
    """What the family takes where config.json does not say."""
    return 128 if config["model_type"] == "qwen3" else quotient


def _dtype(config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(name).removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedModelError("torch_dtype", name, ", ".join(_DTYPES))
    return name


def _eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = config.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def _rope_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters` of transformers 5, else `rope_scaling`, else nothing."""
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return fields if isinstance(fields, dict) else {}


def _rope_theta(config: Mapping[str, Any]) -> float:
    return float(_rope_fields(config).get("rope_theta") or config.get("rope_theta") or 10000.0)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for what would otherwise run wrongly."""
    model_type = config.get("model_type")
    if model_type not in _QK_NORM:
        raise UnsupportedModelError("model_type", model_type, ", ".join(_QK_NORM))
    rope = _rope_fields(config)
    rope_type = rope.get("rope_type", rope.get("type"))
    if rope_type not in _PLAIN_ROPE:
        raise UnsupportedModelError("rope_scaling", rope_type, "default (no scaling)")
    rotary = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if rotary != 1.0:
        raise UnsupportedModelError("partial_rotary_factor", rotary, "1.0")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise UnsupportedModelError("sliding_window", config["sliding_window"], "null")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise UnsupportedModelError("layer_types", sorted(kinds), "full_attention")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError("hidden_act", activation, "silu")
    for name in ("quantization_config", "num_experts", "num_local_experts"):
        if config.get(name):
            raise UnsupportedModelError(name, config[name], "nothing: it must be absent")
