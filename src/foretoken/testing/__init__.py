"""Checks for tests of code that is built on Foretoken, and the tiny checkpoints that they run on.

Shipped with the package so that a new proposer can be put through the same checks as ours.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def write_tiny_llama(folder: Path, *, seed: int = 0, scale: float = 3.0, **changes: Any) -> Path:
    """Write a random Llama checkpoint (float32, no tokenizer) and return its folder.

    Args:
        folder: made if it is not there.
        seed: of the weights.
        scale: of the output embedding: larger gives sharper distributions.
        changes: fields of config.json other than TINY's.
    """
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **TINY, **changes}
    config.setdefault("torch_dtype", "float32")
    generator = torch.Generator().manual_seed(seed)

    def random_matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).div_(columns**0.5)

    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors = {
        "model.embed_tokens.weight": random_matrix(config["vocab_size"], hidden) * scale,
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "self_attn.q_proj.weight"] = random_matrix(queries, hidden)
        tensors[prefix + "self_attn.k_proj.weight"] = random_matrix(keys, hidden)
        tensors[prefix + "self_attn.v_proj.weight"] = random_matrix(keys, hidden)
        tensors[prefix + "self_attn.o_proj.weight"] = random_matrix(hidden, queries)
        tensors[prefix + "mlp.gate_proj.weight"] = random_matrix(inner, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = random_matrix(inner, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = random_matrix(hidden, inner)
        tensors[prefix + "input_layernorm.weight"] = torch.ones(hidden)
        tensors[prefix + "post_attention_layernorm.weight"] = torch.ones(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random_matrix(config["vocab_size"], hidden) * scale
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"))
    return folder
