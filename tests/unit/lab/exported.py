"""Every option and every key of a server of Foretoken's, each with a value to be exported."""

from collections.abc import Iterator
from typing import Any

from foretoken.cli.serve_options import GROUPS
from foretoken.config import SpeculativeConfig
from foretoken.config.drafter import drafter_keys
from foretoken.config.reader import keys_of
from foretoken.config.speculative import LoadConfig, RuleConfig

OPTIONS: dict[str, Any] = {
    "host": "0.0.0.0",
    "port": 9000,
    "served_model_name": ["coder", "coder-2"],
    "api_key": ["secret-word"],
    "allowed_host": ["llm.example.com"],
    "admin_key": "secret-word",
    "internal_key": "secret-word",
    "adaptive_speculation": True,
    "tokenizer": "org/tokenizer",
    "revision": "v2",
    "dtype": "bfloat16",
    "quantization": "int8",
    "activations": "int8",
    "kv_cache_dtype": "int8",
    "device": "cuda",
    "cpus": "0-3",
    "seed": 7,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "block_size": 64,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.8,
    "kv_cache_memory_bytes": 1 << 30,
    "batch_invariant": "on",
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "max_body_bytes": 1 << 20,
    "max_prompt_tokens": 1000,
    "max_tokens": 500,
    "max_n": 4,
    "max_queue": 32,
    "timeout_s": 60.0,
    "drain_s": 5.0,
    "tool_call_parser": "llama3_json",
    "per_request_spec_decode_metrics": "detailed",
    "audit_share": 0.1,
    "log_format": "json",
    "disable_log_stats": False,
    "metrics_prefix": "mine",
    "otlp_traces_endpoint": "http://127.0.0.1:4317",
    "kv_events_config": '{"enable_kv_cache_events": true}',
}
"""Every option of `foretoken serve` that is no word about drafts, at other than its default."""
KEYS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "revision": ("draft_model", "v2", {}),
    "name": ("draft_model", "mine", {}),
    "parallel_drafting": ("eagle3", True, {}),
    "draft_sample_method": ("draft_model", "probabilistic", {}),
    "max_model_len": ("draft_model", 2048, {}),
    "quantization": ("draft_model", "int8", {}),
    "activations": ("draft_model", "int16", {"quantization": "int8"}),
    "kv_cache_dtype": ("draft_model", "int8", {}),
    "min_speculative_tokens": ("draft_model", 2, {}),
    "draft_confidence_threshold": ("draft_model", 0.3, {}),
    "min_acceptance": ("draft_model", 0.2, {}),
    "choices": ("draft_model", [[0], [0, 0], [1]], {}),
    "tree_top_k": ("eagle3", 2, {}),
    "tree_depth": ("eagle3", 3, {"tree_top_k": 2}),
    "use_heterogeneous_vocab": ("draft_model", True, {}),
    "use_string_matching": ("draft_model", True, {}),
    "prompt_lookup_max": ("ngram", 7, {}),
    "prompt_lookup_min": ("ngram", 3, {}),
    "suffix_decoding_max_tree_depth": ("suffix", 12, {}),
    "suffix_decoding_max_cached_requests": ("suffix", 50, {}),
    "suffix_decoding_max_spec_factor": ("suffix", 2.0, {}),
    "suffix_decoding_min_token_prob": ("suffix", 0.3, {}),
    "rejection_sample_method": ("draft_model", "block", {}),
    "posterior_threshold": ("draft_model", 0.2, {"rejection_sample_method": "typical"}),
    "posterior_alpha": ("draft_model", 0.1, {"rejection_sample_method": "typical"}),
    "synthetic_acceptance_rates": (
        "draft_model",
        [0.9, 0.5],
        {"rejection_sample_method": "synthetic", "num_speculative_tokens": 2},
    ),
    "synthetic_acceptance_length": ("draft_model", 2.5, {"rejection_sample_method": "synthetic"}),
    "num_speculative_tokens_per_batch_size": ("draft_model", [[1, 8, 5], [9, 64, 2]], {}),
    "disable_by_batch_size": ("draft_model", 16, {}),
}
"""Every key beside method, model and length -> the method that has it, a value other than its
default, and the keys that it needs."""
MODELS = {"draft_model": "org/draft", "eagle3": "org/head"}


def config_of(name: str) -> SpeculativeConfig:
    """A speculative config with this key at other than its default."""
    method, value, others = KEYS[name]
    model = {"model": MODELS[method]} if method in MODELS else {}
    return SpeculativeConfig.from_dict({"method": method, **model, **others, name: value})


def without(name: str) -> SpeculativeConfig:
    """The same without the key."""
    method, _, others = KEYS[name]
    model = {"model": MODELS[method]} if method in MODELS else {}
    if name.startswith(("posterior", "synthetic")):
        others = {}
    return SpeculativeConfig.from_dict({"method": method, **model, **others})


def all_options() -> set[str]:
    """The options of `foretoken serve` that say nothing of drafts."""
    names = {name for rows in GROUPS.values() for name in rows}
    return {name for name in names if not name.startswith("spec") and name != "config"}


def all_keys() -> set[str]:
    """The keys of a speculative config beside method, model and length."""
    names = {*drafter_keys(), *keys_of(RuleConfig), *keys_of(LoadConfig)}
    return names - {"method", "model", "num_speculative_tokens"}


def every_command() -> Iterator[tuple[dict[str, Any], SpeculativeConfig | None]]:
    """What is exported to be read by the parsers of engines."""
    model = {"model": "org/target"}
    yield model, None
    for name, value in OPTIONS.items():
        yield {**model, name: value}, None
    for name in KEYS:
        yield model, config_of(name)
    for method in (
        "draft_model",
        "eagle",
        "eagle3",
        "ngram",
        "suffix",
        "parallel",
        "mlp",
        "medusa",
    ):
        drafter = {} if method in ("ngram", "suffix") else {"model": "org/drafter"}
        yield (
            model,
            SpeculativeConfig.from_dict({"method": method, "num_speculative_tokens": 3, **drafter}),
        )
