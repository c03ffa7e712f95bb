"""How a server is to draft, and what an engine is told of it.

A `DraftingSetup` is what is wanted, whoever drafts. A `LaunchEngine` is what is known of one: how
it is started, and its writer, which gives parts of a launch, and an `Unsaid` for everything that
has no place in them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, final

from foretoken.config.methods import DraftingMethod, known_methods
from foretoken.errors import ConfigError, one_of
from foretoken.lab.launch.launch import LaunchPart

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


def not_by_load(whose: str, drafting: DraftingSetup) -> Told:
    """That an engine drafts equally far at every load, where that is not what is wanted."""
    if drafting.ranges:
        why = f"{whose} drafts equally far at every load; its longest is written"
        yield Unsaid(drafting.ranges_key, why)


def in_groups(unsaid: Iterable[Unsaid]) -> list[str]:
    """Sentences: what is missing, for all names of which the same is to be said."""
    names: dict[str, list[str]] = {}
    for one in unsaid:
        names.setdefault(one.why, []).append(one.name)
    return [f"{', '.join(dict.fromkeys(group))}: {why}" for why, group in names.items()]


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
