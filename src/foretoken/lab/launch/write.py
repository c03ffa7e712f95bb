"""A launch as text, a shell command unless it was Python or settings; whole commands of what is
wanted; a server in the words of another engine.

Words that were not changed stand as they were written, variables included. Whatever another engine
cannot be told is an error, where its outputs would be others, or else a comment. Reads no weights.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from foretoken.checkpoint import PACKAGED, packaged_model
from foretoken.config.drafter import DrafterConfig, drafter_keys
from foretoken.config.method_registry import find_method
from foretoken.config.reader import defaults_of
from foretoken.config.speculative import RuleConfig, SpeculativeConfig
from foretoken.errors import ConfigError, ModelNotFoundError
from foretoken.lab.analysis.cost_model import MeasuredCosts
from foretoken.lab.launch.cost_files import ToldCosts, tell_costs, told_to_tensorrt_llm
from foretoken.lab.launch.engines import (
    BY_LOAD,
    ENGINES,
    MOST_RUNNING,
    NAMES,
    DraftingSetup,
    Unsaid,
    given,
    is_told,
    option_for,
    refusal,
    tell,
    told_option,
)
from foretoken.lab.launch.launch import (
    ASSIGNED,
    MODELS,
    RANKS,
    Expression,
    Launch,
    LaunchPart,
    json_for_shell,
    number,
)

EXPORTED = ("vllm", "sglang", "llama.cpp")
"""Engines beside Foretoken whose launches are read, and written for any other."""
_OF_THEIR_OWN = ("method", "model", "num_speculative_tokens", "own")
_TOP_K = "speculative-eagle-topk"
"""SGLang's branches of a tree; 1: a chain."""
_GGUF_KINDS = {"int8": "q8_0", "fp8": "q8_0", "int4": "q4_k_m", "nvfp4": "q4_k_m", "none": "bf16"}
_CONVERTED_ENDINGS = ("-bf16.gguf", "-fp16.gguf", "-fp32.gguf", "-q8_0.gguf")
"""How files end that llama.cpp's converter writes by itself."""


def written(launch: Launch) -> str:
    if launch.form == "python":
        lines = [f"{launch.holder}("]
        for part in launch.parts:
            value = part.raw or _literal(part.value, "    ")
            lines.append(f"    {part.written}{'' if part.written == '**' else '='}{value},")
        return "\n".join([*lines, ")"])
    if launch.holder == "config":  # a speculative config by itself
        return json.dumps(launch.parts[0].value, indent=2)
    if launch.form == "settings":
        found = {part.written: part.value for part in launch.parts}
        text = yaml.safe_dump(found, width=10_000, sort_keys=False, allow_unicode=True)
        return str(text).rstrip()
    # A command, one option on each line; variables as the options that they stand for.
    lines = [" ".join(map(_quoted, launch.of("before")))]
    for part in launch.of("argument", "set"):
        value = "" if part.value is True and part.name else _quoted(part)
        if part.name or len(lines) > 1:
            lines.append(f"{part.words[0] if part.name else ''} {value}".strip())
        else:
            lines[0] += f" {value}"
    lines.append(" ".join(map(_quoted, launch.of("after"))))
    return " \\\n  ".join(line for line in lines if line).lstrip()


def _quoted(part: LaunchPart) -> str:
    if part.raw:
        return part.raw
    if isinstance(part.value, dict | list):
        return json_for_shell(part.value)
    return shlex.quote(str(part.value))


def words_of(launch: Launch) -> list[str]:
    return [word for part in launch.of("before", "argument", "set", "after") for word in part.words]


def _literal(value: Any, indent: str) -> str:
    """A Python literal; dictionaries with one key on each line."""
    deeper = indent + "    "
    if isinstance(value, Expression):
        return value.source
    if isinstance(value, dict) and "decoding_type" in value:  # a class of TensorRT-LLM
        given = [f"{deeper}{key}={_literal(one, deeper)},\n" for key, one in value.items()
                 if key != "decoding_type"]  # fmt: skip
        return f"{value['decoding_type']}DecodingConfig(\n{''.join(given)}{indent})"
    if isinstance(value, dict):
        lines = [f"{deeper}{_literal(key, '')}: {_literal(one, deeper)},\n"
                 for key, one in value.items()]  # fmt: skip
        return "{\n" + "".join(lines) + indent + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_literal(one, indent) for one in value) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


@dataclass(frozen=True, slots=True)
class WrittenCommand:
    """A command, ready to paste, and what it does not say."""

    text: str
    unsaid: tuple[Unsaid, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Name -> text of what it names in the folder that was asked for."""

    @property
    def commented(self) -> str:
        """The text behind a comment for everything that it does not say."""
        names: dict[str, list[str]] = {}
        for one in self.unsaid:
            names.setdefault(one.why, []).append(one.name)
        said = [f"# {', '.join(dict.fromkeys(group))}: {why}" for why, group in names.items()]
        return "\n".join([*said, self.text])


class LearntCosts(NamedTuple):
    """A cost model by which lengths are chosen, and the folder for the files that say it."""

    costs: MeasuredCosts
    folder: Path


def write_command(
    engine: str,
    settings: Mapping[str, Any],
    drafting: DraftingSetup | None,
    learnt: LearntCosts | None = None,
) -> WrittenCommand:
    """The command that starts a server; `settings` are the model, and options under the names of
    `foretoken serve`. Raises ConfigError if the engine has nothing like it, and would write
    something else."""
    own, told = ENGINES[engine], list[LaunchPart | Unsaid]()
    if engine == "llama.cpp":
        settings, drafting, told = _in_gguf(settings, drafting)
    model = str(settings["model"])
    options = {name: value for name, value in settings.items() if name != "model"}
    by_costs = ToldCosts((), {})
    if engine == "tensorrt-llm":
        told += told_to_tensorrt_llm(options)
    else:
        told += (one for name, value in options.items() for one in told_option(engine, name, value))
    if learnt is not None:
        by_costs = tell_costs(engine, drafting, *learnt)
        told += by_costs.told
    elif drafting is not None:
        told += tell(engine, drafting)
    elif own.off:
        told.append(LaunchPart.flag(*own.off))  # it speculates unless told otherwise
    told += [LaunchPart.flag("--metrics")] if engine == "llama.cpp" else []
    parts = [part for part in told if isinstance(part, LaunchPart)]
    unsaid = tuple(one for one in told if isinstance(one, Unsaid))
    first = LaunchPart.flag(own.model_flag, model) if own.model_flag else LaunchPart(value=model)
    program = (LaunchPart(value=word, role="before") for word in own.program)
    variables = (part for part in parts if part.role == "before")
    arguments = (part for part in parts if part.role == "argument")
    launch = Launch(engine=engine, parts=(*variables, *program, first, *arguments))
    return WrittenCommand(written(launch), unsaid, by_costs.files)


def _in_gguf(
    settings: Mapping[str, Any], drafting: DraftingSetup | None
) -> tuple[dict[str, Any], DraftingSetup | None, list[LaunchPart | Unsaid]]:
    """The same with GGUF files in place of models; a context holds all requests together."""
    kept, told = dict(settings), list[LaunchPart | Unsaid]()
    kept["model"] = _gguf(str(kept["model"]), kept.pop("quantization", "none"), told)
    if "max_model_len" in kept:
        kept["max_model_len"] *= max(1, int(kept.get("max_num_seqs", 1)))
    if drafting is not None and drafting.model:
        keys = dict(drafting.keys)
        file = _gguf(drafting.model, keys.pop("quantization", "none"), told)
        drafting = replace(drafting, model=file, keys=keys)
    return kept, drafting, told


def _gguf(model: str, quantization: object, told: list[LaunchPart | Unsaid]) -> str:
    """The GGUF file of a model with such weights, as such files are usually named; that it has to
    be made is told."""
    if model.endswith(".gguf"):
        return model
    kind = _GGUF_KINDS.get(str(quantization), quantization)
    file = f"{model.rstrip('/').rsplit('/', 1)[-1]}-{kind}.gguf"
    by = "writes it" if file.endswith(_CONVERTED_ENDINGS) else "and then llama-quantize write it"
    why = f"{file} is {model} as llama.cpp's convert_hf_to_gguf.py {by}"
    told.append(Unsaid("model", why))
    return file


def export(
    engine: str,
    settings: Mapping[str, Any],
    speculation: SpeculativeConfig | None,
    learnt: LearntCosts | None = None,
) -> WrittenCommand:
    """The command of an engine of EXPORTED that serves and drafts the same, or as far as learnt
    costs say; `settings` are the model, and the options that were given, as `foretoken serve` names
    them. Raises ConfigError if the engine has nothing like it, or would write something else."""
    drafting: DraftingSetup | None = None
    unsaid: list[Unsaid] = []
    if speculation is not None:
        drafter, unsaid = _one_of(engine, speculation)
        drafting, more = _drafting_of(engine, drafter, speculation)
        unsaid += more
        settings = {"adaptive_speculation": learnt is None, **settings}
    kept = {name: value for name, value in settings.items() if value is not None}
    kept["model"] = _on_disk(str(kept["model"]))
    found = write_command(engine, kept, drafting, learnt)
    return replace(found, unsaid=(*unsaid, *found.unsaid))


def export_launch(engine: str, launch: Launch, learnt: LearntCosts | None = None) -> WrittenCommand:
    """The same of a launch of any engine, in the names that its engine has today. Raises
    ConfigError if the engine has nothing like it, or the launch names no model."""
    if launch.model is None or launch.broken:
        raise ConfigError("CONFIG", launch.broken or None, "a command that names its model")
    if learnt is not None and engine == launch.engine:
        return _drafting_anew(launch, learnt)
    settings: dict[str, Any] = {"model": launch.model}
    settings |= {"tensor_parallel_size": launch.ranks} if launch.ranks > 1 else {}
    keys: dict[str, Any] = {}
    sets = filter(None, (ASSIGNED.match(str(part.value)) for part in launch.of("before")))
    unsaid = [Unsaid(one[1], "a variable that is not carried over") for one in sets]
    for part in launch.of("argument", "set"):
        if part.name in (*MODELS, *RANKS) or part.value == launch.model or is_told(launch, part):
            continue
        if engine == "foretoken" and part.name == _TOP_K:
            depth = number(launch.options.get("speculative-num-steps"))
            shape = {"tree_top_k": number(part.value), "tree_depth": depth}
            keys |= {} if shape["tree_top_k"] in (None, 1) or depth is None else shape
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
    written = write_command(engine, settings, drafting, learnt)
    words = written.text.split()
    lost = (one for one in unsaid if one.name not in words)
    return replace(written, unsaid=(*lost, *written.unsaid))


_BY_COSTS = ("speculative-adaptive", "speculative-adaptive-config",
             "speculative-dspark-sps-table-path")  # fmt: skip
"""Options of SGLang's that costs say anew, or not at all."""


def _drafting_anew(launch: Launch, learnt: LearntCosts) -> WrittenCommand:
    """A launch in its own words, but for how far it drafts."""
    engine, drafting = launch.engine, given(launch)
    found = tell_costs(engine, drafting, *learnt)
    parts = [part for part in found.told if isinstance(part, LaunchPart)]
    ours = {part.name for part in parts} | set(_BY_COSTS)
    # What llama.cpp was told is among what is told anew.
    pattern = ENGINES[engine].drafting if engine == "llama.cpp" or not parts else r"(?!)"
    kept = [
        part
        for part in launch.parts
        if part.role not in ("argument", "set")
        or not (is_told(launch, part) or part.name in ours or re.match(pattern, part.name))
    ]
    unsaid = [one for one in found.told if isinstance(one, Unsaid)]
    if number(launch.options.get(_TOP_K)) not in (None, 1):
        unsaid.append(Unsaid(f"--{_TOP_K}", "the costs are those of chains: a chain is written"))
    variables = [part for part in parts if part.role == "before"]
    arguments = [part for part in parts if part.role == "argument"]
    anew = launch.having([*variables, *kept, *arguments])
    return WrittenCommand(written(anew), tuple(unsaid), found.files)


def _one_of(engine: str, config: SpeculativeConfig) -> tuple[DrafterConfig, list[Unsaid]]:
    """The drafter that is written: the first with weights that the engine has, else the first that
    it has."""
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
    chosen = next((one for one in able if one.model), able[0])
    why = f"{NAMES[engine]} is told of one drafter, {chosen.label}"
    left = [one.label for one in config.drafters if one is not chosen]
    return chosen, [Unsaid(f"drafter {name}", why) for name in left]


def _drafting_of(
    engine: str, drafter: DrafterConfig, config: SpeculativeConfig
) -> tuple[DraftingSetup, list[Unsaid]]:
    """What is told of a drafter, and what of its tree is not."""
    keys = dict(_changed_keys(drafter, config.rule))
    count = drafter.num_speculative_tokens
    unsaid: list[Unsaid] = []
    trees = [name for name in ("choices", "tree_top_k", "tree_depth") if name in keys]
    if trees and trees[0] == "tree_top_k" and engine == "sglang":  # a tree that grows
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
    by_load = config.load.num_speculative_tokens_per_batch_size
    return replace(drafting, ranges=by_load or ()), unsaid


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
