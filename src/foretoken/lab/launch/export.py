"""A server of Foretoken's in the words of another engine: its options and its drafter.

Whatever the other engine cannot be told is an error, where its outputs would be others, or else a
comment. Starts nothing and reads no weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from foretoken.checkpoint import PACKAGED, packaged_model
from foretoken.config.drafter import DrafterConfig, drafter_keys
from foretoken.config.methods import DraftingMethod, find_method
from foretoken.config.reader import defaults_of
from foretoken.config.speculative import LoadConfig, RuleConfig, SpeculativeConfig
from foretoken.errors import ConfigError, ModelNotFoundError
from foretoken.lab.launch.engines import refusal
from foretoken.lab.launch.openvino import write_script
from foretoken.lab.launch.options import ENGINE_NAMES
from foretoken.lab.launch.drafting import MOST_RUNNING, DraftingSetup, Ranges, Unsaid
from foretoken.lab.launch.command import WrittenCommand, write_command

EXPORTED_TO = ("vllm", "sglang", "llama.cpp", "openvino")
_OF_THEIR_OWN = ("method", "model", "num_speculative_tokens", "own")
_TREES = {"sglang": ("tree_top_k", "tree_depth"), "openvino": ("tree_top_k", "tree_depth")}
"""Keys of trees that grow, of the engines that draft them."""


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
    told: DraftingSetup | None = None
    unsaid: list[Unsaid] = []
    if speculation is not None:
        drafter, unsaid = _one_of(engine, speculation)
        told, more = _speculation_of(engine, drafter, speculation)
        unsaid = [*unsaid, *more]
        settings = {"adaptive_speculation": True, **settings}
    kept = {name: value for name, value in settings.items() if value is not None}
    kept["model"] = _on_disk(str(kept["model"]))
    if engine == "openvino":
        found = write_script(kept, told)
    else:
        found = write_command(engine, kept, told)
    return replace(found, unsaid=(*unsaid, *found.unsaid))


def _one_of(engine: str, config: SpeculativeConfig) -> tuple[DrafterConfig, list[Unsaid]]:
    """The drafter that is written: of several that compete the first with weights that the engine
    has, of several in order the first that it has."""
    refused = {one.label: _refusal(engine, find_method(one.method)) for one in config.drafters}
    able = [one for one in config.drafters if not refused[one.label]]
    if not able:
        first = config.drafters[0]
        allowed = f"another drafter: {refused[first.label]}"
        raise ConfigError("speculative_config.method", first.method, allowed)
    with_weights = [one for one in able if one.model]
    chosen = with_weights[0] if with_weights and config.policy == "best" else able[0]
    why = f"{ENGINE_NAMES[engine]} is told of one drafter, {chosen.label}"
    left = [one.label for one in config.drafters if one is not chosen]
    return chosen, [Unsaid(f"drafter {name}", why) for name in left]


def _refusal(engine: str, method: DraftingMethod) -> str:
    """Why another engine does not draft as Foretoken does so; empty if it does."""
    own = method.drafts_with == "class"
    return f"{engine} cannot load a Proposer of Foretoken's" if own else refusal(engine, method)


def _speculation_of(
    engine: str, drafter: DrafterConfig, config: SpeculativeConfig
) -> tuple[DraftingSetup, list[Unsaid]]:
    """What is told of a drafter, and what of its tree is not."""
    keys = dict(_changed_keys(drafter)) | dict(_changed(RuleConfig, config.rule))
    if config.policy != "first" and len(config.drafters) == 1:
        keys["policy"] = config.policy
    count = drafter.num_speculative_tokens
    unsaid: list[Unsaid] = []
    trees = [name for name in ("choices", "tree_top_k", "tree_depth") if name in keys]
    if trees and trees[0] == "tree_top_k" and engine in _TREES:
        keys.setdefault("tree_depth", drafter.tree.tree_depth)
    elif trees:
        count = drafter.depth
        why = f"{ENGINE_NAMES[engine]} drafts no such tree: a chain as deep is written"
        unsaid = [Unsaid(name, why) for name in trees]
        keys = {name: value for name, value in keys.items() if name not in trees}
    told = DraftingSetup(
        method=drafter.method,
        model=None if drafter.model is None else _on_disk(drafter.model),
        num_drafts=count,
        ranges=_ranges(config.load, count),
        keys=keys,
    )
    if config.load.disable_by_batch_size is not None:
        told = replace(told, ranges_key="disable_by_batch_size")
    return told, unsaid


def _changed_keys(drafter: DrafterConfig) -> Iterator[tuple[str, Any]]:
    """The keys of a drafter that are not as by default."""
    groups = (drafter, drafter.stop, drafter.tree, drafter.vocabulary, drafter.own)
    defaults = drafter_keys()
    for group in groups:
        for spec in fields(group) if group is not None else ():
            value = getattr(group, spec.name)
            known = spec.name in defaults and spec.name not in _OF_THEIR_OWN
            if known and value != defaults[spec.name]:
                yield spec.name, value


def _changed(kind: type, group: Any) -> Iterator[tuple[str, Any]]:
    for name, default in defaults_of(kind).items():
        if getattr(group, name) != default:
            yield name, getattr(group, name)


def _ranges(load: LoadConfig, drafts: int) -> Ranges:
    """Drafts by load, from whichever setting says it."""
    off = load.disable_by_batch_size
    if off is not None:
        return ((1, off - 1, drafts), (off, max(off, MOST_RUNNING), 0))
    return load.num_speculative_tokens_per_batch_size or ()


def _on_disk(model: str) -> str:
    """A name that other engines can load too: of what ships with the package its folder."""
    if model not in PACKAGED:
        return model
    try:
        return str(packaged_model(model))
    except ModelNotFoundError:
        return model
