"""What engines call the options of a server and the keys of a drafter.

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
from foretoken.config.methods import DraftingMethod
from foretoken.config.other_engines import find_other, other_names
from foretoken.config.speculative import general_keys
from foretoken.errors import ConfigError
from foretoken.lab.launch.drafting import Told, Unsaid
from foretoken.lab.launch.launch import LaunchPart
from foretoken.lab.launch.values import typed

_FILE = resources.files("foretoken.lab.launch").joinpath("options.toml")
NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
    "openvino": "OpenVINO GenAI",
    "foretoken": "Foretoken",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRow:
    """What an engine calls an option or a key, and its values: a row of the table."""

    to: str | Sequence[str] = ()
    """Its flags, its key, or in Python its keyword, which all get the value."""
    values: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, Sequence[str]] = field(default_factory=dict)
    variable: Mapping[str, str] = field(default_factory=dict)
    by_itself: Sequence[str] = ()
    many: str = ""
    why: str = ""
    also: str = ""
    refused: Sequence[str] = ()


@cache
def _rows(kind: str, engine: str) -> dict[str, OptionRow]:
    table = tomllib.loads(_FILE.read_text("utf-8"))[kind]
    rows = {name: own.get(engine, own.get("others")) for name, own in table.items()}
    return {
        name: OptionRow(**({"to": row} if isinstance(row, str) else row))
        for name, row in rows.items()
        if row is not None
    }


def option_for(engine: str, part: LaunchPart, kind: str) -> tuple[str, Any] | None:
    """What we call an option of an engine, and its value; None: we have none.

    Args:
        engine: whose it is.
        part: it.
        kind: `options` of a server, or `keys` of a drafter.
    """
    for name, row in _rows(kind, engine).items():
        flags = (row.to,) if isinstance(row.to, str) else row.to
        if f"--{part.name}" in flags:
            ours = (own for own, theirs in row.values.items() if theirs == part.value)
            return name, next(ours, typed(part.value))
        for value, switches in row.switches.items():
            if [f"--{part.name}"] == list(switches):
                return name, typed(value)
    return None


def told_option(engine: str, name: str, value: Any) -> Told:
    """An option of `foretoken serve` in the words of an engine.

    Raises:
        ConfigError: it has nothing like this value, and would write something else.
    """
    flag = name.replace("_", "-")
    if engine != "foretoken":
        yield from _told(engine, _rows("options", engine).get(name), name, value)
    elif isinstance(value, bool):
        yield LaunchPart.flag(f"--{flag}" if value else f"--no-{flag}")
    else:
        values = value if isinstance(value, list | tuple) else [value]
        yield from (LaunchPart.flag(f"--{flag}", one) for one in values)


def told_keys(engine: str, keys: Mapping[str, Any]) -> Told:
    """Keys of a speculative config in the words of another engine.

    Raises:
        ConfigError: it has nothing like a value, and would write something else.
    """
    for name, value in keys.items():
        row = _rows("keys", engine).get(name)
        if row is None and engine == "vllm":
            known = find_other("keys", name, engine)
            ours = name in general_keys() | drafter_keys().keys()
            # A key that neither table has is newer than both, and its giver's to know.
            row = OptionRow(to=name) if (not known.gone if known else not ours) else None
        yield from _told(engine, row, name, value)


def _told(engine: str, row: OptionRow | None, name: str, value: Any) -> Told:
    text, whose = str(value).lower() if isinstance(value, bool) else str(value), NAMES[engine]
    row = row or OptionRow()
    told = row.values.get(text, value)
    if text in row.refused:
        allowed = f"another value: {whose} has nothing like it, and its outputs would be others"
        raise ConfigError(name, value, allowed)
    if text in row.by_itself:
        return
    if text in row.switches:
        yield from map(LaunchPart.flag, row.switches[text])
    elif text in row.variable:
        yield LaunchPart(value=row.variable[text], role="before")
    elif not row.to or told == "":
        yield Unsaid(name, row.why or f"{whose} has nothing that stands for it")
        return
    else:
        flags = (row.to,) if isinstance(row.to, str) else row.to
        yield from (part for flag in flags for part in _parts(row, flag, told))
        if isinstance(told, list | tuple) and told[1:] and not row.many and "-" in flags[0]:
            yield Unsaid(name, f"{whose} has one, the first")
    if row.also:
        yield Unsaid(name, row.also)


def _parts(row: OptionRow, flag: str, value: Any) -> Iterator[LaunchPart]:
    if not isinstance(value, list | tuple) or not flag.startswith("-"):
        yield LaunchPart.flag(flag, value)
    elif row.many == " ":
        yield LaunchPart.flag(flag, value[0])
        yield from (LaunchPart(value=one) for one in value[1:])
    else:
        joined = row.many.join(map(str, value)) if row.many else value[0]
        yield LaunchPart.flag(flag, joined)


def todays_word(engine: str, method: DraftingMethod) -> str:
    """An engine's word for a method, by the table of other engines; empty: it has none."""
    words = (
        row.name
        for row in other_names()
        if (row.engine, row.kind, row.method) == (engine, "methods", method.name) and not row.gone
    )
    return next(words, "")


def told_word(engine: str, flag: str, word: str, method: DraftingMethod) -> Told:
    """An engine's word for a method, and that it means another, where there is none for this."""
    yield LaunchPart.flag(flag, word)
    if todays_word(engine, method) != word:
        why = f"{NAMES[engine]} has no {method.name}; {word} is the closest that it has"
        yield Unsaid("method", why)
