"""Random tiny checkpoints of every family, made by transformers' own classes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

VOCAB = 67

BASE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 24,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
MINISTRAL3 = {
    **YARN, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 1.5, 2.5, 4.0],
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 9}

OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama grouped tied": ("Llama", {"tie_word_embeddings": True}),
    "llama plain heads untied": ("Llama", {"num_key_value_heads": 4}),
    "llama one key head, odd sizes": (
        "Llama",
        {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 14, "hidden_size": 45},
    ),
    "llama other theta": (
        "Llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
    ),
    "llama yarn rope": ("Llama", {"rope_parameters": YARN}),
    "llama yarn rope, all fields": (
        "Llama",
        {
            "rope_parameters": {
                **YARN, "beta_fast": 20.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 0.4,
                "truncate": False,
            }
        },
    ),
    "mistral window": ("Mistral", {"sliding_window": 9, "head_dim": 8}),
    "mistral no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 upper window tied": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 17,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3 wide heads": ("Qwen3", {"head_dim": 24, "num_attention_heads": 6}),
    "qwen3 tied": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3 biases and window": (
        "Qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "phi3 window": ("Phi3", {"sliding_window": 21, "num_key_value_heads": 4}),
    "phi3 partial rotary": (
        "Phi3",
        {
            "hidden_size": 64,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "ministral3": ("Ministral3", {"rope_parameters": MINISTRAL3, "head_dim": 16}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3 some layers with a window": (
        "SmolLM3",
        {
            "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "use_sliding_window": True,
            "sliding_window": 9, "attention_bias": True, "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2": ("Olmo2", {"num_attention_heads": 6}),
    "olmo2 biases, one key head": (
        "Olmo2",
        {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 1.3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 12.0}),
    "gemma2 without caps": (
        "Gemma2",
        {
            **GEMMA,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "num_hidden_layers": 3,
        },
    ),
    "gemma3 two kinds of positions": (
        "Gemma3Text",
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3 usual layers": ("Gemma3Text", {**GEMMA, "num_hidden_layers": 7}),
}  # fmt: skip

MULTI_HEAD = {"num_key_value_heads": 4}
BY_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {**MULTI_HEAD, "n_inner": 72}),
    "gpt2, scores scaled by layer": (
        "GPT2",
        {**MULTI_HEAD, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt_neox": ("GPTNeoX", MULTI_HEAD),
    "gpt_neox, one residual, untied": (
        "GPTNeoX",
        {
            **MULTI_HEAD,
            "use_parallel_residual": False,
            "tie_word_embeddings": False,
            "attention_bias": False,
        },
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 11, "use_bias": True}),
    "cohere": ("Cohere", {"logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {"sliding_window": 10, "num_hidden_layers": 4, "logit_scale": 0.5}),
    "granite": ("Granite", {"attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "phi": ("Phi", {}),
    "opt": ("OPT", {**MULTI_HEAD, "ffn_dim": 80, "word_embed_proj_dim": 48, "dropout": 0.0}),
}
"""Run through transformers."""
FULL_ONLY = (
    "gpt2, scores scaled by layer", "gpt_neox, one residual, untied", "granite", "phi", "opt",
)  # fmt: skip
"""Tried in the long suite only."""


def transformers_cases() -> list[Any]:
    full = [pytest.mark.slow]
    return [pytest.param(case, marks=full if case in FULL_ONLY else []) for case in BY_TRANSFORMERS]


def write_checkpoint(folder: Path, kind: str, changes: dict[str, Any], **save: Any) -> Any:
    """Save a random Hugging Face model, norms and biases included, and return it."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **changes})
    make: Any = transformers.AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder, **save)
    return model


def expected_logits(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def expected_greedy(model: Any, ids: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
        )
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens
