"""The shape of a model, read from its config.json, and the arithmetic that follows from it.

Plain data and formulas, no torch: what the engine, `foretoken info` and the lab agree on. A
feature that Foretoken does not run is an error here, before any weight is read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from foretoken.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

MODEL_TYPES = ("llama", "qwen3")


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
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError("config.json", str(file), f"valid JSON ({error})") from error
        _check_supported(config)
        try:
            return cls._of(config)
        except KeyError as error:
            allowed = f"a {config['model_type']} config with {error.args[0]}"
            raise CheckpointError("config.json", str(file), allowed) from error
        except (TypeError, ValueError) as error:
            raise CheckpointError("config.json", str(file), f"numbers ({error})") from error

    @classmethod
    def _of(cls, config: Mapping[str, Any]) -> Self:
        heads = int(config["num_attention_heads"])
        head_dim = config.get("head_dim") or int(config["hidden_size"]) // heads
        eos = config.get("eos_token_id")
        rope = config.get("rope_parameters") or {}
        return cls(
            model_type=config["model_type"],
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_hidden_layers=int(config["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            max_position_embeddings=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
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


def _check_supported(config: Mapping[str, Any]) -> None:
    """Refuse by name what would otherwise be run wrongly."""
    if config.get("model_type") not in MODEL_TYPES:
        allowed = ", ".join(MODEL_TYPES)
        raise UnsupportedModelError("model_type", config.get("model_type"), allowed)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    neutral = {
        "rope_scaling.rope_type": (kind, ("default",)),
        "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
        "attention_bias": (config.get("attention_bias", False), (False,)),
        "mlp_bias": (config.get("mlp_bias", False), (False,)),
        "use_sliding_window": (config.get("use_sliding_window", False), (False,)),
        "quantization_config": (config.get("quantization_config"), (None,)),
    }
    for name, (given, allowed_values) in neutral.items():
        if given not in allowed_values:
            allowed = f"{allowed_values[0]!r} (others: not yet built)"
            raise UnsupportedModelError(name, given, allowed)
