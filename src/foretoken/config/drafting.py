"""What a drafter's own settings must be like: suffix look-up, draft lengths, user classes.

Knows no config class; the fields are in `foretoken.config.speculative`, which calls these.
"""

import re
from collections.abc import Sequence
from typing import Any

from foretoken.config import trees
from foretoken.config.keys import is_int, require
from foretoken.config.methods import find_method

WHERE = "speculative_config."
MOST_DRAFTS = 128
TREE_DEPTH = 24
LOOKUP_MAX, LOOKUP_MIN = 5, 2
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\.[A-Z_]\w*")
Schedule = tuple[tuple[int, int, int], ...]


def is_number(value: object, low: float, high: float) -> bool:
    """Whether `value` is a real number (not a bool) in [low, high]."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and low <= value <= high  # type: ignore[operator]


def names_a_class(model: object) -> bool:
    """Whether `model` looks like the dotted path of a class: `package.module.Class`."""
    return isinstance(model, str) and DOTTED.fullmatch(model) is not None


def check_suffix(depth: object, cached: object, factor: object, probability: object) -> None:
    """Check the four suffix_decoding_* values.

    Raises:
        ConfigError: one of them is out of its range.
    """
    where = WHERE + "suffix_decoding_"
    allowed = f"an integer from 2 to {MOST_DRAFTS}"
    deep = is_int(depth, 2) and is_number(depth, 2, MOST_DRAFTS)
    require(where + "max_tree_depth", depth, deep, allowed)
    require(where + "max_cached_requests", cached, is_int(cached, 0), "an integer >= 0")
    ok = is_number(factor, 0, MOST_DRAFTS)
    require(where + "max_spec_factor", factor, ok, f"a number from 0 to {MOST_DRAFTS}")
    ok = is_number(probability, 0, 1)
    require(where + "min_token_prob", probability, ok, "a number in [0, 1]")


def check_lengths(
    method: str, most: int, least: object, confidence: object, has_weights: bool
) -> None:
    """Check min_speculative_tokens and draft_confidence_threshold against the method.

    Raises:
        ConfigError: out of range, or the method has no probabilities of its own.
    """
    ok = is_int(least, 0) and is_number(least, 0, most)
    allowed = f"0 to num_speculative_tokens ({most})"
    require(WHERE + "min_speculative_tokens", least, ok, allowed)
    where = WHERE + "draft_confidence_threshold"
    ok = is_number(confidence, 0, 1) and confidence != 1
    require(where, confidence, ok, "a number in [0, 1)")
    other = "suffix_decoding_min_token_prob" if method == "suffix" else "a method with weights"
    require(where, confidence, confidence == 0 or has_weights, f"0; use {other}")


def check_gain(method: str, given: object, has_weights: bool) -> None:
    """Check draft_expected_gain.

    Raises:
        ConfigError: it is not a boolean, or the method has no probabilities of its own.
    """
    where = WHERE + "draft_expected_gain"
    require(where, given, isinstance(given, bool), "True or False")
    require(where, given, not given or has_weights, f"False: {method} has no weights")


def read_schedule(given: Any, most: int | None) -> Schedule:
    """num_speculative_tokens_per_batch_size as (first, last, drafts) triples.

    Raises:
        ConfigError: not triples, sizes that do not start at 1 or do not ascend, or more drafts
            than `most` (None: no limit).
    """
    where = WHERE + "num_speculative_tokens_per_batch_size"
    limit = MOST_DRAFTS if most is None else most
    allowed = f"[[first, last, drafts], ...], sizes from 1 upwards, 0 to {limit} drafts each"
    triples = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    require(where, given, triples, allowed)
    ranges: list[tuple[int, int, int]] = []
    for entry in given:
        ok = isinstance(entry, Sequence) and len(entry) == 3 and all(is_int(v, 0) for v in entry)
        require(where, given, ok, allowed)
        first, last, drafts = entry
        follows = first > ranges[-1][1] if ranges else first == 1
        require(where, given, follows and last >= first and drafts <= limit, allowed)
        ranges.append((first, last, drafts))
    return tuple(ranges)


def check_vocabularies(method: str, shared: object, strings: object) -> None:
    """Check use_heterogeneous_vocab and use_string_matching.

    Raises:
        ConfigError: not booleans, both, or the method has no tokenizer of its own.
    """
    for name, value in (("use_heterogeneous_vocab", shared), ("use_string_matching", strings)):
        require(WHERE + name, value, isinstance(value, bool), "True or False")
        if not find_method(method).own_tokenizer:
            require(WHERE + name, value, not value, f"False: {method} has no tokenizer")
    where = WHERE + "use_string_matching"
    both = "one of use_heterogeneous_vocab and use_string_matching"
    require(where, True, not (shared and strings), both)


def check_off_from(size: object) -> None:
    """Check disable_by_batch_size.

    Raises:
        ConfigError: it is not an integer >= 2.
    """
    ok = size is None or is_int(size, 2)
    require(WHERE + "disable_by_batch_size", size, ok, "None or an integer >= 2")


def complete(kept: dict[str, Any]) -> dict[str, Any]:
    """Values that follow from others; keys that were given as None are left out."""
    return _complete_length(_complete_lookup(kept))


def _complete_lookup(kept: dict[str, Any]) -> dict[str, Any]:
    """One bound of the n-gram length alone also sets the other where they would cross."""
    low: Any = kept.get("prompt_lookup_min")
    high: Any = kept.get("prompt_lookup_max")
    if is_int(low, 1) and high is None:
        kept["prompt_lookup_max"] = max(low, LOOKUP_MAX)
    if is_int(high, 1) and low is None:
        kept["prompt_lookup_min"] = min(high, LOOKUP_MIN)
    return {k: v for k, v in kept.items() if v is not None}


def _complete_length(kept: dict[str, Any]) -> dict[str, Any]:
    """Draft lengths that follow from other keys: the tree depth, the longest of a schedule."""
    if "num_speculative_tokens" in kept:
        return kept
    if kept.get("choices") is not None:
        return {**kept, "num_speculative_tokens": len(trees.read_choices(kept["choices"]))}
    if kept.get("tree_top_k") is not None:
        nodes = trees.dynamic_nodes(kept["tree_top_k"], kept.get("tree_depth"))
        return {**kept, "num_speculative_tokens": nodes}
    schedule = kept.get("num_speculative_tokens_per_batch_size")
    if schedule is not None:
        longest = max(k for _, _, k in read_schedule(schedule, None))
        return {**kept, "num_speculative_tokens": max(longest, 1)}
    method = find_method(kept["method"])
    if method.default_drafts_key is None:
        return {**kept, "num_speculative_tokens": method.default_drafts}
    depth = kept.get(method.default_drafts_key, TREE_DEPTH)
    return {**kept, "num_speculative_tokens": depth} if is_int(depth, 1) else kept
