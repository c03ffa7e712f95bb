"""What the config.json of each of our own model families says, beyond the sizes all of them have.

One reader per `model_type`. A reader refuses by name what its model file would run wrongly;
defaults are those of Hugging Face's config classes.
"""

from collections.abc import Callable
from typing import Any

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.shape.fields import Config, positive, positive_or_none, refuse_unless, size
from foretoken.shape.rope import RopeShape

_GEMMA_HEAD_DIM, _QWEN3_HEAD_DIM = 256, 128
_FULL, _SLIDING = "full_attention", "sliding_attention"
_SILU = ("silu", "silu")
_GELU = ("gelu_pytorch_tanh", "gelu_pytorch_tanh")
_NO = (False, "False")


def own_fields(config: Config) -> dict[str, Any]:
    """ModelShape's fields that depend on the family.

    Raises:
        UnsupportedModelError: a feature that the family's model file does not run.
        CheckpointError: a field is missing or wrong.
    """
    refuse_unless(config, {"num_experts": (0, "0")})
    return _READERS[config["model_type"]](config)


def _llama(config: Config) -> dict[str, Any]:
    refuse_unless(config, {"hidden_act": _SILU, "sliding_window": (None, "none")})
    _check_layer_types(config, {_FULL})
    bias = bool(config.get("attention_bias"))
    return {
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias")),
        **_one_rope(config),
    }


def _mistral(config: Config) -> dict[str, Any]:
    refuse_unless(config, {"hidden_act": _SILU})
    window = _window(config)
    _check_layer_types(config, {_FULL if window is None else _SLIDING})
    return {"windows": _everywhere(config, window), **_one_rope(config)}


def _qwen2(config: Config) -> dict[str, Any]:
    refuse_unless(config, {"hidden_act": _SILU})
    return {"qkv_bias": True, "windows": _qwen_windows(config), **_one_rope(config)}


def _qwen3(config: Config) -> dict[str, Any]:
    refuse_unless(config, {"hidden_act": _SILU})
    bias = bool(config.get("attention_bias"))
    return {
        "head_dim": _head_dim(config, _QWEN3_HEAD_DIM),
        "head_norms": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "windows": _qwen_windows(config),
        **_one_rope(config, _QWEN3_HEAD_DIM),
    }


def _phi3(config: Config) -> dict[str, Any]:
    refuse_unless(config, {"hidden_act": _SILU})
    rope = dict(_rope_of(config))
    if (rope.get("rope_type") or rope.get("type")) == "yarn":
        rope["rope_type"] = "longrope"  # What early Phi-3 configs called it.
    head_dim = _head_dim(config)
    return {
        "head_dim": head_dim,
        "windows": _everywhere(config, _window(config)),
        "rope": RopeShape.read(config, rope, head_dim=head_dim, theta=_theta(config)),
    }


def _gemma2(config: Config) -> dict[str, Any]:
    return {
        **_gemma(config, period=2),
        "rope": _one_rope(config, _GEMMA_HEAD_DIM)["rope"],
        "attention_softcap": positive_or_none(config, "attn_logit_softcapping"),
    }


def _gemma3(config: Config) -> dict[str, Any]:
    refuse_unless(config, {"attn_logit_softcapping": (None, "none")})
    fields = _gemma(config, period=size(config, "sliding_window_pattern", 6))
    ropes = config.get("rope_parameters") or {}
    wide = ropes.get(_FULL) or config.get("rope_scaling") or {}
    local = ropes.get(_SLIDING) or {}
    _check_whole_heads(config, wide, local)
    theta = positive(config, "rope_theta", 1e6)
    local_theta = positive(config, "rope_local_base_freq", 1e4)
    head_dim = fields["head_dim"]
    return {
        **fields,
        "head_norms": True,
        "rope": RopeShape.read(config, wide, head_dim=head_dim, theta=theta),
        "local_rope": RopeShape.read(config, local, head_dim=head_dim, theta=local_theta),
    }


def _gemma(config: Config, period: int) -> dict[str, Any]:
    refuse_unless(
        config, {"hidden_activation": _GELU, "use_bidirectional_attention": _NO, "mlp_bias": _NO}
    )
    layers = size(config, "num_hidden_layers")
    usual = [_SLIDING if (i + 1) % period else _FULL for i in range(layers)]
    bias = bool(config.get("attention_bias"))
    return {
        "head_dim": _head_dim(config, _GEMMA_HEAD_DIM),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", True)),
        "qkv_bias": bias,
        "out_bias": bias,
        "hidden_act": _GELU[0],
        "sandwich_norms": True,
        "embedding_scale": size(config, "hidden_size") ** 0.5,
        "attention_scale": positive(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        "logit_softcap": positive_or_none(config, "final_logit_softcapping"),
        "windows": _windows_by_type(config, config.get("layer_types") or usual, _window(config)),
    }


def _qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Qwen's upper layers may have a window, if it is switched on."""
    window = _window(config) if config.get("use_sliding_window") else None
    layers, first = size(config, "num_hidden_layers"), config.get("max_window_layers", 28)
    usual = [_SLIDING if window is not None and i >= first else _FULL for i in range(layers)]
    return _windows_by_type(config, config.get("layer_types") or usual, window)


def _windows_by_type(
    config: Config, layer_types: list[str], window: int | None
) -> tuple[int | None, ...]:
    _check_layer_types({"layer_types": layer_types}, {_FULL, _SLIDING})
    if len(layer_types) != size(config, "num_hidden_layers"):
        raise CheckpointError("config.json layer_types", layer_types, "one per layer")
    if window is None and _SLIDING in layer_types:
        raise CheckpointError("config.json sliding_window", None, f"a number: some are {_SLIDING}")
    return tuple(window if kind == _SLIDING else None for kind in layer_types)


def _check_layer_types(config: Config, allowed: set[str]) -> None:
    found = set(config.get("layer_types") or ())
    if found - allowed:
        raise UnsupportedModelError("layer_types", sorted(found), " and ".join(sorted(allowed)))


def _everywhere(config: Config, window: int | None) -> tuple[int | None, ...]:
    return (window,) * size(config, "num_hidden_layers")


def _window(config: Config) -> int | None:
    given = config.get("sliding_window")
    return None if given is None else size(config, "sliding_window")


def _one_rope(config: Config, head_dim: int | None = None) -> dict[str, Any]:
    """The same positions in all layers."""
    rope = _rope_of(config)
    _check_whole_heads(config, rope)
    dim = _head_dim(config, head_dim)
    return {"rope": RopeShape.read(config, rope, head_dim=dim, theta=_theta(config))}


def _check_whole_heads(*places: Config) -> None:
    for fields in places:
        refuse_unless(fields, {"partial_rotary_factor": (1.0, "1.0")})


def _rope_of(config: Config) -> Config:
    rope: Config = config.get("rope_scaling") or config.get("rope_parameters") or {}
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if nested or "mrope_section" in rope:
        given = nested or "mrope_section"
        raise UnsupportedModelError("rope_parameters", given, "one kind of positions for all")
    return rope


def _theta(config: Config) -> float:
    return positive(config, "rope_theta", 10000.0)


def _head_dim(config: Config, default: int | None = None) -> int:
    usual = size(config, "hidden_size") // size(config, "num_attention_heads")
    return size(config, "head_dim", default or usual)


_READERS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
OWN_MODEL_TYPES = tuple(_READERS)
