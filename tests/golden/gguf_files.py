"""GGUF files of tiny checkpoints, as llama.cpp's converter makes them: names by the `gguf` package,
rows of q and k reordered where it does so, 1 added to Gemma's norms. Floats stay float32."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors.torch import load_file
from torch import Tensor

from foretoken.shape.gguf import forget_gguf

More = Callable[[gguf.GGUFWriter, dict[str, Any]], None]
Rows = np.ndarray[Any, Any]
Pack = Callable[[str, Rows], tuple[Rows, gguf.GGMLQuantizationType]]
ARCHES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
TURNED = ("llama", "mistral3", "smollm3")
ADDED = ("gemma", "gemma2", "gemma3")


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what it was given; what was read of the file before is forgotten."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    forget_gguf()


def ggml_rows(rows: Rows, heads: int) -> Rows:
    """Llama's heads as llama.cpp stores them: the halves of a head alternate."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def joined_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of all experts of a layer in one tensor, gate and up apart."""
    found: dict[str, Tensor] = {}
    each: dict[str, list[tuple[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        fused = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj(_bias)?", name)
        one = EXPERT.fullmatch(name)
        if one is not None:
            each.setdefault(f"{one[1]}.{one[3]}", []).append((int(one[2]), tensor))
        elif fused is not None and f"{fused[1]}.down_proj_bias" not in tensors:
            found[f"{name}.weight"] = tensor
        elif fused is not None:  # gpt-oss: inputs first, gate and up alternate
            ending = "bias" if fused[3] else "weight"
            rows = tensor if fused[3] else tensor.transpose(1, 2)
            parts = {"down": rows} if fused[2] == "down" else {
                "gate": rows[:, ::2], "up": rows[:, 1::2],
            }  # fmt: skip
            for part, one_part in parts.items():
                found[f"{fused[1]}.{part}_proj.{ending}"] = one_part.contiguous()
        else:
            found[name] = tensor
    for name, pairs in each.items():
        found[name] = torch.stack([tensor for _, tensor in sorted(pairs, key=lambda p: p[0])])
    return found


def write_gguf(
    folder: Path,
    arch: str,
    more: More = lambda writer, config: None,
    *,
    table: gguf.GGMLQuantizationType | None = None,
    path: Path | None = None,
    kind: gguf.GGMLQuantizationType | None = None,
    pack: Pack | None = None,
) -> Path:
    """The checkpoint in `folder` as a file.

    Args:
        folder: with a config.json and one safetensors file.
        arch: GGUF's name of the architecture.
        more: metadata and tensors that only this one has.
        table: type of the embedding; None: that of matrices.
        path: of the file; None: beside the checkpoint.
        kind: of its matrices; None: floats.
        pack: a matrix's rows and their type, by its name; None: as `table` and `kind` say.
    """
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config") or config
    path = path or folder / f"{arch}.gguf"
    writer = gguf.GGUFWriter(path, arch)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(layers)
    writer.add_embedding_length(config["hidden_size"])
    if not config.get("use_double_wide_mlp"):
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    if arch != "gemma4":
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(size)
        writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    more(writer, config)
    names = gguf.get_tensor_name_map(ARCHES[arch], layers)
    for name, tensor in joined_experts(load_file(folder / "model.safetensors")).items():
        plain = name.replace("model.language_model.", "model.")
        plain = plain.replace("e_score_correction_bias", "e_score_correction.bias")
        plain = f"{plain}.weight" if plain.endswith((".sinks", ".layer_scalar")) else plain
        stem, part_kind = plain.rsplit(".", 1)
        stored = names.get_name(stem)
        if "router." in stem + "." and part_kind in ("scale", "per_expert_scale"):
            block = stem.split(".")[2]
            ours = {"scale": "ffn_gate_inp", "per_expert_scale": "ffn_down_exps"}[part_kind]
            stored, part_kind = f"blk.{block}.{ours}", "scale"
        if stored is None:
            assert "visual" in name, name
            continue
        rows = tensor.float().numpy()
        if arch in ADDED and plain.endswith("norm.weight"):
            rows = rows + 1
        wanted = table if table is not None and "embed_tokens" in stem else kind
        if rows.ndim == 1 or part_kind != "weight" or stored.endswith("ffn_gate_inp"):
            wanted = None
        elif pack is not None:
            rows, wanted = pack(name, rows)
        elif wanted is not None:
            rows = quantize(rows, wanted)
        for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if arch in TURNED and part in stem:
                rows = ggml_rows(rows, config[key])
        writer.add_tensor(f"{stored}.{part_kind}", rows, raw_dtype=wanted)
    finish(writer)
    return path


def write_value(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, list | tuple):
        writer.add_array(name, value)
    elif isinstance(value, bool | np.bool_):
        writer.add_bool(name, bool(value))
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_uint32(name, value)
