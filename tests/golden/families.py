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

MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3}
GROUPED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7, "num_hidden_layers": 3, "head_dim": 16,
}  # fmt: skip
GPT_OSS_ROPE = {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GRANITE = {
    **LOCAL, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
}  # fmt: skip
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 24, "sliding_window": 9, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 1 + ["full_attention"],
    "final_logit_softcapping": 12.0,
}  # fmt: skip
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe some plain layers": (
        "Qwen3Moe",
        {
            **MOE, "head_dim": 12, "num_hidden_layers": 5, "decoder_sparse_step": 2,
            "mlp_only_layers": [3], "attention_bias": True, "use_sliding_window": True,
            "sliding_window": 9, "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("Mixtral", LOCAL),
    "mixtral window": ("Mixtral", {**LOCAL, "sliding_window": 9, "head_dim": 8}),
    "qwen2_moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 40}),
    "qwen2_moe window": (
        "Qwen2Moe",
        {
            **MOE, "shared_expert_intermediate_size": 40, "use_sliding_window": True,
            "sliding_window": 9, "max_window_layers": 3, "num_hidden_layers": 4,
            "norm_topk_prob": True, "decoder_sparse_step": 2,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 2}),
    "gpt_oss": (
        "GptOss",
        {
            **LOCAL, "head_dim": 16, "sliding_window": 9, "num_hidden_layers": 3,
            "rope_parameters": GPT_OSS_ROPE, "intermediate_size": 40, "swiglu_limit": 1.5,
        },
    ),
    "granitemoe": ("GraniteMoe", GRANITE),
    "granitemoeshared": ("GraniteMoeShared", {**GRANITE, "shared_intermediate_size": 40}),
    "glm4_moe": ("Glm4Moe", {**GROUPED, "attention_bias": True}),
    "glm4_moe norms, no groups": (
        "Glm4Moe",
        {
            **GROUPED, "use_qk_norm": True, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
    ),
    "dots1": ("Dots1", {**GROUPED, "norm_topk_prob": True}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2, "num_hidden_layers": 4, "moe_layer_interval": 2,
        },
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 8, "moe_topk": 3, "head_dim": 16}),
    "hunyuan_v1_moe stretched": (
        "HunYuanMoEV1",
        {
            "num_experts": 8, "moe_topk": 3, "head_dim": 16, "attention_bias": True,
            "rope_parameters": {
                "rope_type": "dynamic", "rope_theta": 300.0, "alpha": 50.0, "factor": 1.0,
            },
        },
    ),
    "minimax_m2": ("MiniMaxM2", {**LOCAL, "head_dim": 16, "rotary_dim": 8}),
    "hy_v3": (
        "HYV3",
        {**MOE, "head_dim": 16, "num_hidden_layers": 3, "num_shared_experts": 1},
    ),
    "afmoe": (
        "Afmoe",
        {
            **MOE, "head_dim": 16, "num_hidden_layers": 5, "num_dense_layers": 2,
            "sliding_window": 9, "route_scale": 1.3, "mup_enabled": True,
        },
    ),
    "gemma4": ("Gemma4Text", {**GEMMA4, "hidden_size_per_layer_input": 0}),
    "gemma4 experts, keys as values": (
        "Gemma4Text",
        {
            **GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 8,
            "top_k_experts": 3, "moe_intermediate_size": 24, "tie_word_embeddings": False,
        },
    ),
    "gemma4 layers that share": (
        "Gemma4Text",
        {
            **GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
    ),
}  # fmt: skip
"""Every parameter and buffer is random: sinks, biases and scales too."""

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
            if "bias" in name or "sinks" in name:
                parameter.normal_(0, 0.3)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if "bias" in name:
                buffer.uniform_(-0.3, 0.3)
            elif "scalar" in name:
                buffer.uniform_(0.5, 1.5)
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
