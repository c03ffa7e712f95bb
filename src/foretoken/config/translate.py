"""The words that users write, translated once; everything behind it knows our words alone.

Ours are taken, and those of vLLM's current release. Any other name in the table of other engines is
an error that says what to write instead; `foretoken lab lint` and `foretoken lab export` translate
whole commands. Torch-free.
"""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from foretoken.config.method_registry import known_methods, method_names
from foretoken.config.other_engines import OtherName, find_other, other_names, other_values
from foretoken.config.reader import KeyTable
from foretoken.errors import ConfigError, NotYetError

logger = logging.getLogger("foretoken")

_LINT = "; `foretoken lab lint 'COMMAND'` translates the words of other engines"

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

_FLAGS = {
    row.name: row.key
    for row in other_names()
    if (row.engine, row.kind) == ("vllm", "flags") and row.key and not row.gone
}
"""vLLM's short flags, and the keys of `speculative_config` that they stand for."""


def key_names() -> frozenset[str]:
    """Names of other engines that `speculative_config` answers."""
    rows = (row for row in other_names() if row.kind in ("flags", "keys"))
    return frozenset(row.name for row in rows if row.say or row.key not in (None, row.name))


def translate_keywords(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Keywords of `LLM` in our words, of which some are `known`; flags of vLLM's in the config.

    Raises:
        ConfigError: a word of another engine, a key of speculative_config outside of it, or a flag
            that contradicts it.
        NotYetError: a method that is known and not built.
    """
    found: dict[str, Any] = {}
    flags: dict[str, Any] = {}
    for written, value in given.items():
        name = written.replace("-", "_")
        if name in _FLAGS:
            flags[name] = value
        elif name in known or name in ENGINE_KEYS.neutral:
            found[name] = value
        else:
            row = find_other("flags", name) or find_other("keys", name)
            if row is not None:
                raise _answer(f"{ENGINE_KEYS.where}.{name}", name, value, row, outside=True)
            found[written] = value
    config = found.get("speculative_config")
    if flags and not (config is None or isinstance(config, Mapping)):
        allowed = f"a dictionary beside {', '.join(flags)}"
        raise ConfigError("speculative_config", config, allowed)
    if flags or isinstance(config, Mapping):
        merged = dict(config or {})
        for name, value in flags.items():
            _put(merged, _FLAGS[name], value, name)
        found["speculative_config"] = translate(merged)
    return found


def translate(given: Mapping[str, Any], where: str = SPECULATIVE_KEYS.where) -> dict[str, Any]:
    """`speculative_config`, or one of its `drafters`, in our words; `where` is its name.

    Raises:
        ConfigError: a word of another engine, or one setting in two spellings.
        NotYetError: a method that is known and not built.
    """
    found: dict[str, Any] = {}
    for written, value in given.items():
        name = str(written).replace("-", "_")
        row = find_other("keys", name) or find_other("flags", name)
        if row is not None and (row.say or row.key not in (None, name)):
            raise _answer(f"{where}.{name}", name, value, row)
        theirs = other_values(name).get(value) if isinstance(value, str) else None
        if theirs is not None:
            raise ConfigError(f"{where}.{name}", value, theirs + _LINT)
        _put(found, name, value, f"{where}.{written}")
    word = found.get("method")
    if isinstance(word, str):
        found["method"] = _our_method(word, f"{where}.method")
        for method in known_methods():
            if method.name == found["method"]:
                found = {**method.aliases.get(word, {}), **found}
    drafters = found.get("drafters")
    if isinstance(drafters, Sequence) and not isinstance(drafters, str):
        found["drafters"] = [
            translate(one, f"{where}.drafters[{index}]") if isinstance(one, Mapping) else one
            for index, one in enumerate(drafters)
        ]
    return found


def _our_method(word: str, where: str, *, answers: bool = False) -> str:
    """The word of the method that `word` means; what nobody has is left for the table of methods.
    `answers`: our word is wanted for an answer, whoever has this one.

    Raises:
        ConfigError: a word of another engine, with what to type.
        NotYetError: a method that is not built.
    """
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
    if ours != word and not answers:
        if row.engine != "vllm" or row.gone:
            raise ConfigError(where, word, ours + _LINT)
        logger.info("method %r is taken as %r", word, ours)
    return ours


def _answer(
    where: str, name: str, value: object, row: OtherName, *, outside: bool = False
) -> ConfigError:
    """What is said about a name that is not taken where it stands: what to write instead."""
    if row.say:
        return ConfigError(where, value, row.say)
    key, ours = row.key or name, value
    if isinstance(value, str | bool):
        word = str(value).lower() if isinstance(value, bool) else value
        ours = row.values.get(word, other_values(key).get(word, value))
        ours = _our_method(word, where, answers=True) if key == "method" else ours
    pair = json.dumps({key: ours}, default=repr)
    text = f"speculative_config={pair}" if outside else pair[1:-1]
    return ConfigError(where, value, text if key == name else text + _LINT)


def _put(into: dict[str, Any], name: str, value: object, where: str) -> None:
    if name in into and into[name] != value:
        allowed = f"one value of {name}, which is also given as {into[name]!r}"
        raise ConfigError(where, value, allowed)
    into[name] = value
