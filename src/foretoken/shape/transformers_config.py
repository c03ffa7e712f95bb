"""Sizes of architectures whose family has no record, as transformers' config classes name them.

Only dense decoders with plain causal attention are let through; what else there is, is refused
here by what its config says, and at load by what its modules do (models/through_transformers).
"""

import importlib.util
import math
from pathlib import Path
from typing import Any

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.shape.families import family_names
from foretoken.shape.fields import Config, layer_count, size
from foretoken.shape.safetensors_header import headers
from foretoken.shape.stored import stored_scheme

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OTHER_PARTS = {
    "altup_num_inputs": "several residual streams",
    "hidden_size_per_layer_input": "embeddings per layer",
    "num_kv_shared_layers": "layers that share keys and values",
    "global_head_dim": "heads of two sizes",
    "attention_k_eq_v": "keys that are values too",
    "per_layer_config": "layers of different sizes",
    "conv_L_cache": "convolutions",
    "kv_lora_rank": "latent keys and values",
    "linear_num_key_heads": "linear attention",
    "mamba_d_state": "Mamba layers",
    "ssm_state_size": "Mamba layers",
    "state_size": "Mamba layers",
}
"""Fields of decoders that are no plain ones, and what they mean."""
_OTHER_INPUTS = ("vision_config", "audio_config", "text_config", "image_token_id")
_CHANGING_ROPES = ("dynamic", "longrope")
"""Where transformers turns a position differently as its sequence grows."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def transformers_fields(folder: Path, raw: Config) -> dict[str, Any]:
    """ModelShape's fields of the model in `folder`.

    Args:
        folder: for transformers' own reading of config.json, and the weight files.
        raw: config.json as it is.

    Raises:
        UnsupportedModelError: mixture of experts, multimodal, encoder-decoder, another kind of
            layer, or a type that transformers does not know as a causal language model.
        CheckpointError: transformers cannot read the config, or a size is missing.
    """
    kind = raw.get("model_type")
    allowed = f"{family_names()}, or a dense decoder-only architecture of transformers"
    _refuse(raw, kind, allowed)
    config = _read(folder, kind, allowed)
    _refuse(config, kind, allowed)
    heads = size(config, "num_attention_heads")
    hidden = size(config, "hidden_size")
    layers = layer_count(config)
    key_heads = 1 if config.get("multi_query") else size(config, "num_key_value_heads", heads)
    return {
        "model_type": kind,
        "vocab_size": size(config, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": size(config, "intermediate_size", 4 * hidden),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": size(config, "head_dim", hidden // heads),
        "max_position_embeddings": size(config, "max_position_embeddings"),
        "rms_norm_eps": 1.0,
        "rope": None,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
        "windows": _windows(config, layers),
        "stored_parameters": _count_stored(folder),
    }


def _read(folder: Path, kind: object, allowed: str) -> dict[str, Any]:
    """config.json with transformers' defaults and under its common names."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModelError("model_type", kind, allowed)
    if not _takes_attention(str(kind)):
        given = f"{kind}, whose modules know no other attention than their own"
        raise UnsupportedModelError("model_type", given, allowed)
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        allowed = f"one transformers can read ({error})"
        raise CheckpointError("config.json", kind, allowed) from error
    names = config.attribute_map
    common = {name: getattr(config, name, None) for name in names}
    return {**config.to_dict(), **common}


def _takes_attention(kind: str) -> bool:
    """Whether the modules of an architecture let another function attend, as they must here.

    That is an attribute of a class, which is looked for in its source: to import it would take
    PyTorch, and this is asked before a model is loaded. Of what has no source here it is not known
    before that, and taken to be so.
    """
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    module = model_type_to_module_name(kind)
    found = importlib.util.find_spec(f"transformers.models.{module}")
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder) / f"modeling_{module}.py"
        if file.is_file():
            return "_supports_attention_backend = True" in file.read_text(encoding="utf-8")
    return True


def _refuse(config: Config, kind: object, allowed: str) -> None:
    for name in _EXPERTS:
        if config.get(name) not in (None, 0, 1):
            given = f"{kind} with {config[name]} experts"
            raise UnsupportedModelError("model_type", given, f"{allowed}; no mixture of experts")
    for name in _OTHER_INPUTS:
        if config.get(name) is not None:
            given = f"{kind} with {name}"
            raise UnsupportedModelError("model_type", given, f"{allowed}; text only")
    for name, words in _OTHER_PARTS.items():
        if config.get(name):
            given = f"{kind}, with {words} ({name})"
            raise UnsupportedModelError("model_type", given, f"{allowed}; plain causal attention")
    if config.get("is_encoder_decoder"):
        given = f"{kind}, an encoder-decoder"
        raise UnsupportedModelError("model_type", given, allowed)
    if config.get("quantization_config") is not None:
        stored_scheme(config)
        given = f"{kind} with quantization_config"
        raise UnsupportedModelError("model_type", given, f"{allowed}; not quantized, if the latter")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope_type = rope.get("rope_type") or rope.get("type")
    if rope_type in _CHANGING_ROPES:
        given = f"{kind} with {rope_type}"
        raise UnsupportedModelError("rope_type", given, "positions that do not depend on length")
    others = set(config.get("layer_types") or ()) - _LAYER_TYPES
    if others:
        given = f"{kind} with {', '.join(sorted(others))}"
        raise UnsupportedModelError("layer_types", given, " and ".join(sorted(_LAYER_TYPES)))


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """What the config says; the truth is what the modules ask for."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _count_stored(folder: Path) -> int | None:
    """Numbers in all safetensors files, from their headers; None: there are none of these."""
    total = None
    for header in headers(folder):
        for entry in header.values():
            total = (total or 0) + math.prod(entry["shape"])
    return total
