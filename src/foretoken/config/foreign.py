"""Keys of other engines' `speculative_config` that are no settings here: neutral or removed ones.

Knows values at which they change nothing, and what to write instead; their meaning is not needed.
"""

from foretoken.config.keys import KeyTable

KEYS = KeyTable(
    where="speculative_config",
    neutral={
        "enable_adaptive_verification": (False,),
        "draft_tensor_parallel_size": (None, 1),
        "moe_backend": (None, "auto"),
        "attention_backend": (None, "auto"),
        "draft_load_config": (None,),
        "code_revision": (None,),
        "enforce_eager": (None, True, False),
        "fly_window_size": (None,),
        "fly_entropy_threshold": (0.3,),
        "fly_entropy_top_k": (3,),
        "disable_eagle_block_drop": (False,),
        "disable_lookahead_block_hashes": (False,),
        "draft_lm_head_quantization": (None,),
        "use_local_argmax_reduction": (False,),
    },
    removed={
        "tensor_parallel_size": "draft_tensor_parallel_size",
        "synthetic_acceptance_rate": "synthetic_acceptance_rates",
        "speculative_num_draft_tokens": "num_speculative_tokens, one less: SGLang counts the root",
        "disable_mqa_scorer": "leave it out: drafts are always checked in one pass",
        "disable_logprobs": "leave it out: logprobs are always exact",
    },
)
