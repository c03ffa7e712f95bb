"""The kind of value that each known field of a config.json has, checked before any is read.

Of models and of drafting heads. Readers may then rely on kinds, and see to values alone. Unknown
fields are left alone; null is absent. Nested objects are looked into where something is read there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.errors import CheckpointError
from foretoken.shape.multimodal import PLACEHOLDERS

LARGEST = 1 << 40
"""Of numbers: above all that models have, and far below what cannot be computed with."""


@dataclass(frozen=True, slots=True)
class _Kind:
    words: str
    """What is allowed, for the message."""
    fits: Callable[[Any], bool]
    inside: "Mapping[str, _Kind] | _Kind | None" = None
    """Kinds of an object's fields, or of all its values."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_number(value: object) -> bool:
    return _is_whole(value) or isinstance(value, float) and abs(value) <= LARGEST


def _all(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(fits(one) for one in value)


def _object(inside: "Mapping[str, _Kind] | _Kind") -> _Kind:
    return _Kind("an object", lambda value: isinstance(value, dict), inside)


_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_TEXTS = _Kind("a list of texts", _all(lambda value: isinstance(value, str)))
_FLAG = _Kind("true or false", lambda value: value in (0, 1) and isinstance(value, bool | int))
_WHOLE = _Kind(f"a whole number up to {LARGEST}", _is_whole)
_NUMBER = _Kind(f"a number up to {LARGEST}", _is_number)
_NUMBERS = _Kind(f"a list of numbers up to {LARGEST}", _all(_is_number))
_IDS = _Kind(
    "a token id or a list of them",
    lambda value: _is_whole(value) or _all(_is_whole)(value),
)

_ROPE = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    **dict.fromkeys(
        (
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "factor",
            "llama_4_scaling_beta",
            "high_freq_factor",
            "low_freq_factor",
            "mscale",
            "mscale_all_dim",
            "partial_rotary_factor",
            "rope_theta",
        ),
        _NUMBER,
    ),
    **dict.fromkeys(("short_factor", "long_factor", "mrope_section"), _NUMBERS),
    "original_max_position_embeddings": _WHOLE,
    "truncate": _FLAG,
}
_BY_LAYER_TYPE = dict.fromkeys(("full_attention", "sliding_attention"), _object(_ROPE))
_ROPES = _object({**_ROPE, **_BY_LAYER_TYPE})
_GROUP = {
    "weights": _object(
        {
            **dict.fromkeys(("type", "strategy"), _TEXT),
            **dict.fromkeys(("num_bits", "group_size"), _WHOLE),
            "symmetric": _FLAG,
        }
    ),
    "format": _TEXT,
    "targets": _TEXTS,
}
_QUANTIZATION = _object(
    {
        **dict.fromkeys(("quant_method", "format", "checkpoint_format", "version", "fmt"), _TEXT),
        **dict.fromkeys(("bits", "w_bit"), _NUMBER),
        **dict.fromkeys(("group_size", "q_group_size"), _WHOLE),
        **dict.fromkeys(("sym", "desc_act", "zero_point"), _FLAG),
        **dict.fromkeys(("sparsity_config", "transform_config"), _object({})),
        "config_groups": _object(_object(_GROUP)),
        "ignore": _TEXTS,
    }
)
_DECODER = {
    **dict.fromkeys(
        ("model_type", "hidden_act", "hidden_activation", "dtype", "torch_dtype"), _TEXT
    ),
    **dict.fromkeys(("architectures", "layer_types", "mlp_layer_types"), _TEXTS),
    "mlp_only_layers": _Kind("a list of layers", _all(_is_whole)),
    **dict.fromkeys(
        (
            "attention_bias",
            "attention_k_eq_v",
            "enable_moe_block",
            "is_encoder_decoder",
            "use_double_wide_mlp",
            "mup_enabled",
            "norm_topk_prob",
            "qkv_bias",
            "use_qk_norm",
            "mlp_bias",
            "multi_query",
            "tie_word_embeddings",
            "use_sliding_window",
        ),
        _FLAG,
    ),
    "no_rope_layers": _Kind("a list of 0 and 1", _all(lambda value: value in (0, 1))),
    **dict.fromkeys(
        (
            "first_k_dense_replace",
            "hidden_size_per_layer_input",
            "num_kv_shared_layers",
            "num_mtp_layers",
            "num_nextn_predict_layers",
            "mtp_num_hidden_layers",
            "max_window_layers",
            "moe_layer_end_index",
            "moe_layer_start_index",
            "moe_num_shared_experts",
            "num_dense_layers",
            "original_max_position_embeddings",
            "shared_intermediate_size",
            "sliding_window",
        ),
        _WHOLE,
    ),
    **dict.fromkeys(
        (
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "partial_rotary_factor",
            "rms_norm_eps",
            "rope_theta",
        ),
        _NUMBER,
    ),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _ROPES),
    **dict.fromkeys(("quantization_config", "compression_config"), _QUANTIZATION),
    "per_layer_config": _object(_object({})),
    "eos_token_id": _IDS,
}
_LAYER_IDS = {"eagle_aux_hidden_state_layer_ids": _Kind("a list of layers", _all(_is_whole))}
_FIELDS = {
    **_DECODER,
    **_LAYER_IDS,
    **dict.fromkeys(("inner_dim", "mask_token_id", "target_hidden_size"), _WHOLE),
    **dict.fromkeys(PLACEHOLDERS, _WHOLE),
    **dict.fromkeys(("text_config", "transformer_layer_config"), _object(_DECODER)),
    "eagle_config": _object(_LAYER_IDS),
    "dflash_config": _object({}),
}


def check_kinds(config: Mapping[str, Any], file: str = "config.json") -> None:
    """Raise CheckpointError for the first known field, at any depth, that is of another kind."""
    _check(config, _FIELDS, file)


def _check(values: Mapping[str, Any], kinds: Mapping[str, _Kind] | _Kind, where: str) -> None:
    for name, value in values.items():
        kind = kinds if isinstance(kinds, _Kind) else kinds.get(name)
        if kind is None or value is None:
            continue
        if not kind.fits(value):
            raise CheckpointError(f"{where} {name}", value, kind.words)
        if kind.inside is not None:
            _check(value, kind.inside, f"{where} {name}")
