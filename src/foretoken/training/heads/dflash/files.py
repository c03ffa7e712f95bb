"""The files of block heads, DFlash and DSpark: `speculators`, and the layout that SGLang reads.

The latter is that of z-lab for DFlash and of DeepSpec for DSpark, without copies of the target's
tables. Layers are counted differently: `target_layer_ids` are those whose outputs are read,
`aux_hidden_state_layer_ids` those whose inputs are. Both say what vLLM would have to guess.
"""

from collections.abc import Mapping
from typing import Any

from foretoken.errors import ConfigError
from foretoken.training.heads.kind import Layout
from foretoken.training.heads.speculators_file import proposing, with_both_ways

SPECULATORS_VERSION = "0.9.0"
_NAMES = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}


def block_layout(
    method: str,
    state: Mapping[str, Any],
    verifier: str,
    form: str | None,
    more: Mapping[str, Any] | None = None,
) -> Layout:
    """Tensors and config.json of a checkpoint's block head.

    Args:
        method: dflash or dspark.
        state: the checkpoint's.
        verifier: the target's name.
        form: `sglang`, or any other for the layout of `speculators`.
        more: keys that only this method has.

    Raises:
        ConfigError: `sglang` for a reduced vocabulary.
    """
    shape, keys = state["shape"], more or {}
    if form == "sglang":
        return Layout(dict(state["model"]), _authors_config(method, shape, keys))
    tensors = with_both_ways(state["model"], shape["layer"]["vocab_size"])
    return Layout(tensors, _speculators_config(method, shape, verifier, keys))


def _layers(shape: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder layers as a Qwen3 config."""
    layer = shape["layer"]
    return {
        "model_type": "qwen3",
        **layer,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["full_attention"] * layer["num_hidden_layers"],
        "rope_parameters": {"rope_type": "default", "rope_theta": layer["rope_theta"]},
        "tie_word_embeddings": False,
    }


def _speculators_config(
    method: str, shape: Mapping[str, Any], verifier: str, more: Mapping[str, Any]
) -> dict[str, Any]:
    first_row = shape["first_row"]
    return {
        "architectures": [_NAMES[method]],
        "speculators_model_type": method,
        "speculators_version": SPECULATORS_VERSION,
        "block_size": shape["block_size"],
        "mask_token_id": shape["mask_token_id"],
        "sample_from_anchor": first_row == 0,
        "sliding_window_non_causal": True,
        "aux_hidden_state_layer_ids": list(shape["points"]),
        "draft_vocab_size": shape["draft_vocab_size"],
        "target_hidden_size": shape["target_hidden_size"],
        **more,
        "transformer_layer_config": _layers(shape),
        "speculators_config": proposing(method, shape["block_size"] - first_row, verifier),
    }


def _authors_config(
    method: str, shape: Mapping[str, Any], more: Mapping[str, Any]
) -> dict[str, Any]:
    drafted, known = shape["draft_vocab_size"], shape["layer"]["vocab_size"]
    if drafted < known:
        given = f"sglang, of a head that drafts {drafted} of {known} tokens"
        raise ConfigError("--format", given, "own, speculators, vllm")
    blocks = {
        "mask_token_id": shape["mask_token_id"],
        "target_layer_ids": [point - 1 for point in shape["points"]],
    }
    flat = {
        **_layers(shape),
        "block_size": shape["block_size"],
        "num_target_layers": shape["target_layers"],
    }
    if method == "dflash":
        return {"architectures": ["DFlashDraftModel"], **flat, "dflash_config": {**blocks, **more}}
    return {"architectures": ["Qwen3DSparkModel"], **flat, **blocks, **more}
