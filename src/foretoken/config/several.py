"""How a `speculative_config` with `drafters` is split: what is common, what is each drafter's.

Knows which keys belong where, not what they mean.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.config.keys import require
from foretoken.errors import ConfigError

OWN_KEYS = (
    "choices",
    "model",
    "name",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    "min_speculative_tokens",
    "draft_confidence_threshold",
    "draft_expected_gain",
    "disable_padded_drafter_batch",
    "draft_sample_method",
    "parallel_drafting",
    "quantization",
    "tree_depth",
    "tree_top_k",
    "kv_cache_dtype",
    "use_heterogeneous_vocab",
    "use_string_matching",
    "max_model_len",
    "revision",
)
"""Keys of one drafter: an error beside `drafters`."""
TRUE_BY_DEFAULT = ("disable_padded_drafter_batch",)
COMMON_KEYS = (
    "drafters",
    "policy",
    "rejection_sample_method",
    "posterior_threshold",
    "posterior_alpha",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "num_speculative_tokens_per_batch_size",
    "disable_by_batch_size",
)
"""Keys of all drafters together: an error inside `drafters`."""


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The dictionaries of `drafters`, each completed with the common number of drafts.

    Raises:
        ConfigError: `drafters` is not a list of dictionaries, or a key stands where it cannot.
    """
    entries = given.get("drafters")
    allowed = "a list of at least one dictionary, each with its method"
    listed = isinstance(entries, Sequence) and not isinstance(entries, str) and len(entries) > 0
    require("speculative_config.drafters", entries, listed, allowed)
    for key in OWN_KEYS:
        unset = (None,) if key in TRUE_BY_DEFAULT else (None, False)
        if given.get(key) not in unset:
            raise ConfigError(f"speculative_config.{key}", given[key], "inside one of the drafters")
    found = []
    for entry in entries or ():
        require("speculative_config.drafters", entry, isinstance(entry, Mapping), allowed)
        for key in COMMON_KEYS:
            if key in entry:
                where = f"speculative_config.drafters.{key}"
                raise ConfigError(where, entry[key], "outside of drafters: it holds for all")
        common = given.get("num_speculative_tokens")
        own = {} if common is None else {"num_speculative_tokens": common}
        found.append({**own, **entry})
    return tuple(found)


def check_names(names: Sequence[str]) -> None:
    """Check that drafters can be told apart.

    Raises:
        ConfigError: two share a name, or one takes a name of the engine's own.
    """
    for index, name in enumerate(names):
        taken = name in names[:index] or name in ("prediction", "grammar")
        allowed = "a name for each drafter that no other has (not `prediction` or `grammar`)"
        require("speculative_config.drafters.name", name, not taken, allowed)
