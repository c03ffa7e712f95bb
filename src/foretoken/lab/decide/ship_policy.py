"""Policy files: which rules count, how much, and with which numbers.

YAML. A file may extend the default one. Unknown rules and keys are errors; a rule set to null is
dropped.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from foretoken.errors import ConfigError, one_of
from foretoken.lab.decide.evidence import WEIGHTS
from foretoken.lab.decide.rules import RULES
from foretoken.lab.measure.experiment import parse_yaml, read_yaml
from foretoken.lab.plain import from_plain
from foretoken.lab.verdict import WORTH_IT


@dataclass(frozen=True, slots=True, kw_only=True)
class _PolicyFile:
    name: str = "default"
    slo: Literal["tpot", "ttft", "throughput"] = "tpot"
    extends: Literal["default"] | None = None
    rules: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipRule:
    name: str
    weight: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipPolicy:
    """What has to hold before speculation is shipped."""

    name: str
    slo: str
    rules: tuple[ShipRule, ...]


def load_policy(name: str | None, changes: tuple[str, ...] = ()) -> ShipPolicy:
    """The policy of a file, or the default; `changes` are `rule.key=value` over it. Raises
    ConfigError: the file is no policy, or names an unknown rule, key or value."""
    content: dict[str, Any] = parse_yaml(default_text(), "policy")
    if name not in (None, "default"):
        own = read_yaml(Path(str(name)), "--policy")
        from_plain(_PolicyFile, own, f"--policy {name}")
        base: dict[str, Any] = content if own.get("extends") else {"name": name}
        content = {**base, **own, "rules": _over(base.get("rules"), own.get("rules") or {})}
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals:
            raise ConfigError("--set", change, "RULE.KEY=VALUE, such as speedup.least=1.2")
        value = parse_yaml(text, "--set")
        rule, dot, key = path.partition(".")
        if path == "slo":
            content["slo"] = value
        else:
            content["rules"] = _over(content.get("rules"), {rule: {key: value} if dot else value})
    told = from_plain(_PolicyFile, content, "policy")
    rules = {key: value for key, value in (told.rules or {}).items() if value is not None}
    if not rules:
        allowed = f"rules such as {', '.join(RULES)}; `foretoken lab decide --show-policy`"
        raise ConfigError("policy.rules", told.rules, allowed)
    made = tuple(_rule(key, value) for key, value in rules.items())
    return ShipPolicy(name=told.name, slo=told.slo, rules=made)


def default_text() -> str:
    file = resources.files("foretoken.lab.decide").joinpath("default.yaml")
    return file.read_text("utf-8").replace("WORTH_IT", f"{WORTH_IT:g}")


def _over(rules: Mapping[str, Any] | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The rules with those of `changes` over them, key by key."""
    merged = dict(rules or {})
    for name, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = {**merged[name], **value} if both else value
    return merged


def _rule(name: str, value: object) -> ShipRule:
    if name not in RULES:
        raise ConfigError(f"policy.rules.{name}", value, one_of(name, RULES))
    if not isinstance(value, Mapping):
        raise ConfigError(f"policy.rules.{name}", value, "keys and values, such as {weight: must}")
    weight = value.get("weight", "must")
    if weight not in WEIGHTS:
        raise ConfigError(f"policy.rules.{name}.weight", weight, one_of(weight, WEIGHTS))
    given = {key: part for key, part in value.items() if key != "weight"}
    # What a rule's function takes beside the evidence are the rule's keys.
    own = list(inspect.signature(RULES[name]).parameters.values())[1:]
    keys = make_dataclass(name, [(p.name, p.annotation, field(default=p.default)) for p in own])
    parameters = dict(vars(from_plain(keys, given, f"policy.rules.{name}")))
    return ShipRule(name=name, weight=weight, parameters=parameters)
