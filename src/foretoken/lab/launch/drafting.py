"""How a server is to draft, and what an engine is told of it and of other options.

A `DraftingSetup` is what is wanted, whoever drafts. A `LaunchEngine` is what is known of one: how
it is started, and its writer, which gives parts of a launch, and an `Unsaid` for everything that
has no place in them. What engines call options and keys is in `options.toml`; one without a row has
nothing that stands for it, which is said, never passed over.
"""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal, Self, final

from foretoken.config.drafter import drafter_keys
from foretoken.config.method_registry import DraftingMethod, known_methods
from foretoken.config.other_engines import find_other, other_names
from foretoken.config.speculative import GENERAL_KEYS
from foretoken.errors import ConfigError, one_of
from foretoken.lab.launch.launch import LaunchPart, typed

MOST_RUNNING = 4096
"""Where the last range of a schedule ends."""
Ranges = tuple[tuple[int, int, int], ...]
"""(first, last, drafts) of running requests, from 1 on."""
Schedule = Literal["any", "falling", "one"]
"""What lengths by load an engine can be told: any, none longer than at a lower load, or one."""
BY_LOAD = "num_speculative_tokens_per_batch_size"
LENGTHS = ("num_speculative_tokens", BY_LOAD)


@final
@dataclass(frozen=True, slots=True)
class DraftingSetup:
    """One drafter, and how far it drafts."""

    method: str
    model: str | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[tuple[str, str], ...] = ()
    """Flags of the engine itself with their values (empty: a switch), as somebody gave them."""
    num_drafts: int = 0
    """Draft tokens per verification; the most, where `ranges` says more; 0: not decided."""
    ranges: Ranges = ()
    ranges_key: str = BY_LOAD
    """The key that said so."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """`METHOD`, `METHOD:MODEL`, or a JSON object with vLLM's keys; what they say of how far to
        draft is left out.

        Raises:
            ConfigError: it is none of them, or the method is not known.
        """
        method, _, model = text.partition(":")
        config: dict[str, Any] = {"method": method, **({"model": model} if model else {})}
        if text.lstrip().startswith("{"):
            try:
                config = dict(json.loads(text))
            except (ValueError, TypeError) as error:
                allowed = "METHOD, METHOD:MODEL, or a JSON object with a method"
                raise ConfigError("--drafter", text, allowed) from error
        names = [one.name for one in known_methods()]
        keys = {name: value for name, value in config.items() if name not in LENGTHS}
        method = keys.pop("method", "draft_model" if keys.get("model") else None)
        if method not in names:
            raise ConfigError("--drafter", method, one_of(str(method), names))
        return cls(method, keys.pop("model", None), keys)

    @property
    def name(self) -> str:
        """The method, with the last part of the model's name where it has one."""
        last = (self.model or "").rstrip("/").rsplit("/", 1)[-1]
        return f"{self.method}:{last}" if last else self.method

    @property
    def known(self) -> DraftingMethod:
        """What is known of the method."""
        return next(method for method in known_methods() if method.name == self.method)

    def as_keys(self) -> dict[str, Any]:
        """It as a `speculative_config`."""
        found: dict[str, Any] = {"method": self.method}
        found |= {"model": self.model} if self.model else {}
        found |= {"num_speculative_tokens": self.num_drafts, **self.keys}
        if self.ranges:
            found[BY_LOAD] = [list(one) for one in self.ranges]
        return found


@final
@dataclass(frozen=True, slots=True)
class Unsaid:
    """Something that an engine is not told."""

    name: str
    why: str


Told = Iterator[LaunchPart | Unsaid]
"""Parts of a launch, and what has no place in it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEngine:
    """How one engine is started, and how it is told to draft."""

    name: str
    program: tuple[str, ...] = ()
    model_flag: str = ""
    """What its model stands behind; empty: it is a word by itself."""
    programs: tuple[str, ...] = ()
    """Programs that start it; one with a space is followed by that word."""
    module: str = ""
    """How the Python module begins that starts it."""
    images: tuple[str, ...] = ()
    variables: str = ""
    """How the variables of the environment begin that it reads."""
    completed: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of options that people type, which argparse completes."""
    drafting: str = r"(?!)"
    """Pattern of the names of options about drafting."""
    off: tuple[str, ...] = ()
    """What turns drafting off, where saying nothing does not."""
    fixed: tuple[str, ...] = ()
    """What keeps it to the lengths that it is told."""
    schedule: Schedule = "one"
    word: Callable[[DraftingMethod], str] = lambda _: ""
    """Its word for a method; empty: it has none."""
    tell: Callable[[DraftingSetup], Told] | None = None
    """None: no commands are written for it."""


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

    to: Sequence[str] = ()
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
    found: dict[str, OptionRow] = {}
    for name, row in rows.items():
        given = {"to": row} if isinstance(row, str) else dict(row or {})
        if isinstance(given.get("to"), str):
            given["to"] = (given["to"],)
        found |= {name: OptionRow(**given)} if row is not None else {}
    return found


def option_for(engine: str, part: LaunchPart, kind: str) -> tuple[str, Any] | None:
    """What we call an option of an engine, and its value; None: we have none.

    Args:
        engine: whose it is.
        part: it.
        kind: `options` of a server, or `keys` of a drafter.
    """
    for name, row in _rows(kind, engine).items():
        if f"--{part.name}" in row.to:
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
            ours = name in GENERAL_KEYS | drafter_keys().keys()
            # A key that neither table has is newer than both, and its giver's to know.
            row = OptionRow(to=(name,)) if (not known.gone if known else not ours) else None
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
        several = isinstance(told, list | tuple) and row.to[0].startswith("-")
        for flag in row.to:
            if several and row.many == " ":
                yield LaunchPart.flag(flag, told[0])
                yield from (LaunchPart(value=one) for one in told[1:])
            elif several:
                yield LaunchPart.flag(flag, row.many.join(map(str, told)) if row.many else told[0])
            else:
                yield LaunchPart.flag(flag, told)
        if several and told[1:] and not row.many:
            yield Unsaid(name, f"{whose} has one, the first")
    if row.also:
        yield Unsaid(name, row.also)


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
