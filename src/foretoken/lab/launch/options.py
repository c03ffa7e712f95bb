"""The table of options: what other engines call those of `foretoken serve`, and keys of drafters.

Reads `options.toml`. An option without a row has nothing that stands for it, which is said, never
passed over.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, final

from foretoken.config.drafter import drafter_keys
from foretoken.config.other_engines import find_other
from foretoken.config.speculative import general_keys
from foretoken.errors import ConfigError
from foretoken.lab.launch.drafting import Told, flag_part
from foretoken.lab.launch.launch import ELSEWHERE, LaunchPart

ENGINE_NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
    "openvino": "OpenVINO GenAI",
    "foretoken": "Foretoken",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRow:
    """What an engine calls an option or a key, and its values."""

    to: str | Sequence[str] = ()
    """Its flags, its key, or in Python its keyword, which all get the value."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Our values -> its own; empty: it has none. Others pass as they are."""
    switches: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Our values -> its flags without a value."""
    variable: Mapping[str, str] = field(default_factory=dict)
    """Our values -> `NAME=VALUE` of the environment."""
    by_itself: Sequence[str] = ()
    """Values for which nothing has to be said."""
    many: str = ""
    """How a list is written: what stands between, a space for one word each; empty: its first."""
    why: str = ""
    """What to say where it cannot be told."""
    also: str = ""
    """What to say beside it."""
    refused: Sequence[str] = ()
    """Values without which outputs would be others, so that there is no command."""


@cache
def _table() -> dict[str, dict[str, dict[str, OptionRow]]]:
    """Kind -> name -> engine -> row."""
    file = resources.files("foretoken.lab.launch").joinpath("options.toml")
    return {
        kind: {
            name: {
                engine: OptionRow(**({"to": one} if isinstance(one, str) else one))
                for engine, one in engines.items()
            }
            for name, engines in rows.items()
        }
        for kind, rows in tomllib.loads(file.read_text("utf-8")).items()
    }


def _row(kind: str, name: str, engine: str) -> OptionRow | None:
    rows = _table()[kind].get(name, {})
    return rows.get(engine, rows.get("others"))


def told_option(engine: str, name: str, value: Any) -> Told:
    """An option of `foretoken serve` in the words of an engine.

    Raises:
        ConfigError: it has nothing like this value, and would write something else.
    """
    if engine == "foretoken":
        return _own(name, value)
    return _told(engine, _row("options", name, engine), name, value)


def told_key(engine: str, name: str, value: Any) -> Told:
    """A key of a speculative config in the words of another engine.

    Raises:
        ConfigError: it has nothing like this value, and would write something else.
    """
    row = _row("keys", name, engine)
    if row is None and engine == "vllm":
        known = find_other("keys", name, engine)
        # A key that neither table has is newer than both, and its giver's to know.
        is_theirs = not known.gone if known is not None else name not in _our_keys()
        row = OptionRow(to=name) if is_theirs else None
    return _told(engine, row, name, value)


def _our_keys() -> frozenset[str]:
    return general_keys() | drafter_keys().keys()


def _own(name: str, value: Any) -> Told:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return Told.flag(f"--{flag}" if value else f"--no-{flag}")
    values = value if isinstance(value, list | tuple) else [value]
    return Told.flags((f"--{flag}", one) for one in values)


def _told(engine: str, row: OptionRow | None, name: str, value: Any) -> Told:
    text, whose = _as_text(value), ENGINE_NAMES[engine]
    row = OptionRow() if row is None else row
    if text in row.refused:
        allowed = f"another value: {whose} has nothing like it, and its outputs would be others"
        raise ConfigError(name, value, allowed)
    if text in row.by_itself:
        return Told()
    beside = Told.not_said(name, row.also) if row.also else Told()
    if text in row.switches:
        return Told.flags((flag, True) for flag in row.switches[text]) + beside
    if text in row.variable:
        variable, _, given = row.variable[text].partition("=")
        part = LaunchPart(name=variable, written=variable, value=given, place=ELSEWHERE)
        return Told((part,)) + beside
    told = row.values.get(text, value)
    if not row.to or told == "":
        return Told.not_said(name, row.why or f"{whose} has nothing that stands for it")
    flags = (row.to,) if isinstance(row.to, str) else row.to
    parts = tuple(part for flag in flags for part in _parts(row, flag, told))
    left = isinstance(told, list | tuple) and len(told) > 1 and not row.many and "-" in flags[0]
    only_one = Told.not_said(name, f"{whose} has one, the first") if left else Told()
    return Told(parts) + only_one + beside


def _parts(row: OptionRow, flag: str, value: Any) -> Iterator[LaunchPart]:
    """An option with its value; of a list as much as its engine takes."""
    if not isinstance(value, list | tuple) or not flag.startswith("-"):
        yield flag_part(flag, value)
    elif row.many == " ":
        yield flag_part(flag, value[0])
        yield from (LaunchPart(value=one) for one in value[1:])
    else:
        yield flag_part(flag, row.many.join(map(str, value)) if row.many else value[0])


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
