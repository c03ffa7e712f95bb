"""Models with random weights in published shapes, made on the device: what a step costs depends on
sizes alone. They run through the package's own loader, as checkpoints do."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from foretoken.kv.store import KVStore
from foretoken.models import LoadOptions
from foretoken.models.load import layer_builder
from foretoken.models.tensors import SpanLayout
from foretoken.quant import Weights
from foretoken.runtime.runner import Runner
from foretoken.shape import ModelShape

_LLAMA: Final = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
                 "rope_theta": 500000.0, "torch_dtype": "bfloat16", "attention_bias": False,
                 "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
                 "eos_token_id": 2}  # fmt: skip
_TINY: Final = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500,
                "max_position_embeddings": 512}  # fmt: skip
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "llama-8b": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336,
                 "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 16384,
                 "tie_word_embeddings": False},
    "llama-1b": {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192,
                 "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 16384,
                 "tie_word_embeddings": True},
    "tiny": {**_LLAMA, **_TINY, "intermediate_size": 256, "tie_word_embeddings": False},
}  # fmt: skip
_MIXTURE: Final = {**_LLAMA, "num_hidden_layers": 8, "max_position_embeddings": 16384,
                   "tie_word_embeddings": False}  # fmt: skip
MIXTURES: Final[dict[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": {**_MIXTURE, "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
                      "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
                      "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                      "norm_topk_prob": True, "intermediate_size": 6144, "vocab_size": 151936,
                      "rms_norm_eps": 1e-6, "architectures": ["Qwen3MoeForCausalLM"]},
    "gpt-oss-20b": {**_MIXTURE, "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64,
                    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32,
                    "num_experts_per_tok": 4, "intermediate_size": 2880, "vocab_size": 201088,
                    "sliding_window": 128, "attention_bias": True,
                    "architectures": ["GptOssForCausalLM"]},
}  # fmt: skip
"""Eight layers of each, which any card holds."""
_FEW: Final = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
               "moe_intermediate_size": 64, "intermediate_size": 64}  # fmt: skip
MIXTURES.update({f"tiny {name}": {**of, **_TINY, **_FEW} for name, of in MIXTURES.items()})


class RandomWeights:
    """A checkpoint of any names: small random numbers, so that nothing overflows."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self._dtype
        if "norm" in name:
            return torch.ones(*shape, device=self._device, dtype=dtype)
        found = torch.randn(*shape, device=self._device, dtype=dtype)
        return found.mul_(shape[-1] ** -0.5)

    keep = take

    def matrix(self, module: str, shape: tuple[int, int]) -> Weights:
        return self.take(module, shape)

    table = matrix

    def ignore(self, name: str) -> None:
        """There are no names."""

    def finish(self) -> None:
        """Nothing is left over."""


def random_runner(
    name: str, folder: Path, device: torch.device, dtype: torch.dtype, tokens: int | None = None
) -> tuple[Runner, ModelShape]:
    """One of SHAPES or MIXTURES over pages for 64 sequences of a thousand tokens, or for so many
    tokens."""
    (folder / "config.json").write_text(json.dumps({**SHAPES, **MIXTURES}[name]))
    shape = ModelShape.from_config(folder)
    options = LoadOptions(dtype=dtype, device=device, batch_invariant=True, page_size=16)
    with torch.inference_mode():
        model = layer_builder(RandomWeights(device, dtype), shape, options).model()
    pages = -(-(tokens or 64 * 1100) // options.page_size)
    store = KVStore(shape, num_pages=pages, page_size=options.page_size, dtype=dtype, device=device)
    return Runner(model, store), shape


def write_random_eagle3(name: str, folder: Path, vocabulary: int) -> Path:
    """A random EAGLE-3 head for one of SHAPES in the published format: none of its drafts is right,
    and they cost what a trained one's do."""
    shape = SHAPES[name]
    hidden, inner, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, keys = shape["num_attention_heads"] * size, shape["num_key_value_heads"] * size
    matrices = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (vocabulary, hidden),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    tensors = {
        f"{one}.weight": torch.randn(*of, dtype=torch.bfloat16).mul_(of[1] ** -0.5)
        for one, of in matrices.items()
    }
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm",
                 "midlayer.post_attention_layernorm"):  # fmt: skip
        tensors[f"{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors["d2t"] = torch.zeros(vocabulary, dtype=torch.int64)
    layers = shape["num_hidden_layers"]
    points = [2, layers // 2, layers - 3] if layers > 8 else list(range(layers))[:3]
    config = {**shape, "num_hidden_layers": 1, "draft_vocab_size": vocabulary,
              "eagle_aux_hidden_state_layer_ids": points,
              "architectures": ["LlamaForCausalLMEagle3"]}  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def rows_at(
    batch: int, rows: int, place: int, page_size: int
) -> tuple[list[SpanLayout], list[list[int]]]:
    """So many sequences, each with so many rows from a place on; and tokens for them."""
    pages = -(-(place + rows) // page_size)
    layouts = [
        SpanLayout(
            start=place,
            num_tokens=rows,
            page_table=list(range(i * pages, (i + 1) * pages)),
        )
        for i in range(batch)
    ]
    return layouts, [[7 + i % 90] * rows for i in range(batch)]
