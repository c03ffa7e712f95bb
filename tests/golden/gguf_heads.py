"""Heads in GGUF files, as llama.cpp's converter makes them of published folders: its words for
sizes and tensors, layers named by their inputs, ids of the target in place of offsets."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.torch import load_file

from tests.golden.gguf_files import finish, ggml_rows, write_value

Kind = gguf.GGMLQuantizationType
TOPS = {
    "fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd",
    "input_norm": "enc.output_norm", "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}  # fmt: skip
LAYER = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}


def stored_name(name: str) -> str:
    """llama.cpp's name of a tensor of a folder."""
    stem, _, kind = name.rpartition(".")
    if not stem:
        return name
    if stem in TOPS and not stem.startswith("layers."):
        return f"{TOPS[stem]}.{kind}"
    _, number, part = stem.split(".", 2)
    return f"blk.{number}.{LAYER[part]}.{kind}"


def write_gguf_head(
    folder: Path,
    path: Path,
    kind: Kind | None = None,
    *,
    target_hidden: int,
    without: tuple[str, ...] = (),
    **changes: Any,
) -> Path:
    """The head in `folder` as a file.

    Args:
        folder: with a config.json and one safetensors file.
        path: of the file.
        kind: of its matrices; None: floats as they are.
        target_hidden: width of the target.
        without: metadata (after the architecture's name) and tensors (llama.cpp's names) left out.
        changes: metadata with other values, dots written `__`.
    """
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **config.get("transformer_layer_config", {})}
    tensors = load_file(folder / "model.safetensors")
    eagle = config.get("speculators_model_type") == "eagle3"
    arch = "eagle3" if eagle else "dflash"
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    metadata: dict[str, Any] = {to: config[name] for name, to in SIZES.items()}
    metadata |= {
        "block_count": layers,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "rope.dimension_count": config["head_dim"],
        "target_layers": inputs(config),
    }
    if eagle:
        metadata |= {"target_hidden_size": target_hidden, "norm_before_residual": False}
    else:
        kinds = config["layer_types"]
        metadata["block_size"] = config["block_size"]
        if "sliding_attention" in kinds:
            pattern = [one == "sliding_attention" for one in kinds]
            metadata["attention.sliding_window"] = config["sliding_window"]
            metadata["attention.sliding_window_pattern"] = pattern
            if config.get("sliding_window_non_causal"):
                metadata["attention.causal"] = False
    metadata |= {name.replace("__", "."): value for name, value in changes.items()}
    writer = gguf.GGUFWriter(path, arch)
    for name, value in metadata.items():
        if name not in without:
            write_value(writer, f"{arch}.{name}", value)
    mask = (config.get("dflash_config") or config).get("mask_token_id")
    if mask is not None:
        writer.add_mask_token_id(mask)
    for name, tensor in tensors.items():
        if name == "t2d" or (name == "d2t" and "lm_head.weight" not in tensors):
            continue
        stored = stored_name(name)
        rows = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        if stored in without:
            continue
        if name == "d2t":
            writer.add_tensor(stored, rows + np.arange(rows.size, dtype=np.int64))
            continue
        for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if eagle and part in name:
                rows = ggml_rows(rows, config[key])
        if kind is not None and rows.ndim == 2 and rows.shape[1] % 32 == 0:
            writer.add_tensor(stored, quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(rows))
    finish(writer)
    return path


def inputs(config: dict[str, Any]) -> list[int]:
    """The target's layers whose inputs are read, if the config names them."""
    for name in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
        if name in config:
            return list(config[name])
    outputs = (config.get("dflash_config") or config).get("target_layer_ids", ())
    return [layer + 1 for layer in outputs]
