"""Mixtures of experts as their makers publish them: what their config.json says is understood, and
the sizes are those of the model cards.

The guarded bugs: a field that only published files have is refused, or read as another one.
"""

from typing import Any

import pytest

from foretoken.errors import UnsupportedModelError
from foretoken.shape import ModelShape

SILU = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_scaling": None, "sliding_window": None}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip


def sized(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    return {**SILU, **dict(zip(SIZES, sizes, strict=True)), "model_type": model_type, **more}


QWEN3 = sized(
    "qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 40960,
    head_dim=128, attention_bias=False, decoder_sparse_step=1, mlp_only_layers=[],
    max_window_layers=48, use_sliding_window=False, moe_intermediate_size=768, num_experts=128,
    num_experts_per_tok=8, norm_topk_prob=True, rope_theta=1e6,
)  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 4096, "truncate": False,
}  # fmt: skip
GPT_OSS = sized(
    "gpt_oss", 201088, 2880, 2880, 36, 64, 8, 131072,
    head_dim=64, attention_bias=True, num_local_experts=128, num_experts_per_tok=4,
    experts_per_token=4, sliding_window=128, swiglu_limit=7.0, rope_theta=150000,
    layer_types=["sliding_attention", "full_attention"] * 18, initial_context_length=4096,
    rope_scaling=YARN, quantization_config={"quant_method": "mxfp4"},
)  # fmt: skip
MIXTRAL = sized(
    "mixtral", 32000, 4096, 14336, 32, 32, 8, 32768, num_local_experts=8, num_experts_per_tok=2
)
GRANITE = sized(
    "granitemoe", 49155, 1536, 512, 32, 24, 8, 131072,
    attention_multiplier=0.015625, embedding_multiplier=12.0, logits_scaling=6.0,
    residual_multiplier=0.22, num_local_experts=40, num_experts_per_tok=8,
    tie_word_embeddings=True,
)  # fmt: skip
GLM = sized(
    "glm4_moe", 151552, 4096, 10944, 46, 96, 8, 131072,
    head_dim=128, attention_bias=True, partial_rotary_factor=0.5, moe_intermediate_size=1408,
    norm_topk_prob=True, n_group=1, topk_group=1, n_routed_experts=128, n_shared_experts=1,
    routed_scaling_factor=1.0, num_experts_per_tok=8, first_k_dense_replace=1,
    num_nextn_predict_layers=1, use_qk_norm=False,
)  # fmt: skip
GLM_4_6 = {
    **GLM, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_routed_experts": 160, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
    "num_hidden_layers": 92, "use_qk_norm": True, "max_position_embeddings": 202752,
}  # fmt: skip
DOTS = sized(
    "dots1", 152064, 4096, 10944, 62, 32, 32, 32768,
    moe_intermediate_size=1408, n_group=None, topk_group=None, n_routed_experts=128,
    n_shared_experts=2, norm_topk_prob=True, num_experts_per_tok=6, first_k_dense_replace=1,
    routed_scaling_factor=2.5, scoring_func="noaux_tc", topk_method="noaux_tc", moe_layer_freq=1,
)  # fmt: skip
ERNIE = sized(
    "ernie4_5_moe", 103424, 2560, 12288, 28, 20, 4, 131072,
    use_bias=False, moe_num_experts=64, moe_num_shared_experts=2, moe_layer_start_index=1,
    moe_layer_end_index=27, moe_intermediate_size=1536, moe_capacity=[64, 64, 64],
    moe_gate="topk", moe_k=6, moe_layer_interval=1, moe_use_aux_free=True,
    num_nextn_predict_layers=1, tie_word_embeddings=True,
)  # fmt: skip
HUNYUAN = sized(
    "hunyuan_v1_moe", 128167, 4096, 3072, 32, 32, 8, 32768,
    attention_head_dim=128, moe_intermediate_size=[3072] * 32, moe_topk=[8] * 32, num_experts=64,
    num_shared_expert=[1] * 32, n_group=False, topk_group=False, routed_scaling_factor=False,
    kv_lora_rank=None, use_mla=False, use_cla=False, use_qk_norm=True, norm_topk_prob=True,
    image_token_id=9, tie_word_embeddings=True,
    rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0,
                  "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
)  # fmt: skip
MINIMAX = sized(
    "minimax_m2", 200064, 3072, 1536, 62, 48, 8, 196608,
    head_dim=128, rotary_dim=64, num_local_experts=256, num_experts_per_tok=8, num_mtp_modules=3,
    mtp_transformer_layers=1, attn_type_list=[1] * 62, mlp_intermediate_size=8192,
    qk_norm_type="per_layer", scoring_func="sigmoid", shared_intermediate_size=0, use_qk_norm=True,
    use_routing_bias=True, use_mtp=True, quantization_config={**FP8, "fmt": "float8_e4m3fn"},
)  # fmt: skip
HY3 = sized(
    "hy_v3", 120832, 4096, 13312, 80, 64, 8, 262144,
    head_dim=128, moe_intermediate_size=1536, expert_hidden_dim=1536, num_experts=192,
    num_experts_per_tok=8, num_shared_experts=1, first_k_dense_replace=1, qk_norm=True,
    num_nextn_predict_layers=1, route_norm=True, moe_router_use_sigmoid=True,
    moe_router_enable_expert_bias=True, router_scaling_factor=2.826, enable_lm_head_fp32=True,
    rope_parameters={"rope_type": "default", "rope_theta": 11158840.0},
)  # fmt: skip
TRINITY = sized(
    "afmoe", 200192, 2048, 6144, 32, 32, 4, 131072,
    head_dim=128, global_attn_every_n_layers=4, moe_intermediate_size=1024, mup_enabled=True,
    n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1, num_dense_layers=2,
    num_experts=128, num_experts_per_tok=8, num_shared_experts=1, route_norm=True,
    route_scale=2.826, score_func="sigmoid", sliding_window=2048,
)  # fmt: skip
ROPES = {
    "full_attention": {
        "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4", "dtype": "bfloat16", "image_token_id": 258880, "audio_config": None,
    "text_config": sized(
        "gemma4_text", 262144, 2816, 2112, 30, 16, 8, 262144,
        hidden_act=None, hidden_activation="gelu_pytorch_tanh", head_dim=256, global_head_dim=512,
        attention_k_eq_v=True, enable_moe_block=True, expert_intermediate_size=None,
        moe_intermediate_size=704, num_experts=128, top_k_experts=8, num_global_key_value_heads=2,
        num_kv_shared_layers=0, hidden_size_per_layer_input=0, final_logit_softcapping=30.0,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 5, rope_parameters=ROPES,
        sliding_window=1024, use_bidirectional_attention="vision", use_double_wide_mlp=False,
        tie_word_embeddings=True, vocab_size_per_layer_input=262144,
    ),
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    "Qwen3-30B-A3B": (QWEN3, 30.53, 3.04),
    "Qwen3-Coder-30B-A3B, FP8": (
        {
            **QWEN3, "qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0,
            "max_window_layers": 28, "intermediate_size": 5472,
            "quantization_config": {**FP8, "fmt": "e4m3"},
        },
        30.53,
        3.04,
    ),
    "Qwen3-235B-A22B": (
        {
            **QWEN3, "hidden_size": 4096, "moe_intermediate_size": 1536, "num_attention_heads": 64,
            "num_hidden_layers": 94,
        },
        235.09,
        21.57,
    ),
    "gpt-oss-120b": (GPT_OSS, 116.83, 5.13),
    "Mixtral-8x7B": (MIXTRAL, 46.70, 12.75),
    "granite-3.1-3b-a800m": (GRANITE, 3.30, 0.88),
    "GLM-4.5-Air": (GLM, 106.85, 12.80),
    "GLM-4.6": (GLM_4_6, 352.80, 32.86),
    "dots.llm1": (DOTS, 142.77, 13.39),
    "ERNIE-4.5-21B-A3B": (ERNIE, 21.83, 3.35),
    "Hunyuan-A13B": (HUNYUAN, 80.39, 12.75),
    "MiniMax-M2": (MINIMAX, 228.69, 10.42),
    "Hy3": (HY3, 295.03, 20.18),
    "Trinity-Mini": (TRINITY, 26.12, 3.06),
    "Gemma-4-26B-A4B": (GEMMA4, 25.23, 3.82),
}  # fmt: skip
"""Fields, and billions of parameters: all, and those that a token is multiplied with."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_that_are_published(name: str) -> None:
    fields, total, active = PUBLISHED[name]
    shape = ModelShape.from_fields(fields)
    assert round(shape.parameter_count() / 1e9, 2) == total
    assert round(shape.step_bytes(1, rows=1) / 1e9, 2) == active


@pytest.mark.parametrize(
    ("published", "other"),
    [
        (TRINITY, {"route_norm": False}),
        (TRINITY, {"score_func": "softmax"}),
        (TRINITY, {"n_group": 8}),
        (HY3, {"route_norm": False}),
        (HY3, {"moe_router_use_sigmoid": False}),
        (MINIMAX, {"scoring_func": "softmax"}),
        (MINIMAX, {"shared_intermediate_size": 512}),
        (MINIMAX, {"qk_norm_type": "per_head"}),
        (MINIMAX, {"quantization_config": {**FP8, "fmt": "e5m2"}}),
    ],
)
def test_what_would_be_run_as_something_else_is_refused(
    published: dict[str, Any], other: dict[str, Any]
) -> None:
    with pytest.raises(
        UnsupportedModelError, match="fmt" if "quant" in str(other) else [*other][0]
    ):
        ModelShape.from_fields({**published, **other})
