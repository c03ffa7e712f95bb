"""A server in the words of another engine: its options and its drafter.

Whatever the other engine cannot be told is an error, where its outputs would be others, or else a
comment. Starts nothing and reads no weights.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from foretoken.checkpoint import PACKAGED, packaged_model
from foretoken.config.drafter import DrafterConfig, drafter_keys
from foretoken.config.methods import find_method
from foretoken.config.reader import defaults_of
from foretoken.config.speculative import RuleConfig, SpeculativeConfig
from foretoken.errors import ConfigError, ModelNotFoundError
from foretoken.lab.launch.drafting import (
    BY_LOAD,
    MOST_RUNNING,
    NAMES,
    DraftingSetup,
    Unsaid,
    option_for,
)
from foretoken.lab.launch.engines import ENGINES, given, is_told, refusal
from foretoken.lab.launch.launch import MODELS, RANKS, Launch
from foretoken.lab.launch.read import ASSIGNED
from foretoken.lab.launch.write import WrittenCommand, write_command

EXPORTED_TO = ("vllm", "sglang", "llama.cpp", "openvino")
EXPORTED_FROM = ("vllm", "sglang", "llama.cpp")
"""Engines beside Foretoken whose launches are written for any other."""
_OF_THEIR_OWN = ("method", "model", "num_speculative_tokens", "own")
_TREES = ("sglang", "openvino")
"""Engines that draft trees which grow."""


def export(
    engine: str, settings: Mapping[str, Any], speculation: SpeculativeConfig | None
) -> WrittenCommand:
    """The command or the script of another engine that serves and drafts the same.

    Args:
        engine: one of EXPORTED_TO.
        settings: the model, and the options that were given, under the names of `foretoken serve`.
        speculation: how it drafts; None: it does not.

    Raises:
        ConfigError: the engine has nothing like it, or it would write something else.
    """
    drafting: DraftingSetup | None = None
    unsaid: list[Unsaid] = []
    if speculation is not None:
        drafter, unsaid = _one_of(engine, speculation)
        drafting, more = _drafting_of(engine, drafter, speculation)
        unsaid += more
        settings = {"adaptive_speculation": True, **settings}
    kept = {name: value for name, value in settings.items() if value is not None}
    kept["model"] = _on_disk(str(kept["model"]))
    found = write_command(engine, kept, drafting)
    return replace(found, unsaid=(*unsaid, *found.unsaid))


def export_launch(engine: str, launch: Launch) -> WrittenCommand:
    """The same of a launch of any engine, in the names that its engine has today.

    Raises:
        ConfigError: the engine has nothing like it, or the launch names no model.
    """
    if launch.model is None or launch.broken:
        raise ConfigError("CONFIG", launch.broken or None, "a command that names its model")
    settings: dict[str, Any] = {"model": launch.model}
    settings |= {"tensor_parallel_size": launch.ranks} if launch.ranks > 1 else {}
    keys: dict[str, Any] = {}
    sets = filter(None, (ASSIGNED.match(str(part.value)) for part in launch.of("before")))
    unsaid = [Unsaid(one[1], "a variable that is not carried over") for one in sets]
    for part in launch.of("argument", "set"):
        if part.name in (*MODELS, *RANKS) or part.value == launch.model or is_told(launch, part):
            continue
        drafts = re.match(ENGINES[launch.engine].drafting, part.name)
        found = option_for(launch.engine, part, "keys" if drafts else "options")
        if found is not None:
            (keys if drafts else settings)[found[0]] = found[1]
        else:
            why = f"an option of {NAMES[launch.engine]}'s that is not carried over"
            unsaid.append(Unsaid(part.written or str(part.value), why))
    drafting = given(launch)
    if drafting is not None:
        drafting = replace(
            drafting,
            keys={**drafting.keys, **keys},
            flags=(),
            num_drafts=drafting.num_drafts or drafting.known.default_drafts,
            ranges=tuple(map(tuple, launch.speculation.get(BY_LOAD) or ())),
        )
    written = write_command(engine, settings, drafting)
    words = written.text.split()
    lost = (one for one in unsaid if one.name not in words)
    return replace(written, unsaid=(*lost, *written.unsaid))


def _one_of(engine: str, config: SpeculativeConfig) -> tuple[DrafterConfig, list[Unsaid]]:
    """The drafter that is written: of several that compete the first with weights that the engine
    has, of several in order the first that it has."""
    refused = {}
    for one in config.drafters:
        method = find_method(one.method)
        own = f"{engine} cannot load a Proposer of Foretoken's"
        refused[one.label] = own if method.drafts_with == "class" else refusal(engine, method)
    able = [one for one in config.drafters if not refused[one.label]]
    if not able:
        first = config.drafters[0]
        allowed = f"another drafter: {refused[first.label]}"
        raise ConfigError("speculative_config.method", first.method, allowed)
    with_weights = [one for one in able if one.model]
    chosen = with_weights[0] if with_weights and config.policy == "best" else able[0]
    why = f"{NAMES[engine]} is told of one drafter, {chosen.label}"
    left = [one.label for one in config.drafters if one is not chosen]
    return chosen, [Unsaid(f"drafter {name}", why) for name in left]


def _drafting_of(
    engine: str, drafter: DrafterConfig, config: SpeculativeConfig
) -> tuple[DraftingSetup, list[Unsaid]]:
    """What is told of a drafter, and what of its tree is not."""
    keys = dict(_changed_keys(drafter, config.rule))
    if config.policy != "first" and len(config.drafters) == 1:
        keys["policy"] = config.policy
    count = drafter.num_speculative_tokens
    unsaid: list[Unsaid] = []
    trees = [name for name in ("choices", "tree_top_k", "tree_depth") if name in keys]
    if trees and trees[0] == "tree_top_k" and engine in _TREES:
        keys.setdefault("tree_depth", drafter.tree.tree_depth)
    elif trees:
        count = drafter.depth
        why = f"{NAMES[engine]} drafts no such tree: a chain as deep is written"
        unsaid = [Unsaid(name, why) for name in trees]
        keys = {name: value for name, value in keys.items() if name not in trees}
    model = None if drafter.model is None else _on_disk(drafter.model)
    drafting = DraftingSetup(drafter.method, model, keys, num_drafts=count)
    off = config.load.disable_by_batch_size
    if off is not None:
        ranges = ((1, off - 1, count), (off, max(off, MOST_RUNNING), 0))
        return replace(drafting, ranges=ranges, ranges_key="disable_by_batch_size"), unsaid
    ranges = config.load.num_speculative_tokens_per_batch_size or ()
    return replace(drafting, ranges=ranges), unsaid


def _changed_keys(drafter: DrafterConfig, rule: RuleConfig) -> Iterator[tuple[str, Any]]:
    groups = (drafter, drafter.stop, drafter.tree, drafter.vocabulary, drafter.own)
    defaults = drafter_keys()
    for group in groups:
        for spec in fields(group) if group is not None else ():
            known = spec.name in defaults and spec.name not in _OF_THEIR_OWN
            if known and getattr(group, spec.name) != defaults[spec.name]:
                yield spec.name, getattr(group, spec.name)
    for name, default in defaults_of(RuleConfig).items():
        if getattr(rule, name) != default:
            yield name, getattr(rule, name)


def _on_disk(model: str) -> str:
    try:
        return str(packaged_model(model)) if model in PACKAGED else model
    except ModelNotFoundError:
        return model
