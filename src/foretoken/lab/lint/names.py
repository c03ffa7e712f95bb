"""Names that are gone, or never were: a launch in the names that its engine has today, and what is
to be said of the others.

What became of a name is in the configuration's table of other engines; what engines refuse, their
defaults, and values that they have no more are in `engines.toml` beside this file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from foretoken.config.method_registry import DraftingMethod, known_methods
from foretoken.config.other_engines import OtherName, find_other, other_names
from foretoken.errors import nearest
from foretoken.lab.findings import Finding
from foretoken.lab.launch.engines import BY_LOAD, MOST_RUNNING
from foretoken.lab.launch.launch import (
    JSON_OPTIONS,
    METHOD_OPTIONS,
    SHORT,
    Launch,
    LaunchPart,
    in_json,
    is_unsaid,
    json_for_shell,
    json_text,
    number,
    one_more,
    typed,
)
from foretoken.lab.plain import read_table

NAME_CHECKS = (
    *("removed_flag", "unknown_flag", "removed_key", "removed_method", "removed_value"),
    "given_twice",
)
_LOOK_UPS = tuple(method.name for method in known_methods() if method.drafts_with == "text")
_NAMED_SO = {
    "eagle3": "eagle3",
    "eagle-3": "eagle3",
    "eagle-": "eagle",
    "dflash": "dflash",
    "dspark": "dspark",
    "medusa": "medusa",
    "mlp-speculator": "mlp_speculator",
    "accelerator": "mlp_speculator",
}
"""Words in the names of drafters, and the method that vLLM concludes from them."""
_FIRST = ("method", "model", "num_speculative_tokens")


@cache
def engine_table(engine: str) -> dict[str, Any]:
    """What `engine` refuses, its defaults and words; empty for one that nothing is known of."""
    found: dict[str, Any] = read_table("foretoken.lab.lint", "engines.toml").get(engine, {})
    return found


class GoneValue(NamedTuple):
    """What became of a value of an option or key."""

    now: str = ""
    remedy: str = ""
    """What to say where `now` is not all."""


def gone_value(engine: str, option: str, value: object) -> GoneValue | None:
    """What became of one value; None: it is there still, or never was."""
    values = engine_table(engine).get("removed_values", {}).get(option, {})
    found = values.get(value) if isinstance(value, str) else None
    return None if found is None else GoneValue(**found)


def method_in(config: Mapping[str, Any]) -> DraftingMethod | None:
    """What is known of the method of a speculative config of vLLM: by its word, or by what vLLM
    concludes from the name of a drafter."""
    named = config.get("method")
    if named is None and _names_a_model(config):
        named = method_by_name(config["model"])
    return next((m for m in known_methods() if named in (m.name, *m.aliases)), None)


def method_by_name(model: str) -> str:
    """The method that vLLM concludes from the name of a drafter."""
    name = model.lower()
    return next((method for word, method in _NAMED_SO.items() if word in name), "draft_model")


def todays(launch: Launch) -> tuple[Launch, list[Finding]]:
    """The launch with names that are gone replaced by what stands for them today, as far as it can
    be read, and what is to be said of names."""
    found: list[Finding] = []
    moved: dict[str, Any] = {}
    parts: list[LaunchPart] = []
    kept: list[LaunchPart] = []
    place: int | None = None
    for part in launch.parts:
        row = find_other("flags", part.name.partition(".")[0], launch.engine)
        row = _of_gone_variable(part, launch.engine) or row
        if in_json(part.name) or (launch.engine == "vllm" and part.name in SHORT):
            place = len(parts) if place is None else place
            kept.append(part)
        elif row is None or not row.gone:
            found += _unknown_flag(launch, part) if row is None and part.written else ()
            parts.append(_with_todays_method(launch, part))
        else:
            why = f" ({row.why})" if row.why else ""
            does = "reads it no more" if part.role == "set" else "does not start with it"
            version = engine_table(launch.engine)["version"]
            message = f"was removed{why}; {launch.engine} {version} {does}"
            remedy = _successor(row, launch, part.value)
            found.append(Finding("removed_flag", "error", part.written, message, remedy))
            kind, _, name = row.successor.partition(":")
            if kind == "flag":
                parts.append(_renamed(launch, part, name))
            elif kind == "key":
                place = len(parts) if place is None else place
                moved[row.name] = typed(part.value)
    config, said = _todays_config(launch, moved)
    found += [*said, *_removed_words(launch)]
    twice = [one for one in found if one.check == "given_twice"]
    if launch.broken or (moved and launch.unread):
        return launch, found
    if place is not None and config == launch.speculation and not moved and not twice:
        parts[place:place] = kept
    elif place is not None and config:
        parts.insert(place, json_part(launch, config))
    values = ((part, gone_value(launch.engine, part.name, part.value)) for part in parts)
    return launch.having(part for part, gone in values if gone is None or gone.now), found


def _successor(row: OtherName, launch: Launch, value: object) -> str:
    kind, _, key = row.successor.partition(":")
    if kind == "flag":
        return f"--{key.replace('_', '-')} {'' if value is True else value}".strip()
    if kind != "key":
        return row.successor or "leave it out"
    given = typed(value)
    if key == BY_LOAD:
        drafts = launch.options.get("num-speculative-tokens", 5)
        given = schedule_of(given, launch.speculation.get("num_speculative_tokens", drafts))
    gone = gone_value("vllm", key, given)
    given = given if gone is None else gone.now
    if row.kind == "keys":
        return json_text({key: given})[1:-1]
    if key == "model" and isinstance(given, str) and given.strip("[]") in _LOOK_UPS:
        key, given = "method", given.strip("[]")
    return _as_config(launch, {key: given})


def _as_config(launch: Launch, config: Mapping[str, Any]) -> str:
    if launch.form == "command":
        return f"--speculative-config {json_for_shell(config)}"
    return f"speculative_config={json_text(config)}"


def _unknown_flag(launch: Launch, part: LaunchPart) -> Iterator[Finding]:
    if launch.engine not in ("vllm", "sglang", "llama.cpp"):
        return
    other = find_other("flags", part.name)
    if other is None or len(part.name) <= 4 or not (other.key or other.method):
        other = None  # short ones may mean something else
    if other is None and not part.name.startswith(("spec-", "speculative")):
        return
    known = [f"--{row.name.replace('_', '-')}" for row in other_names()
             if (row.engine, row.kind) == (launch.engine, "flags")]  # fmt: skip
    near, remedy = nearest(part.written, known), ""
    row = find_other("keys", other.key, "vllm") if other else None
    if other and other.key and row and not row.gone and launch.engine == "vllm":
        remedy = _as_config(launch, {other.key: typed(part.value)})
    whose = f": it is one of {other.engine}" if other else ""
    message = f"{launch.engine} knows no such option about speculation{whose}"
    remedy = remedy or (f"did you mean {near}?" if near else "")
    yield Finding("unknown_flag", "error", part.written, message, remedy)


def _todays_config(
    launch: Launch, moved: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Finding]]:
    """A speculative config under the keys, methods and values of today, and which were not."""
    engine, spoken = launch.engine, launch.speculation
    given = {**spoken, **moved}
    found: dict[str, Any] = {}
    said: list[Finding] = []
    switched_off = None
    for name, value in given.items():
        row = find_other("keys", name, engine)
        said += _removed_key(launch, name, value, row) if name in spoken else ()
        row, key = row or find_other("flags", name, engine), name
        if row is not None and row.gone:
            kind, _, key = row.successor.partition(":")
            if kind != "key":
                continue
        if key == BY_LOAD and key != name:
            switched_off = value
        elif key == "synthetic_acceptance_length" and key != name:
            most = number(given.get("num_speculative_tokens")) or 5
            if not is_unsaid(value):  # accepted at this rate where all drafts before were
                value = round(sum(float(str(value)) ** i for i in range(most + 1)), 2)
            found[key] = value
        else:
            found.setdefault(key, value)
    if engine == "vllm":
        _use_todays_words(found)
        if switched_off is not None:
            found[BY_LOAD] = schedule_of(switched_off, found.get("num_speculative_tokens"))
    elif "decoding_type" in found:
        found["decoding_type"] = _todays_word(engine, found["decoding_type"])
    return found, said


def _removed_key(
    launch: Launch, key: str, value: object, row: OtherName | None
) -> Iterator[Finding]:
    if launch.engine not in ("vllm", "tensorrt-llm") or (row is not None and not row.gone):
        return
    if row is None:
        known = [r.name for r in other_names() if (r.engine, r.kind) == (launch.engine, "keys")]
        near = nearest(key, known)
        remedy, message = f"did you mean {near}?" if near else "", "knows no such key"
    else:
        remedy = _successor(row, launch, value)
        message = "has it no more" + (f": {row.why}" if row.why else "")
    where = f"speculative_config.{key}"
    yield Finding("removed_key", "error", where, f"{launch.engine} {message}", remedy)


def _removed_words(launch: Launch) -> Iterator[Finding]:
    """Methods and values that are gone, and keys that are given twice."""
    config, options, is_vllm = launch.speculation, launch.options, launch.engine == "vllm"
    words = {f"speculative_config.{key}": config.get(key) for key in ("method", "decoding_type")}
    if is_vllm and "method" not in config and isinstance(config.get("model"), str):
        words["speculative_config.model"] = method_by_name(config["model"])
    given = [(where, word) for where, word in words.items() if isinstance(word, str)]
    for part in launch.parts:
        if part.name in METHOD_OPTIONS and isinstance(part.value, str):
            given += [(f"--{part.name}", word.strip()) for word in part.value.split(",")]
    for where, word in given if launch.engine != "foretoken" else ():
        row = find_other("methods", word, launch.engine)
        level, remedy = "error", ""
        if is_unsaid(word) or (row is not None and not row.gone):
            continue
        if row is None:
            message = f"{word} is no method of {launch.engine}"
            place = ("methods", launch.engine)
            rows = (r for r in other_names() if (r.kind, r.engine) == place and not r.gone)
            remedy = ", ".join(one.name for one in rows)
        elif row.method and is_vllm:
            level, message, remedy = "warning", f"{word} is an old name", row.method
        else:
            message = row.why or f"{word} was renamed"
            without = "a draft model or an EAGLE head where there is one; without one: ngram"
            remedy = row.now or without
        yield Finding("removed_method", level, where, message, remedy)
    for key, value in {**options, **config}.items() if is_vllm else ():
        gone = gone_value("vllm", key, value)
        if gone is not None:
            message = f"{key} {value} is gone"
            yield Finding("removed_value", "error", key, message, gone.remedy or gone.now)
    whole = next((typed(part.value) for part in launch.parts if part.name in JSON_OPTIONS), None)
    keys = whole if is_vllm and isinstance(whole, dict) else {}
    for name, key in SHORT.items():
        if name in options and key in keys:
            message = f"{key} stands in --speculative-config too, which vLLM refuses"
            yield Finding("given_twice", "error", f"--{name}", message, f"leave --{name} out")


def schedule_of(switched_off_above: Any, drafts: Any) -> list[list[Any]]:
    """The old switch-off above a batch size as ranges of batch sizes, numbers or unsaid."""
    k: Any = drafts if is_unsaid(drafts) else number(drafts) or 5
    if is_unsaid(switched_off_above):
        first = one_more(switched_off_above)
        return [[1, switched_off_above, k], [first, MOST_RUNNING, 0]]
    most = number(switched_off_above) or 32
    return [[1, most, k], [most + 1, max(MOST_RUNNING, most + 1), 0]]


def json_part(launch: Launch, config: dict[str, Any]) -> LaunchPart:
    """The option of a launch that holds this speculative config."""
    if launch.engine == "vllm" and _names_a_model(config):
        config.setdefault("method", method_by_name(config["model"]))
    old = next((p for p in launch.parts if in_json(p.name) and "." not in p.name), None)
    written = "--speculative-config" if launch.form == "command" else "speculative_config"
    if launch.form == "settings" and any("-" in part.written for part in launch.parts):
        written = "speculative-config"
    ordered = {key: config[key] for key in _FIRST if key in config} | config
    name = old.written if old else written
    return LaunchPart(name="speculative-config", written=name, value=ordered)


def _use_todays_words(config: dict[str, Any]) -> None:
    model, method = config.get("model"), config.get("method")
    if isinstance(model, str) and model.strip("[]") == "ngram":
        config.pop("model")
        method = config["method"] = "ngram"
    elif method is None and isinstance(model, str) and _names_a_model(config):
        method = method_by_name(model)
    row = find_other("methods", method, "vllm")
    if row is not None and row.gone and row.method:
        config["method"] = row.method
    elif row is not None and row.gone:
        for key in ("model", "draft_tensor_parallel_size", "quantization"):
            config.pop(key, None)
        config |= {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2}
    rule = config.get("rejection_sample_method")
    if gone_value("vllm", "rejection_sample_method", rule) is not None:
        for key in ("rejection_sample_method", "posterior_threshold", "posterior_alpha"):
            config.pop(key, None)
        config |= {"draft_sample_method": rule} if rule == "probabilistic" else {}


def _names_a_model(config: Mapping[str, Any]) -> bool:
    model = config.get("model")
    return isinstance(model, str) and not is_unsaid(model)


def _with_todays_method(launch: Launch, part: LaunchPart) -> LaunchPart:
    if part.name not in METHOD_OPTIONS or not isinstance(part.value, str):
        return part
    value = ",".join(_todays_word(launch.engine, one.strip()) for one in part.value.split(","))
    return part if value == part.value else replace(part, value=value, raw="")


def _todays_word(engine: str, word: str) -> str:
    row = find_other("methods", word, engine)
    return row.now if row is not None and row.gone and row.now else word


def _of_gone_variable(part: LaunchPart, engine: str) -> OtherName | None:
    """A variable that its engine reads no more, as an option that is gone."""
    row = find_other("variables", part.written, engine) if part.role == "set" else None
    if row is None or not row.gone:
        return None
    now = find_other("variables", row.now or "", engine)
    return replace(row, now=f"flag:{now.flag}" if now else "")


def _renamed(launch: Launch, part: LaunchPart, name: str) -> LaunchPart:
    written = name.replace("_", "-")
    if launch.form == "python" or (launch.form == "settings" and "_" in part.written):
        return replace(part, name=written, written=name)
    dashes = "--" if launch.form != "settings" else ""
    return replace(part, name=written, written=dashes + written, role="argument")
