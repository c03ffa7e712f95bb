"""The table of names about speculation that vLLM, SGLang, llama.cpp and TensorRT-LLM have or had.

Reads `other_engines.toml`, which says of each name what it is here and what became of it there.
Configuration, the command line and the linter ask here. Knows no setting of ours. Torch-free.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal

Kind = Literal["flags", "keys", "methods", "variables"]
"""A flag of a server or keyword of `LLM`, a key of a speculative config, a word for a drafting
method, or a variable of the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherName:
    """One name of another engine."""

    engine: str
    kind: Kind
    name: str
    key: str | None = None
    """Our key in speculative_config that means the same."""
    method: str | None = None
    """Our word for the method."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Values that have another name too, `true` and `false` among them -> ours."""
    say: str | None = None
    """What to type here instead, where it is not accepted."""
    gone: bool = False
    """Whether its own engine has dropped it."""
    now: str | None = None
    """What its own engine wants instead: `key:NAME`, `flag:NAME`, a word; empty for nothing."""
    why: str = ""
    """Why it is gone."""
    flag: str | None = None
    """Of a variable: the flag of its own engine that it stands for."""
    switch: bool = False
    """Of a variable: whether it turns a flag without a value on."""

    @property
    def successor(self) -> str:
        """`now`, where it is left out our own key in a speculative config."""
        if self.now is not None:
            return self.now
        return f"key:{self.key}" if self.key else ""


@cache
def _table() -> dict[str, Any]:
    file = resources.files("foretoken.config").joinpath("other_engines.toml")
    return tomllib.loads(file.read_text("utf-8"))


@cache
def other_names() -> tuple[OtherName, ...]:
    """All of them, engine by engine."""
    return tuple(
        OtherName(engine=engine, kind=kind, name=name, **record)
        for engine, kinds in _table().items()
        if engine != "values"
        for kind, records in kinds.items()
        for name, record in records.items()
    )


def other_values(key: str) -> Mapping[str, str]:
    """Values of our key that have other names too, and ours."""
    found: Mapping[str, str] = _table()["values"].get(key, {})
    return found


@cache
def _by_name() -> dict[tuple[str, str], tuple[OtherName, ...]]:
    found: dict[tuple[str, str], list[OtherName]] = {}
    for row in other_names():
        found.setdefault((row.kind, _plain(row.name)), []).append(row)
    return {place: tuple(rows) for place, rows in found.items()}


def find_other(kind: Kind, name: object, engine: str | None = None) -> OtherName | None:
    """The record of a name, however it is written: dashes, capitals and brackets do not count.

    Args:
        kind: what it is a name of.
        name: as the user wrote it, without the dashes before a flag.
        engine: whose name it is; None: of whichever engine has it first.
    """
    if not isinstance(name, str):
        return None
    rows = _by_name().get((kind, _plain(name)), ())
    mine = [row for row in rows if engine in (None, row.engine)]
    return next((row for row in mine if row.name == name), mine[0] if mine else None)


def _plain(name: str) -> str:
    return name.strip("[]").replace("-", "_").lower()
