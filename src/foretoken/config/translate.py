"""Names of other engines: those that mean something of ours, and those that change nothing here.

A name whose meaning is the same is taken for ours. A key whose part is not built is accepted at
its neutral value; any other name of the table of other engines says what to write instead.
Torch-free.
"""

import logging
from collections.abc import Mapping
from typing import Any

from foretoken.config.method_registry import known_methods, method_names
from foretoken.config.other_engines import OtherName, find_other, other_names, other_values
from foretoken.config.reader import VALUE, KeyTable, is_int
from foretoken.errors import ConfigError, NotYetError

logger = logging.getLogger("foretoken")

_ANSWERED = {
    row.name: row.say for row in other_names() if row.kind in ("flags", "keys") and row.say
}
"""Names that are not taken -> what to write instead."""

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
        "data_parallel_size": (1,),
        "enable_lora": (False,),
        "cpu_offload_gb": (0, 0.0),
        "hf_overrides": (None,),
        "limit_mm_per_prompt": (None,),
        "compilation_config": (None,),
    },
    removed={
        row.name: f'speculative_config={{"{row.name}": {VALUE}}}'
        for row in other_names()
        if row.kind == "keys" and not row.say
    }
    | _ANSWERED,
)
"""Keywords of `LLM`."""

SPECULATIVE_KEYS = KeyTable(
    where="speculative_config",
    neutral={
        "enable_adaptive_verification": (False,),
        "moe_backend": (None, "auto"),
        "attention_backend": (None, "auto"),
        "draft_load_config": (None,),
        "code_revision": (None,),
        "enforce_eager": (None, True, False),
        "fly_window_size": (None,),
        "fly_entropy_threshold": (0.3,),
        "fly_entropy_top_k": (3,),
        "disable_padded_drafter_batch": (True,),
        "draft_tensor_parallel_size": (None, 1),
        "disable_eagle_block_drop": (False,),
        "disable_lookahead_block_hashes": (False,),
        "draft_lm_head_quantization": (None,),
        "use_local_argmax_reduction": (False,),
    },
    removed=_ANSWERED,
    gone={
        "policy": "nothing: adaptive_speculation chooses among drafters in each step; where that "
        "is off, the first in the list that has a draft serves",
        "disable_padded_drafter_batch": "True or left out: each sequence is fed what it misses",
        "draft_tensor_parallel_size": "1 or left out: a drafter runs in one process",
        "draft_expected_gain": "nothing: adaptive_speculation plans drafts by what they save; "
        "draft_confidence_threshold ends those that look unlikely",
    },
)
"""Keys of `speculative_config`."""

_STEPS, _TOP_K, _ROWS = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
"""SGLang's three words for the shape of a draft."""


def key_names() -> frozenset[str]:
    """Names of other engines that `speculative_config` takes for a key of ours, or answers."""
    rows = (row for row in other_names() if row.kind in ("flags", "keys"))
    return frozenset(row.name for row in rows if row.say or row.key not in (None, row.name))


def accepted_flags() -> frozenset[str]:
    """Keywords of `LLM` that belong into `speculative_config` and are put there."""
    found = {row.name for row in other_names() if row.kind == "flags" and row.key}
    return frozenset({*found, _ROWS})


def with_our_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """`speculative_config` under our keys and values; a line of log per name that was changed.

    Raises:
        ConfigError: one setting under two names, with different values; or a method that another
            engine has and Foretoken has not.
    """
    result: dict[str, Any] = {}
    for written, value in _with_our_shape(given).items():
        name = written.replace("-", "_")
        row = find_other("keys", name) or find_other("flags", name)
        key = row.key if row is not None and row.key else name
        ours = _our_value(key, value, row)
        if key != name or ours != value:
            _note(name, value, key, ours)
        _put(result, key, ours, f"speculative_config.{written}")
    word, ours = given.get("method"), result.get("method")
    for method in known_methods():
        if method.name == ours and isinstance(word, str):
            for key, value in method.aliases.get(word, {}).items():
                result.setdefault(key, value)
    return result


def _with_our_shape(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """SGLang's shape of a draft in our words: a chain, or a tree of levels.

    SGLang's numbers say each other: along a chain, rows are one more than the steps.
    A block of drafts takes one step, whatever is said.
    """
    named = {key.replace("-", "_"): key for key in given}
    steps, rows = (given.get(named.get(name, "")) for name in (_STEPS, _ROWS))
    counts = [count for count in (steps, rows) if count is not None]
    if not counts or not all(is_int(count, 1) for count in counts):
        return given
    top_k = given.get(named.get(_TOP_K, ""), 1)
    rest = {k: v for k, v in given.items() if k.replace("-", "_") not in (_STEPS, _TOP_K, _ROWS)}
    drafts = None if rows is None else max(1, rows - 1)
    blocks = _drafts_blocks(given, named)
    if top_k == 1:
        found = {"num_speculative_tokens": drafts if steps is None or blocks else steps}
    else:
        depth = None if blocks else steps
        found = {"tree_top_k": top_k, "tree_depth": depth, "num_speculative_tokens": drafts}
    found = {key: value for key, value in found.items() if value is not None}
    logger.info("SGLang's shape of a draft is taken as %s", found)
    for key, value in found.items():
        _put(rest, key, value, f"speculative_config.{_STEPS}")
    return rest


def _drafts_blocks(given: Mapping[str, Any], named: Mapping[str, str]) -> bool:
    """Whether the method among these names makes all its drafts in one pass."""
    words = (given.get(named.get(name, "")) for name in ("method", "speculative_algorithm"))
    rows = [find_other("methods", word) for word in words]
    ours = {row.method or row.name for row in rows if row is not None}
    return any(method.name in ours and method.in_one_pass for method in known_methods())


def _our_value(key: str, value: object, row: OtherName | None) -> object:
    """The value of our `key` in our words."""
    if key == "method":
        return our_method(value)
    word = str(value).lower() if isinstance(value, bool) else value
    if not isinstance(word, str):
        return value
    named = {} if row is None else row.values
    return named.get(word, other_values(key).get(word, value))


def our_method(word: object, where: str = "speculative_config.method") -> object:
    """The word of the method that `word` means; others are left for the table of methods to judge.

    Raises:
        ConfigError: a method of another engine that has no counterpart here, with what to type.
        NotYetError: one that has a counterpart, which is not built.
    """
    if not isinstance(word, str):
        return word
    for method in known_methods():
        if (word == method.name and method.is_built) or word in method.aliases:
            return method.name
    row = find_other("methods", word)
    if row is None:
        return word
    if row.say:
        raise ConfigError(where, word, row.say)
    ours = row.method or row.name
    if any(method.name == ours and not method.is_built for method in known_methods()):
        raise NotYetError(where, word, f"{', '.join(method_names())} ({ours!r} is not yet built)")
    return ours


def with_flags_gathered(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `LLM` with flags of other engines moved into `speculative_config`.

    Raises:
        ConfigError: a flag contradicts the speculative_config beside it, or a key of
            speculative_config stands outside of it.
    """
    known = accepted_flags()
    flags = {k: v for k, v in given.items() if k.replace("-", "_") in known}
    if not flags:
        return dict(given)
    rest = {k: v for k, v in given.items() if k not in flags}
    beside = rest.get("speculative_config")
    if beside is not None and not isinstance(beside, Mapping):
        allowed = f"a dictionary beside {', '.join(flags)}"
        raise ConfigError("speculative_config", beside, allowed)
    merged = with_our_names(beside or {})
    for name, own in with_our_names(flags).items():
        _put(merged, name, own, name)
    return {**rest, "speculative_config": merged}


def _put(into: dict[str, Any], name: str, value: object, where: str) -> None:
    if name in into and into[name] != value:
        allowed = f"one value of {name}, which is also given as {into[name]!r}"
        raise ConfigError(where, value, allowed)
    into[name] = value


def _note(given: str, value: object, key: str, ours: object) -> None:
    if value == ours:
        logger.info("%s is taken as speculative_config.%s", given, key)
    else:
        logger.info("%s=%r is taken as speculative_config.%s=%r", given, value, key, ours)
