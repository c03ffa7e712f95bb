"""Names of other engines: those that mean something of ours, and those that change nothing here.

A name whose meaning is the same is taken for ours. A key whose part is not built is accepted at
its neutral value; one that was dropped upstream says what to write instead. Torch-free.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretoken.config.methods import find_method, known_methods
from foretoken.config.reader import KeyTable
from foretoken.errors import ConfigError

logger = logging.getLogger("foretoken")


@dataclass(frozen=True, slots=True)
class Alias:
    """A key of `speculative_config`, or a keyword of `LLM`, as another engine calls it."""

    name: str
    key: str
    """Our key in `speculative_config`."""
    origin: str
    """Whose name it is."""
    renamed: Mapping[object, object] = field(default_factory=dict)
    """Values that have another name too; others stay. Those of methods are in their table."""

    @property
    def values(self) -> Mapping[object, object]:
        """Values that have another name too, and ours."""
        if self.key != "method":
            return self.renamed
        rows = known_methods()
        if self.origin == _TRT:
            return {word: row.name for row in rows for word in row.tensorrt}
        return {word: row.name for row in rows for word in row.aliases}


_OLD_RULES: dict[object, object] = {
    "rejection_sampler": "standard",
    "typical_acceptance_sampler": "typical",
    "strict": "matching",
    "probabilistic": "standard",
}
_OLD, _TRT = "vLLM, older", "TensorRT-LLM"

ALIASES = (
    Alias("method", "method", "another name of the method"),
    Alias("rejection_sample_method", "rejection_sample_method", _OLD, _OLD_RULES),
    Alias("acceptance_method", "rejection_sample_method", _OLD, _OLD_RULES),
    Alias("spec_decoding_acceptance_method", "rejection_sample_method", _OLD, _OLD_RULES),
    Alias("typical_acceptance_sampler_posterior_threshold", "posterior_threshold", _OLD),
    Alias("typical_acceptance_sampler_posterior_alpha", "posterior_alpha", _OLD),
    Alias("speculative_model", "model", _OLD),
    Alias("speculative_model_revision", "revision", _OLD),
    Alias("speculative_max_model_len", "max_model_len", _OLD),
    Alias("speculative_draft_tensor_parallel_size", "draft_tensor_parallel_size", _OLD),
    Alias("speculative_disable_by_batch_size", "disable_by_batch_size", _OLD),
    Alias("ngram_prompt_lookup_max", "prompt_lookup_max", _OLD),
    Alias("ngram_prompt_lookup_min", "prompt_lookup_min", _OLD),
    Alias("speculative_token_tree", "choices", _OLD),
    Alias("speculative_eagle_topk", "tree_top_k", "SGLang"),
    Alias("speculative_num_steps", "tree_depth", "SGLang"),
    Alias("dynamic_tree_max_topK", "tree_top_k", _TRT),
    Alias("medusa_choices", "choices", _TRT),
    Alias("eagle_choices", "choices", _TRT),
    Alias("decoding_type", "method", _TRT),
    Alias("max_draft_len", "num_speculative_tokens", _TRT),
    Alias("speculative_model_dir", "model", _TRT),
    Alias("max_matching_ngram_size", "prompt_lookup_max", _TRT),
    Alias(
        "use_rejection_sampling",
        "rejection_sample_method",
        _TRT,
        {True: "standard", False: "matching"},
    ),
)
"""Keys of `speculative_config`."""

FLAGS = (
    Alias("num_speculative_tokens", "num_speculative_tokens", _OLD),
    *(alias for alias in ALIASES if alias.origin == _OLD and alias.name.startswith("spec")),
    *(alias for alias in ALIASES if alias.origin == _OLD and alias.name.startswith("typical")),
    *(alias for alias in ALIASES if alias.origin == _OLD and alias.name.startswith("ngram")),
)
"""Keywords of `LLM` from before vLLM had a `speculative_config`."""

ENGINE_KEYS = KeyTable(
    where="LLM",
    neutral={
        "trust_remote_code": (False,),
        "enforce_eager": (True, False),
        "load_format": ("auto", "safetensors"),
        "tokenizer_mode": ("auto",),
        "skip_tokenizer_init": (False,),
        "tokenizer_revision": (None,),
        "enable_chunked_prefill": (None, True),
        "disable_custom_all_reduce": (False, True),
        "distributed_executor_backend": (None,),
        "pipeline_parallel_size": (1,),
        "data_parallel_size": (1,),
        "enable_lora": (False,),
        "cpu_offload_gb": (0, 0.0),
        "hf_overrides": (None,),
        "limit_mm_per_prompt": (None,),
        "compilation_config": (None,),
    },
    removed={
        "use_v2_block_manager": "leave it out: pages are always block-managed",
        "max_seq_len_to_capture": "leave it out: there are no graphs to capture",
        "swap_space": "leave it out: preempted requests are recomputed",
    },
)
"""Keywords of `LLM`."""

SPECULATIVE_KEYS = KeyTable(
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
"""Keys of `speculative_config`."""


def with_our_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """`speculative_config` under our keys and values; a line of log per name that was changed.

    Raises:
        ConfigError: one setting under two names, with different values.
    """
    table = {alias.name: alias for alias in ALIASES}
    result: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        alias = table.get(name)
        values = {} if alias is None else alias.values
        if alias is not None and isinstance(value, str | bool) and value in values:
            _note(f"{name}={value!r}", f"{alias.key}={values[value]!r}", alias.origin)
            name, value = alias.key, values[value]
        elif alias is not None and alias.key != name:
            _note(name, alias.key, alias.origin)
            name = alias.key
        _put(result, name, value, f"speculative_config.{key}")
    word, method = given.get("method"), result.get("method")
    if word != method and isinstance(word, str):
        for key, value in find_method(method).aliases.get(word, {}).items():
            result.setdefault(key, value)
    return result


def with_flags_gathered(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `LLM` with older speculation flags moved into `speculative_config`.

    Raises:
        ConfigError: a flag contradicts the speculative_config beside it.
    """
    table = {alias.name: alias for alias in FLAGS}
    flags = {k: v for k, v in given.items() if k.replace("-", "_") in table}
    if not flags:
        return dict(given)
    rest = {k: v for k, v in given.items() if k not in flags}
    beside = rest.get("speculative_config")
    if beside is not None and not isinstance(beside, Mapping):
        allowed = f"a dictionary beside {', '.join(flags)}"
        raise ConfigError("speculative_config", beside, allowed)
    merged = with_our_names(beside or {})
    for key, value in flags.items():
        _note(key, f"speculative_config.{table[key.replace('-', '_')].key}", _OLD)
        for name, own in with_our_names({key: value}).items():
            _put(merged, name, own, key)
    return {**rest, "speculative_config": merged}


def _put(into: dict[str, Any], name: str, value: object, where: str) -> None:
    if name in into and into[name] != value:
        allowed = f"one value of {name}, which is also given as {into[name]!r}"
        raise ConfigError(where, value, allowed)
    into[name] = value


def _note(given: str, ours: str, origin: str) -> None:
    logger.info("%s (%s) is taken as %s", given, origin, ours)
