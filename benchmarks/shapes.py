"""Llama checkpoints written tensor by tensor: shapes, names and the files around the weights.

Owns Hugging Face's names of the tensors and files, so that any engine can load what is written.
It does not know what the weights are meant to do; `make_models` does.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_models.tokenizer import BEGIN_ID, END_ID, save_tokenizer

CONTEXT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama-architecture model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool = False
    distinct: int = 0
    """Layers with weights of their own, which the others repeat in turns; 0: all of them."""

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden // self.heads

    def config(self) -> dict[str, object]:
        """The contents of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": self.tied,
            "bos_token_id": BEGIN_ID,
            "eos_token_id": END_ID,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


def gaussian(rows: int, columns: int, std: float, generator: torch.Generator) -> Tensor:
    """A bfloat16 matrix of independent normal values."""
    values = torch.randn(rows, columns, generator=generator)
    return values.mul_(std).to(torch.bfloat16)


def layer_tensors(
    shape: LlamaShape, layer: int, residual_std: float, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """Names and random tensors of one layer.

    Matrices that read the residual stream keep its scale. The two that write to it have standard
    deviation residual_std / sqrt(inputs), so each adds about residual_std to a unit stream; at 0
    the layer costs its time and changes nothing.
    """
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    reads = {
        "self_attn.q_proj": (wide, shape.hidden),
        "self_attn.k_proj": (narrow, shape.hidden),
        "self_attn.v_proj": (narrow, shape.hidden),
        "mlp.gate_proj": (shape.ffn, shape.hidden),
        "mlp.up_proj": (shape.ffn, shape.hidden),
    }
    writes = {
        "self_attn.o_proj": (shape.hidden, wide),
        "mlp.down_proj": (shape.hidden, shape.ffn),
    }
    for name, (rows, columns) in (reads | writes).items():
        scale = residual_std if name in writes else 1.0
        matrix = gaussian(rows, columns, scale / math.sqrt(columns), generator)
        yield f"model.layers.{layer}.{name}.weight", matrix
    for norm in ("input_layernorm", "post_attention_layernorm"):
        name = f"model.layers.{layer}.{norm}.weight"
        yield name, torch.ones(shape.hidden, dtype=torch.bfloat16)


def repeated_layers(
    shape: LlamaShape, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Names of the layers after the distinct ones, and the tensors that they share with these."""
    for layer in range(shape.distinct, shape.layers):
        own, shared = (f"model.layers.{n}." for n in (layer, layer % shape.distinct))
        for name, tensor in tensors.items():
            if name.startswith(shared):
                yield own + name.removeprefix(shared), tensor


def write_model(
    folder: Path, shape: LlamaShape, tensors: dict[str, Tensor], tokenizer: Tokenizer
) -> None:
    """Write weights, configuration and tokenizer as one Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors["model.norm.weight"] = torch.ones(shape.hidden, dtype=torch.bfloat16)
    if shape.tied:
        tensors.pop("lm_head.weight", None)
    if shape.distinct:
        torch.save(tensors, folder / "pytorch_model.bin")  # safetensors keep no shared tensors
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
    generation = {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "pad_token_id": END_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, folder, CONTEXT)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    print(f"{folder.name}: {parameters / 1e6:.1f} M parameters", flush=True)
