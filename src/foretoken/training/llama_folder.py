"""Trained models as Hugging Face Llama folders.

Owns the mapping from the fused training layout to Llama's tensor names, and the files beside the
weights. Invariant: LlamaForCausalLM loads the folder and gives the training model's logits.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.training import run_folder
from foretoken.training.llama import Llama, LlamaShape

OUTER = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "out": "self_attn.o_proj",
    "down": "mlp.down_proj",
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SPECIAL = "special_ids.json"
PACKAGED_IDS = {"bos_token_id": 0, "eos_token_id": 1}
"""The ids that begin and end a text for the packaged models."""


def fused_parts(shape: LlamaShape) -> dict[str, dict[str, int]]:
    """For each fused matrix, the Llama names of its parts and their rows, in order."""
    kv, ffn = shape.kv_size, shape.ffn_size
    attention = {"q_proj": shape.hidden_size, "k_proj": kv, "v_proj": kv}
    return {
        "qkv": {f"self_attn.{name}": rows for name, rows in attention.items()},
        "gate_up": {"mlp.gate_proj": ffn, "mlp.up_proj": ffn},
    }


def to_llama_names(model: Llama) -> dict[str, Tensor]:
    """The model's tensors under Hugging Face's Llama names, unfused; the head is tied."""
    parts, found = fused_parts(model.shape), {}
    for name, tensor in model.state_dict().items():
        if name in OUTER:
            found[OUTER[name]] = tensor
            continue
        _, layer, module, _ = name.split(".")
        prefix = f"model.layers.{layer}"
        if module in INNER:
            found[f"{prefix}.{INNER[module]}.weight"] = tensor
            continue
        pieces = torch.split(tensor, list(parts[module].values()))
        for part, piece in zip(parts[module], pieces, strict=True):
            found[f"{prefix}.{part}.weight"] = piece
    return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def from_llama_names(shape: LlamaShape, tensors: dict[str, Tensor]) -> Llama:
    """The inverse of `to_llama_names`, in float32."""
    model, parts = Llama(shape), fused_parts(shape)
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        if name in OUTER:
            state[name] = tensors[OUTER[name]]
            continue
        _, layer, module, _ = name.split(".")
        wanted = [INNER[module]] if module in INNER else list(parts[module])
        state[name] = torch.cat([tensors[f"model.layers.{layer}.{w}.weight"] for w in wanted])
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model


def llama_config(shape: LlamaShape) -> dict[str, Any]:
    """The contents of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def read_checkpoint(folder: Path) -> Llama:
    """The newest model of a run's folder, in float32. Raises ConfigError where there is none."""
    state = run_folder.newest_state(folder, "model", "shape")
    model = Llama(LlamaShape(**state["shape"]))
    model.load_state_dict(state["model"])
    return model


def read_exported(folder: Path) -> Llama:
    """A model from an exported folder, in float32.

    Raises:
        CheckpointError: the folder was not written by `export`, or is broken.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        shape = LlamaShape(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            ffn_size=config["intermediate_size"],
            max_positions=config["max_position_embeddings"],
            rope_theta=config["rope_theta"],
            norm_eps=config["rms_norm_eps"],
        )
        return from_llama_names(shape, load_file(folder / "model.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, RuntimeError) as error:
        allowed = f"a model that `foretoken train export` wrote ({error!r})"
        raise CheckpointError("model", str(folder), allowed) from error


def read_llama(folder: Path) -> Llama:
    """The model in `folder`, an exported one or a run's newest checkpoint, in float32."""
    if (folder / "config.json").exists():
        return read_exported(folder)
    return read_checkpoint(folder)


def export(
    model: Llama,
    tokenizer_from: Path,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write `model` and the tokenizer found in `tokenizer_from` to `folder`.

    `more` are keys of config.json beside Llama's own.
    """
    run_folder.make(folder, "TO")
    tensors = {name: value.to(dtype) for name, value in to_llama_names(model).items()}
    part = folder / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.chmod(0o644)
    part.replace(folder / "model.safetensors")
    special = special_ids(tokenizer_from)
    config = {**llama_config(model.shape), **special}
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    config.update(more or {})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {**special, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    copy_tokenizer(tokenizer_from, folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Put the tokenizer files that `source` has into `folder`, which may be the same."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        file = source / name
        if file.is_file() and file.resolve() != (folder / name).resolve():
            shutil.copyfile(file, folder / name)


def keep_special_ids(target: Path, folder: Path) -> None:
    """Note the ids that begin and end a text for the target in `target`, for `export`."""
    file = target / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    found = {name: config.get(name) for name in ("bos_token_id", "eos_token_id")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SPECIAL).write_text(json.dumps(found) + "\n")


def special_ids(run: Path) -> dict[str, Any]:
    """Those that were noted in a run's folder, or the packaged tokenizer's."""
    path = run / SPECIAL
    if path.is_file():
        known: dict[str, Any] = json.loads(path.read_text())
        return known
    return dict(PACKAGED_IDS)
